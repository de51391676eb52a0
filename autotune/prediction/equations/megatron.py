"""Bytes that torch's allocator hands out on a rank of Megatron-LM, term by term from its source and Transformer Engine's.

NVIDIA/Megatron-LM d98e8a6, megatron/core: what a layer, the loss and the optimizer keep, at the moments of a step with most of
it. No number was fitted to a measurement.
"""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.software import (
    ALL_GATHER,
    BLOCK,
    ENGINE_LOSS,
    FLASH,
    NATIVE_LOSS,
    RECOMPUTED_MODULES,
    UNFUSED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One pipeline rank of the cases."""

    dense: Array
    """Layers without experts."""
    experts: Array
    """Layers with experts."""
    kept_dense: Array
    kept_experts: Array
    first: Array
    last: Array
    modules: Array


def allocated_bytes(cases: Cases, layers: Array, in_flight: Array, first: Array, last: Array) -> dict[str, Array]:
    """Bytes by tag of a rank with `layers` layers, of which it keeps `in_flight` micro-batches, at its fullest moment. `first`,
    `last`: 1 if it has the input table and the loss.

    1. What exists all the time: parameters, gradients, states, workspaces, buffers.
    2. As the loss of the last micro-batch in flight is computed: what all layers keep, and the logits.
    3. As the backward of a layer runs: the same without logits, with a layer recomputed and its gradients.
    4. As the optimizer runs: gradients in fp32 if the buffer has 16 bits.
    """
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    own = np.isfinite(megatron.rank_layers) & (cases.software.measured_rank > 0)
    share = np.where(shapes.experts > 0, shapes.expert_share, 0.0)
    expert_layers = np.where(own, megatron.rank_expert_layers, layers * share)
    kept_experts = np.where(own, megatron.kept_expert_layers, layers * share * in_flight)
    rank = _Rank(
        dense=np.where(own, megatron.rank_layers, layers) - expert_layers,
        experts=expert_layers,
        kept_dense=np.where(own, megatron.kept_layers, layers * in_flight) - kept_experts,
        kept_experts=kept_experts,
        first=first,
        last=last,
        modules=last * shapes.modules,
    )
    tags = _states(cases, rank)
    tokens = layouts.micro_batch_size * shapes.sequence / layouts.context
    kept = tokens * _kept(cases, rank)
    buffers = _workspaces(cases) + _buffers(cases, rank, tokens)
    loss = tokens * rank.last * _loss(cases)
    kept = kept + tokens * rank.last * _deferred(cases)
    backward = tokens * _backward(cases, rank)
    step = tags.pop("step")
    moments = np.maximum(np.maximum(kept + loss, kept + backward), step)
    return tags | {"activations": moments, "buffers": buffers}


def _layer_parameters(cases: Cases) -> tuple[Array, Array, Array, Array]:
    """Parameters of a rank's part of a layer: its attention and norms, a dense MLP, what is beside the experts (the router and
    the shared expert), and a rank's experts."""
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    t, h, bias, norm = layouts.tensor, shapes.hidden, megatron.bias_linear, 2 - shapes.rms_norm
    fused = shapes.query + 2 * shapes.key_value
    attention = (h * fused + shapes.query * h + bias * fused) / t + bias * h + megatron.qk_layernorm * 2 * norm * _head(cases)
    latent = shapes.key_value_rank
    keys = latent * (shapes.query - shapes.heads * shapes.rotated + shapes.value)
    narrow = h * (shapes.query_rank + latent + shapes.rotated) + norm * (shapes.query_rank + latent)
    up = np.where(shapes.query_rank > 0, shapes.query_rank, h) * shapes.query
    attention = np.where(latent > 0, narrow + (up + keys + shapes.value * h) / t, attention)

    def mlp(width: Array, ranks: Array) -> Array:
        return (shapes.matrices * h * width + bias * (shapes.matrices - 1) * width) / ranks + bias * h

    beside = shapes.experts * h + np.where(shapes.shared_ffn > 0, mlp(shapes.shared_ffn, t), 0.0)
    own_experts = shapes.experts / layouts.expert * mlp(shapes.ffn, layouts.expert_tensor)
    dense = mlp(np.where(shapes.experts > 0, shapes.dense_ffn, shapes.ffn), t)
    return attention + 2 * norm * h, dense, beside, own_experts


