"""Bytes that torch's allocator hands out on a rank of Megatron-LM, term by term from its source and Transformer Engine's.

NVIDIA/Megatron-LM d98e8a6, megatron/core: what a layer, the loss and the optimizer keep, at the moments of a step with most of
it. No number was fitted to a measurement.
"""

import numpy as np

from autotune.prediction.equations.cases import CONTEXT_METHODS, Array, Cases, recomputes
from autotune.prediction.equations.software import (
    ALL_GATHER,
    BLOCK,
    ENGINE_LOSS,
    FLASH,
    NATIVE_LOSS,
    RECOMPUTED_MODULES,
    UNFUSED,
)
from search_spaces.knobs.computation import MODULES


def allocated_bytes(cases: Cases, layers: Array, in_flight: Array, first: Array, last: Array) -> dict[str, Array]:
    """Bytes by tag of a rank with `layers` layers, of which it keeps `in_flight` micro-batches, at its fullest moment. `first`,
    `last`: 1 if it has the input table and the loss. `host`: bytes in host memory.

    1. What exists all the time: parameters, gradients, states, workspaces, buffers.
    2. As the loss of the last micro-batch in flight is computed: what all layers keep, and the logits.
    3. As the backward of a layer runs: the same without logits, with a layer recomputed and its gradients.
    4. As the optimizer runs: gradients in fp32 if the buffer has 16 bits.
    """
    rank = _Rank(cases, layers, in_flight, first, last)
    tags, buffers = rank.states(), rank.buffers()
    moments = rank.tokens * (rank.kept() + np.maximum(last * rank.loss(), rank.backward()))
    return tags | {"activations": np.maximum(moments, tags.pop("step")), "buffers": buffers}


def recomputes_module(cases: Cases, module: str) -> Array:
    """1 if a module, by Megatron's name, is recomputed selectively by Megatron's arguments or our knob: its results are not
    kept."""
    named = np.floor(cases.megatron.recompute_modules / 2 ** RECOMPUTED_MODULES.index(module)) % 2
    named = np.where(cases.megatron.recompute_modules > 0, named, float(module == "core_attn"))
    ours = next((name for name, theirs in MODULES.items() if theirs == module), None)
    by_knob = np.zeros(1) if ours is None else recomputes(cases.layouts, ours)
    return np.where((cases.megatron.states > 0) & (cases.layouts.activation_checkpointing == 1), named, by_knob)


class _Rank:
    """One pipeline rank of the cases; bytes of activations are per token of a micro-batch."""

    def __init__(self, cases: Cases, layers: Array, in_flight: Array, first: Array, last: Array) -> None:
        self.cases, self.megatron, self.shapes, self.layouts = cases, cases.megatron, cases.shapes, cases.layouts
        megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
        self.first, self.last, self.modules = first, last, last * shapes.modules
        self.sparse = shapes.experts > 0
        share = np.where(self.sparse, shapes.expert_share, 0.0)

        def of_rank(ends: Array, kind: int, otherwise: Array) -> Array:
            counts = np.where(last > 0, ends[:, 1, kind], ends[:, 0, kind])
            return np.where(np.isfinite(counts) & (first + last > 0), counts, otherwise)

        self.experts = of_rank(megatron.rank_layers, 1, layers * share)
        self.dense = of_rank(megatron.rank_layers, 0, layers) - self.experts
        self.kept_experts = of_rank(megatron.kept_layers, 1, layers * share * in_flight)
        self.kept_dense = of_rank(megatron.kept_layers, 0, layers * in_flight) - self.kept_experts
        self.tokens: Array = layouts.micro_batch_size * shapes.sequence / layouts.context
        self.sequence_ranks = np.where(layouts.sequence_parallel > 0, layouts.tensor, 1.0)
        self.in_fp8 = (megatron.fp8_recipe > 0) | (layouts.rounding_bytes > 0)
        self.width = layouts.parameter_bytes
        self.hidden_state: Array = layouts.parameter_bytes * shapes.hidden / self.sequence_ranks
        # The inputs of products, of which fp8 keeps the transposed copy that the gradient of the weight is made of.
        self.input_width = np.where(self.in_fp8, 1.0, self.width)
        self.dense_ffn = np.where(self.sparse, shapes.dense_ffn, shapes.ffn)
        self.mask = np.where(megatron.hidden_dropout > 0, shapes.hidden / self.sequence_ranks, 0.0)
        self.rows = shapes.experts_per_token * layouts.expert_tensor / self.sequence_ranks
        self.vocabulary: Array = shapes.vocabulary / layouts.tensor

    def layer_parameters(self) -> tuple[Array, Array, Array, Array]:
        """A rank's part of a layer: its attention and norms, a dense MLP, what is beside the experts (the router and the shared
        expert), and its experts."""
        shapes, t, h, bias = self.shapes, self.layouts.tensor, self.shapes.hidden, self.megatron.bias_linear
        fused, latent, norm = shapes.query + 2 * shapes.key_value, shapes.key_value_rank, 2 - shapes.rms_norm
        attention = (h * fused + shapes.query * h + bias * fused) / t + bias * h
        attention = attention + self.megatron.qk_layernorm * 2 * norm * shapes.query / shapes.heads
        keys = latent * (shapes.query - shapes.heads * shapes.rotated + shapes.value)
        narrow = h * (shapes.query_rank + latent + shapes.rotated) + norm * (shapes.query_rank + latent)
        up = np.where(shapes.query_rank > 0, shapes.query_rank, h) * shapes.query
        attention = np.where(latent > 0, narrow + (up + keys + shapes.value * h) / t, attention)

        def mlp(ffn: Array, ranks: Array) -> Array:
            return (shapes.matrices * h * ffn + bias * (shapes.matrices - 1) * ffn) / ranks + bias * h

        beside = shapes.experts * h + np.where(shapes.shared_ffn > 0, mlp(shapes.shared_ffn, t), 0.0)
        experts = shapes.experts / self.layouts.expert * mlp(shapes.ffn, self.layouts.expert_tensor)
        return attention + 2 * norm * h, mlp(self.dense_ffn, t), beside, experts

    def tables(self) -> Array:
        """Parameters outside of layers. Tied tables are on both ends of a pipeline; modules for multi-token prediction read a
        copy of the input table."""
        shapes, norm = self.shapes, (2 - self.shapes.rms_norm) * self.shapes.hidden
        output = self.last * np.where((shapes.tied > 0) & (self.first > 0), 0.0, 1.0)
        copy = np.where((self.modules > 0) & (shapes.tied == 0), 1 - self.first, 0.0)
        rows = (self.first + output + copy) * self.vocabulary + self.first * shapes.positions
        return rows * shapes.hidden + self.modules * (2 * shapes.hidden**2 + 3 * norm) + self.last * norm

    def states(self) -> dict[str, Array]:
        """Bytes of parameters, gradients and optimizer states; `step`: of the fp32 gradients made of 16-bit ones.

        The distributed optimizer divides states over the data-parallel ranks of an instance. Gradients stay whole, in fp32
        unless they are reduced in 16 bits.
        """
        megatron, layouts = self.megatron, self.layouts
        attention, dense, beside, experts = self.layer_parameters()
        with_experts = self.experts + np.where(self.sparse, self.modules, 0.0)
        layers = self.dense + self.experts + self.modules
        matrices = layers * attention + (layers - with_experts) * dense + with_experts * beside
        tables, experts = self.tables(), with_experts * experts
        shard, alike = (
            np.where(layouts.zero_stage >= 1, np.maximum(ranks / megatron.dist_optimizer_instances, 1.0), 1.0)
            for ranks in (layouts.shard, layouts.alike)
        )
        master = np.where(self.width < 4, 4.0, 0.0)  # fp32 parameters are their own
        states = (matrices / shard + experts / alike) * (master + layouts.moment_bytes)
        states = states + tables / shard * (master + layouts.other_moment_bytes)
        whole, local = matrices + tables + experts, (matrices + tables) / shard + experts / alike
        width = np.minimum(self.cases.software.gradient_bytes, layouts.accumulation_bytes)
        parameters, gradients = (np.where(layouts.zero_stage >= stage, local, whole) for stage in (3, 2))
        # In fp8 each matrix of a layer has a copy for forward and one for backward, beside or in place of its 16 bits.
        copies = np.where(self.in_fp8 & (megatron.fp8_param_gather == 0), 2.0, 0.0)
        return {
            "parameters": parameters * self.width + copies * (parameters - tables),
            "gradients": gradients * width,
            "optimizer_state": states * (1 - layouts.offload_optimizer),
            "host": states * layouts.offload_optimizer,
            "step": np.where(width < 4, 4.0 * local, 0.0),
        }

    def buffers(self) -> Array:
        """Bytes that are allocated once and stay.

        - cuBLAS: a workspace for the thread of forward and one for that of backward; Transformer Engine: one, and four for the
          streams of grouped products.
        - The gathered input of the output projection or of experts, and the products of local attention.
        - What stands for gradients that were added to their buffers: a tensor for each shape of a weight.
        - At stage 3 the tables and a layer, gathered.
        """
        megatron, shapes, layouts, h, t = self.megatron, self.shapes, self.layouts, self.shapes.hidden, self.layouts.tensor
        engine = np.where((megatron.transformer_impl == 0) | self.sparse, 1.0, 0.0)
        engine = engine + np.where((megatron.grouped_gemm > 0) & self.sparse, 4.0, 0.0)
        group = layouts.expert * layouts.expert_tensor
        exchanged = self.sparse & (megatron.dispatcher == ALL_GATHER) & (group > 1)
        gathered = np.maximum(np.where(self.sequence_ranks > 1, self.last * self.width * h, 0.0),
                              np.where(exchanged, group * self.hidden_state, 0.0))  # fmt: skip
        local = np.where(megatron.transformer_impl > 0, self.width * shapes.heads / t * shapes.sequence, 0.0)
        mlp = shapes.matrices * np.where(self.sparse & (self.dense == 0), 0.0, self.dense_ffn)
        stand_ins = (2 * shapes.query + 2 * shapes.key_value + mlp) / t + self.last * self.vocabulary
        stand_ins = stand_ins + np.where(self.sparse, shapes.matrices * shapes.ffn / layouts.expert_tensor, 0.0)
        attention, dense, beside, experts = self.layer_parameters()
        unit = attention + np.where(self.experts > 0, beside + experts, dense) + self.tables()
        weights = megatron.gradient_accumulation_fusion * stand_ins * h + np.where(layouts.zero_stage >= 3, unit, 0.0)
        workspaces = 2 * megatron.stream_workspace + engine * megatron.engine_workspace
        buffers: Array = workspaces + self.tokens * (gathered + local) + self.width * weights
        return buffers

    def kept(self) -> Array:
        """Bytes kept for backward as the loss is computed."""
        layouts, megatron, unit = self.layouts, self.megatron, self.megatron.recompute_num_layers
        dense, experts = (self.attention() + mlp for mlp in (self.mlp(), self.expert_mlp()))
        layers = np.maximum(self.kept_dense + self.kept_experts, 1e-9)
        # Full recomputation keeps the input of each unit, or of as many layers of a stage; all layers but one are offloaded.
        full, block = layouts.activation_checkpointing == 2, megatron.recompute_method == BLOCK
        of_stages = np.minimum(unit * layouts.virtual_stages * layers / np.maximum(self.dense + self.experts, 1.0), layers)
        offloads = (megatron.activation_offload > 0) | (layouts.offload_activations > 0)
        whole = np.select(
            [full & block, full, offloads], [1 - of_stages / layers, 0.0, 1 / np.maximum(layers, 1.0)], default=1.0
        )
        kept = whole * (self.kept_dense * dense + self.kept_experts * experts)
        kept = kept + np.where(full, np.where(block, of_stages, layers / unit) * self.hidden_state, 0.0)
        # A module for multi-token prediction keeps both inputs of its norms and their results, its projection's, and a norm's.
        module = 6 * self.hidden_state + np.where(self.sparse, experts, dense)
        logits = np.where(megatron.cross_entropy_fusion == ENGINE_LOSS, self.width, 4.0) * self.vocabulary
        # The input of the next micro-batch and the gradient of the last one's are there, too; looped ranks receive one more.
        passing = np.where(layouts.pipeline > 1, 2.0, 0.0) + np.where(layouts.virtual_stages > 1, 1.0, 0.0)
        ends = (2 * self.last + passing) * self.hidden_state + self.first * self.mask
        # Gradients of the output projection that wait, with its inputs.
        limit = np.where(megatron.wgrad_deferral_limit > 0, megatron.wgrad_deferral_limit, np.inf)
        waiting = self.last * np.where(layouts.pipeline > 1, np.minimum(limit, layouts.accumulation - 1), 0.0)
        waiting = waiting * megatron.defer_embedding_wgrad * (self.width * self.vocabulary + self.hidden_state)
        loader_mask = megatron.create_attention_mask * self.shapes.sequence / layouts.context
        everything: Array = kept + self.modules * (module + logits) + ends + waiting + loader_mask
        return everything

    def attention(self) -> Array:
        """Bytes that attention keeps with the norm before it: the norm's input and result, a mask of dropout, the projected
        states, what the kernel saves, and the input of the last product."""
        megatron, shapes, latent = self.megatron, self.shapes, self.shapes.key_value_rank > 0
        # Latent attention has its norm in a kernel of its own, which can be recomputed by itself.
        result = self.input_width / self.width * (1 - latent * recomputes_module(self.cases, "layernorm"))
        projects = 1 - recomputes_module(self.cases, "mla_up_proj")
        # The result of flash-attn, and that of some heads for all tokens, is copied for the next product: both are kept.
        exchanged = (self.layouts.context > 1) & (self.layouts.context_parallel_method == CONTEXT_METHODS.index("ulysses"))
        outputs = np.where((megatron.attention_backend == FLASH) | exchanged, 2.0, 1.0) + np.where(self.in_fp8, 0.5, 0.0)
        normed = megatron.qk_layernorm * (shapes.query + shapes.key_value)
        joined = shapes.query + 2 * shapes.key_value + outputs * shapes.query + normed
        joined = np.where(latent, projects * (2 * shapes.query + shapes.value) + outputs * shapes.value, joined)
        narrow = (self.width + projects * self.input_width) * (shapes.query_rank + shapes.key_value_rank)
        narrow = np.where(latent, narrow, 0.0) / self.sequence_ranks
        # Results of softmax (without Apex torch's, in fp32) and of dropout, and its mask.
        softmax = np.where((megatron.transformer_impl > 0) & (megatron.persist_layer_norm == 0), 4.0, self.width)
        score_bytes = softmax + np.where(megatron.attention_dropout > 0, 1 + self.width, 0.0)
        scores = (1 - recomputes_module(self.cases, "core_attn")) * score_bytes * self.scores()
        sums = np.where(megatron.attention_backend < UNFUSED, 4 * shapes.heads, 0.0)  # the logarithm of each row's, in fp32
        inside = (self.width * joined + sums) / self.layouts.tensor + scores
        attention: Array = (1 + result) * self.hidden_state + self.mask + narrow + inside
        return attention

    def scores(self) -> Array:
        """Scores of attention that no kernel fuses, per token."""
        unfused = self.megatron.attention_backend >= UNFUSED
        return np.where(unfused, self.shapes.heads * self.shapes.sequence / self.layouts.tensor, 0.0)

    def hidden_layer(self, ffn: Array) -> Array:
        """Bytes per row of an MLP's hidden layer: the result of the first product and the input of the second; without fusion
        the activated gate too."""
        gate = np.where(self.megatron.bias_gelu_fusion > 0, 2.0, 3.0)
        return (self.width * np.where(self.shapes.matrices == 3, gate, 1.0) + self.input_width) * ffn

    def mlp(self) -> Array:
        """Bytes of a layer's MLP with the norm before it."""
        hidden = self.hidden_layer(self.dense_ffn) / self.layouts.tensor
        inside = self.input_width / self.width * self.hidden_state + hidden
        return self.hidden_state + self.mask + (1 - recomputes_module(self.cases, "mlp")) * inside

    def expert_mlp(self) -> Array:
        """Bytes of a layer's experts with the norm before them, whose result the router keeps: of rows that each of the ranks
        which divide an expert has whole."""
        megatron, shapes, h = self.megatron, self.shapes, self.shapes.hidden
        # Probabilities weigh the activation, in the same kernel if it is gated and fused.
        weighs = np.where((shapes.matrices == 3) & (megatron.bias_gelu_fusion > 0), 0.0, self.width)
        first = self.width * (shapes.matrices - 1) * shapes.ffn
        activated = (1 - recomputes_module(self.cases, "moe_act")) * (
            self.hidden_layer(shapes.ffn) + weighs * shapes.ffn - first
        )
        # index_add_, the deterministic way back to the order of tokens, keeps the rows that it adds.
        added = np.where((megatron.deterministic > 0) & (megatron.permute_fusion == 0), self.width, 0.0)
        rows = self.rows * ((self.input_width + added) * h + (first + activated) / self.layouts.expert_tensor)
        shared = (
            (1 - recomputes_module(self.cases, "shared_experts")) * self.hidden_layer(shapes.shared_ffn) / self.layouts.tensor
        )
        norms = (2 - recomputes_module(self.cases, "layernorm")) * self.hidden_state + self.mask
        return norms + (1 - recomputes_module(self.cases, "moe")) * (shared + rows)

    def loss(self) -> Array:
        """Bytes of the logits as the loss is computed: in the compute type and as fp32 probabilities, or their gradient."""
        kinds = [self.megatron.cross_entropy_fusion == kind for kind in (NATIVE_LOSS, ENGINE_LOSS)]
        return np.select(kinds, [self.width + 8.0, self.width], default=self.width + 4.0) * self.vocabulary

    def backward(self) -> Array:
        """Bytes as a layer runs backward: the layer if it is recomputed, and the gradients of scores or of the MLP's hidden
        layer, of its result and of its input."""
        shapes, layouts = self.shapes, self.layouts
        with_experts = self.experts + np.where(self.sparse, self.modules, 0.0) > 0
        dense = np.where(self.dense > 0, self.dense_ffn / layouts.tensor, 0.0)
        # The input of the second product is freed before the gradient of the activation's input exists.
        products = shapes.matrices - 1
        experts = self.rows * (shapes.ffn / layouts.expert_tensor + shapes.hidden / products)
        hidden = self.width * products * np.maximum(dense, np.where(with_experts, experts, 0.0))
        layer = self.attention() + np.where(with_experts, self.expert_mlp(), self.mlp())
        again = np.where(self.megatron.recompute_method == BLOCK, 1.0, self.megatron.recompute_num_layers)
        again = np.where(layouts.activation_checkpointing == 2, again, 0.0)
        return again * layer + np.maximum(2 * self.width * self.scores(), hidden) + 2 * self.hidden_state