def _head(cases: Cases) -> Array:
    return np.where(cases.megatron.kv_channels > 0, cases.megatron.kv_channels, cases.shapes.query / cases.shapes.heads)


def _tables(cases: Cases, rank: _Rank) -> Array:
    """Parameters outside of layers. Tied tables are held on both ends of a pipeline; modules for multi-token prediction read a
    copy of the input table."""
    shapes, layouts = cases.shapes, cases.layouts
    table = shapes.vocabulary * shapes.hidden / layouts.tensor
    output = rank.last * np.where((shapes.tied > 0) & (rank.first > 0), 0.0, 1.0)
    copy = np.where((rank.modules > 0) & (shapes.tied == 0), 1 - rank.first, 0.0)
    norm = 2 - shapes.rms_norm
    modules = rank.modules * (2 * shapes.hidden**2 + 3 * norm * shapes.hidden)
    return (
        (rank.first + output + copy) * table
        + rank.first * shapes.positions * shapes.hidden
        + modules
        + rank.last * norm * (shapes.hidden)
    )


def _states(cases: Cases, rank: _Rank) -> dict[str, Array]:
    """Bytes of parameters, gradients and optimizer states, and of the fp32 gradients that an optimizer makes of 16-bit ones.

    The distributed optimizer divides states over the data-parallel ranks of an instance; gradients stay whole, in fp32 unless
    they are reduced in 16 bits (ddp_config.grad_reduce_in_fp32, which fp16 does not set).
    """
    megatron, layouts = cases.megatron, cases.layouts
    attention, dense, beside, own_experts = _layer_parameters(cases)
    experts_too = np.where(cases.shapes.experts > 0, rank.modules, 0.0)
    matrices = (rank.dense + rank.experts + rank.modules) * attention + (rank.dense + rank.modules - experts_too) * dense
    matrices = matrices + (rank.experts + experts_too) * beside
    tables, expert = _tables(cases, rank), (rank.experts + experts_too) * own_experts
    divided, instances = layouts.zero_stage >= 1, megatron.dist_optimizer_instances
    ranks = np.where(divided, np.maximum(layouts.shard / instances, 1.0), 1.0)
    expert_ranks = np.where(divided, np.maximum(layouts.alike / instances, 1.0), 1.0)
    master = 4.0
    states = (matrices / ranks + expert / expert_ranks) * (master + layouts.moment_bytes)
    states = states + tables / ranks * (master + layouts.other_moment_bytes)
    whole, local = matrices + tables + expert, (matrices + tables) / ranks + expert / expert_ranks
    width = np.minimum(cases.software.gradient_bytes, layouts.accumulation_bytes)
    held, reduced = (np.where(layouts.zero_stage >= stage, local, whole) for stage in (3, 2))
    copies = np.where(_in_fp8(cases) & (megatron.fp8_param_gather == 0), 2.0, 0.0)
    return {
        # In fp8 each matrix of a layer has a copy for forward and one for backward, beside or in place of its 16 bits.
        "parameters": held * layouts.parameter_bytes + copies * (held - tables),
        "gradients": reduced * width,
        "optimizer_state": states * (1 - layouts.offload_optimizer),
        "host": states * layouts.offload_optimizer,
        "step": np.where(width < 4, 4.0 * local, 0.0),
    }


def _workspaces(cases: Cases) -> Array:
    """cuBLAS has one workspace for the thread of forward and one for that of backward; Transformer Engine one, and one for each
    of four streams of grouped products."""
    megatron, shapes = cases.megatron, cases.shapes
    engine = np.where((megatron.transformer_impl == 0) | (shapes.experts > 0), megatron.engine_workspace, 0.0)
    grouped = np.where((megatron.grouped_gemm > 0) & (shapes.experts > 0), 4.0, 0.0)
    return 2 * megatron.stream_workspace + engine + grouped * megatron.engine_workspace


def _buffers(cases: Cases, rank: _Rank, tokens: Array) -> Array:
    """What is allocated once and kept: the input of the output projection, gathered from the tensor ranks; the products of
    local attention; the results that stand for gradients which were added to their buffers already, one for each shape."""
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    width, t, h = layouts.parameter_bytes, layouts.tensor, shapes.hidden
    gathers = (layouts.sequence_parallel > 0) & (t > 1)
    gathered = np.where(gathers, rank.last * tokens * width * h, 0.0)
    group = layouts.expert * layouts.expert_tensor
    exchanged = (shapes.experts > 0) & (megatron.dispatcher == ALL_GATHER) & (group > 1)
    gathered = np.maximum(gathered, np.where(exchanged, tokens / _divided(cases) * group * width * h, 0.0))
    local = np.where(megatron.transformer_impl > 0, tokens * width * shapes.heads / t * shapes.sequence, 0.0)
    fused = shapes.query + 2 * shapes.key_value
    mlp = shapes.matrices * h * np.where(shapes.experts > 0, (rank.dense > 0) * shapes.dense_ffn, shapes.ffn)
    stand_ins = (h * fused + h * shapes.query + mlp) / t + rank.last * shapes.vocabulary * h / t
    stand_ins = stand_ins + np.where(shapes.experts > 0, shapes.matrices * h * shapes.ffn / layouts.expert_tensor, 0.0)
    attention, dense, beside, own_experts = _layer_parameters(cases)
    unit = attention + np.where(rank.experts > 0, beside + own_experts, dense)
    sharded = np.where(layouts.zero_stage >= 3, width * (unit + _tables(cases, rank)), 0.0)
    return gathered + local + sharded + megatron.gradient_accumulation_fusion * width * stand_ins


def _divided(cases: Cases) -> Array:
    return np.where(cases.layouts.sequence_parallel > 0, cases.layouts.tensor, 1.0)


def _kept(cases: Cases, rank: _Rank) -> Array:
    """Bytes per token kept for backward as the loss is computed."""
    shapes, layouts, megatron = cases.shapes, cases.layouts, cases.megatron
    width, h, sp = layouts.parameter_bytes, shapes.hidden, _divided(cases)
    attention, dense, expert = _attention_kept(cases), _dense_kept(cases), _expert_kept(cases)
    dense_layer, expert_layer, unit = attention + dense, attention + expert, megatron.recompute_num_layers
    # Full recomputation keeps the input of each unit, or of as many layers of a stage.
    full, block = layouts.activation_checkpointing == 2, megatron.recompute_method == BLOCK
    layers = rank.kept_dense + rank.kept_experts
    recomputed = np.where(
        block, np.minimum(unit * layouts.virtual_stages * layers / np.maximum(rank.dense + rank.experts, 1.0), layers), layers
    )
    units, whole = recomputed / np.where(block, 1.0, unit), 1 - recomputed / np.maximum(layers, 1.0)
    # All layers but the last one are offloaded.
    whole = np.where(
        full,
        whole,
        np.where((megatron.activation_offload > 0) | (layouts.offload_activations > 0), 1 / np.maximum(layers, 1.0), 1.0),
    )
    kept = whole * (rank.kept_dense * dense_layer + rank.kept_experts * expert_layer) + np.where(
        full, units * width * h / sp, 0.0
    )
    # A module for multi-token prediction: both inputs of its norms and their results, its projection's, its last norm's.
    module = 6 * width * h / sp + np.where(shapes.experts > 0, expert_layer, dense_layer) + _loss_kept(cases)
    ends = rank.last * 2 * width * h / sp + rank.first * (megatron.hidden_dropout > 0) * h / sp
    # The input of the next micro-batch and the gradient of the last one's are there, too; looped ranks receive one more.
    passing = np.where(layouts.pipeline > 1, 2.0, 0.0) + np.where(layouts.virtual_stages > 1, 1.0, 0.0)
    mask = shapes.sequence / layouts.context
    return kept + rank.modules * module + ends + passing * width * h / sp + mask


def _recomputes(cases: Cases, module: str) -> Array:
    """1 if a module is recomputed selectively: then its results are not kept."""
    megatron, selective = cases.megatron, cases.layouts.activation_checkpointing == 1
    named = np.floor(megatron.recompute_modules / 2 ** RECOMPUTED_MODULES.index(module)) % 2
    named = np.where(megatron.recompute_modules > 0, named, float(module == "core_attn"))
    return np.where(selective, named, 0.0)


def _input_bytes(cases: Cases) -> Array:
    """Bytes per element kept of the inputs of products: with fp8 the transposed copy that the weight's gradient is made of."""
    return np.where(_in_fp8(cases), 1.0, cases.layouts.parameter_bytes)


def _in_fp8(cases: Cases) -> Flags:
    computes: Flags = (cases.megatron.fp8_recipe > 0) | (cases.layouts.rounding_bytes > 0)
    return computes


def _attention_kept(cases: Cases) -> Array:
    """Bytes per token that attention keeps with the norm before it: the norm's input and result, a mask of dropout, the
    projected states, what the kernel saves, and the input of the last product."""
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    width, t, h, sp = layouts.parameter_bytes, layouts.tensor, shapes.hidden, _divided(cases)
    latent = shapes.key_value_rank > 0
    # Latent attention has its norm in a kernel of its own, which can be recomputed by itself.
    result = _input_bytes(cases) * (1 - latent * _recomputes(cases, "layernorm"))
    norms = (width + result + np.where(megatron.hidden_dropout > 0, 1.0, 0.0)) * h / sp
    projects = 1 - _recomputes(cases, "mla_up_proj")
    # flash-attn's result has another order than the next product's input: both are kept.
    outputs = np.where(megatron.attention_backend == FLASH, 2.0, 1.0) + (_input_bytes(cases) < width) * 0.5
    normed = megatron.qk_layernorm * (shapes.query + shapes.key_value)
    joined = shapes.query + 2 * shapes.key_value + outputs * shapes.query + normed
    joined = np.where(latent, projects * (2 * shapes.query + shapes.value) + outputs * shapes.value, joined)
    narrow = (width + projects * _input_bytes(cases)) * (shapes.query_rank + shapes.key_value_rank)
    norms = norms + np.where(latent, narrow, 0.0) / sp
    scores = (1 - _recomputes(cases, "core_attn")) * _scores(cases, _score_bytes(cases))
    sums = np.where(megatron.attention_backend < UNFUSED, 4 * shapes.heads, 0.0)  # the logarithm of each row's, in fp32
    kept: Array = norms + (width * joined + sums) / t + scores
    return kept


def _score_bytes(cases: Cases) -> Array:
    """Bytes kept for each score: results of softmax and of dropout, and its mask; without Apex softmax is torch's, in fp32."""
    megatron, width = cases.megatron, cases.layouts.parameter_bytes
    softmax = np.where((megatron.transformer_impl > 0) & (megatron.persist_layer_norm == 0), 4.0, width)
    return softmax + np.where(megatron.attention_dropout > 0, 1 + width, 0.0)


def _scores(cases: Cases, score_bytes: Array) -> Array:
    """Bytes per token of the scores of attention that no kernel fuses."""
    shapes = cases.shapes
    unfused = cases.megatron.attention_backend >= UNFUSED
    return np.where(unfused, score_bytes * shapes.heads * shapes.sequence / cases.layouts.tensor, 0.0)


def _mlp_kept(cases: Cases, width_of_mlp: Array) -> Array:
    """Bytes per row of an MLP's hidden layer: of the result of the first product and the input of the second; without fusion
    the activated gate too."""
    width, gated = cases.layouts.parameter_bytes, cases.shapes.matrices == 3
    parts = np.where(gated, np.where(cases.megatron.bias_gelu_fusion > 0, 2.0, 3.0), 1.0)
    return (width * parts + _input_bytes(cases)) * width_of_mlp


def _dense_kept(cases: Cases) -> Array:
    """Bytes per token of a layer's MLP with the norm before it."""
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    h, sp, again = shapes.hidden, _divided(cases), _recomputes(cases, "mlp")
    ends = (layouts.parameter_bytes + np.where(megatron.hidden_dropout > 0, 1.0, 0.0)) * h / sp
    hidden = _mlp_kept(cases, np.where(shapes.experts > 0, shapes.dense_ffn, shapes.ffn)) / layouts.tensor
    return ends + (1 - again) * (_input_bytes(cases) * h / sp + hidden)


def _expert_kept(cases: Cases) -> Array:
    """Bytes per token of a layer's experts with the norm before them, whose result the router keeps: of rows that all ranks
    which divide an expert have whole."""
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    width, h, sp, again = layouts.parameter_bytes, shapes.hidden, _divided(cases), _recomputes(cases, "moe")
    ends = (width + np.where(megatron.hidden_dropout > 0, 1.0, 0.0)) * h / sp
    result = (1 - _recomputes(cases, "layernorm")) * width * h / sp
    rows = shapes.experts_per_token * layouts.expert_tensor / sp
    activates = 1 - _recomputes(cases, "moe_act")
    # Probabilities weigh the activation, in the same kernel if it is gated and fused.
    fused = (shapes.matrices == 3) & (megatron.bias_gelu_fusion > 0)
    hidden = _mlp_kept(cases, shapes.ffn) + np.where(fused, 0.0, width) * shapes.ffn
    first = width * (shapes.matrices - 1) * shapes.ffn
    hidden = (first + activates * (hidden - first)) / layouts.expert_tensor
    # index_add_, the deterministic way back to the order of tokens, keeps the rows that it adds.
    added = np.where((megatron.deterministic > 0) & (megatron.permute_fusion == 0), width * h, 0.0)
    shared = (1 - _recomputes(cases, "shared_experts")) * _mlp_kept(cases, shapes.shared_ffn) / layouts.tensor
    return ends + result + (1 - again) * (shared + rows * (_input_bytes(cases) * h + added + hidden))


def _loss(cases: Cases) -> Array:
    """Bytes per token of the logits as the loss is computed: in the compute type and as fp32 probabilities."""
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    width = layouts.parameter_bytes
    kinds = [megatron.cross_entropy_fusion == NATIVE_LOSS, megatron.cross_entropy_fusion == ENGINE_LOSS]
    return np.select(kinds, [width + 8.0, width], default=width + 4.0) * shapes.vocabulary / layouts.tensor


def _loss_kept(cases: Cases) -> Array:
    """Bytes per token of the logits that a loss keeps for backward: fp32 probabilities, or the gradient in their place."""
    width = np.where(cases.megatron.cross_entropy_fusion == ENGINE_LOSS, cases.layouts.parameter_bytes, 4.0)
    return width * cases.shapes.vocabulary / cases.layouts.tensor


def _deferred(cases: Cases) -> Array:
    """Bytes per token of logit gradients and inputs of the output projection whose product waits for the last micro-batch."""
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    limit = np.where(megatron.wgrad_deferral_limit > 0, megatron.wgrad_deferral_limit, np.inf)
    waiting = np.minimum(limit, layouts.accumulation - 1) * megatron.defer_embedding_wgrad
    waiting = np.where(layouts.pipeline > 1, waiting, 0.0)
    return waiting * layouts.parameter_bytes * (shapes.vocabulary / layouts.tensor + shapes.hidden / _divided(cases))


def _backward(cases: Cases, rank: _Rank) -> Array:
    """Bytes per token as a layer runs backward: the layer if it is recomputed, and the gradients of scores or of the MLP's
    hidden layer, of its result and of its input."""
    megatron, shapes, layouts = cases.megatron, cases.shapes, cases.layouts
    width, h, sp = layouts.parameter_bytes, shapes.hidden, _divided(cases)
    with_experts = rank.experts + rank.modules * (shapes.experts > 0) > 0
    expert_rows = shapes.experts_per_token * layouts.expert_tensor / sp
    dense = np.where(rank.dense > 0, np.where(shapes.experts > 0, shapes.dense_ffn, shapes.ffn) / layouts.tensor, 0.0)
    experts = np.where(with_experts, expert_rows * (shapes.ffn / layouts.expert_tensor + h / shapes.matrices), 0.0)
    hidden = width * shapes.matrices * np.maximum(dense, experts)
    gradients = np.maximum(_scores(cases, 2 * width), hidden) + 2 * width * h / sp
    layer = _attention_kept(cases) + np.where(with_experts, _expert_kept(cases), _dense_kept(cases))
    full, block = layouts.activation_checkpointing == 2, megatron.recompute_method == BLOCK
    return np.where(full, layer * np.where(block, 1.0, megatron.recompute_num_layers), 0.0) + gradients
