"""Bytes of activations: of a layer with each kind of recomputation, and of a pipeline rank at the moments of a step."""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import CONTEXT_METHODS, Array, Cases, DescribedModule, gathered_kept, recomputes
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.kernels import (
    eager_norm_extra,
    loss_fused,
    loss_kept,
    loss_peak,
    mlp_bytes,
    norm_extra,
    rounded_bytes,
    shared_memory,
    static_messages,
    trained_head,
    unpacked_bytes,
)
from autotune.prediction.equations.module_memory import kept_bytes
from autotune.prediction.equations.overlap import host_bytes, on_device
from autotune.prediction.equations.pipeline import in_flight, losses_wait
from autotune.prediction.equations.schedules import (
    attended_tokens,
    drops_tokens,
    middle_share,
    rank_tokens,
    trained_tokens,
    with_kept_tokens,
)
from search_spaces.knobs.computation import ACTIVATIONS, ATTENTION, EXPERT_ACTIVATIONS, NORMS, UP_PROJECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of a rank's activations."""

    begins: Array
    """When backward begins: activations kept for it, plus those of the running layer and of the loss."""
    ends: Array
    """When backward ends: activations of the running layer."""
    forward: Array
    """In the first micro-batch's forward, before its loss."""
    host: Array
    """In host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Bytes per token of a rank's layers if recomputation differs between them."""

    kept_bytes: Array
    """Kept by all layers together for backward."""
    working: Array
    """Working memory of the layer that is recomputed."""


def activations_of(
    cases: Cases,
    rates: Coefficients,
    layers: Array,
    pipeline_rank: Array,
    first: Array,
    last: Array,
    again: Recomputation | None,
) -> Activations:
    """Bytes kept for backward, plus those of the running layer and of the loss."""
    layouts, shapes = cases.layouts, cases.shapes
    tokens = rank_tokens(cases)
    targets = tokens - layouts.micro_batch_size * shapes.prompt
    whole, kept_per_layer = layer_bytes(cases), kept_layer_bytes(cases)
    all_kept = layers * _mean_kept(cases, kept_per_layer) if again is None else again.kept_bytes
    ahead = in_flight(cases, pipeline_rank)
    passed = first + 2 * np.where(layouts.pipeline > 1, 1.0, 0.0)
    embedded = passed * tokens * shapes.hidden * layouts.parameter_bytes / _divided(cases)
    logit_tokens = np.where(layouts.loss_chunk_size > 0, np.minimum(layouts.loss_chunk_size, targets), targets)
    outlive = np.where(layouts.accumulation > 1, cases.software.kept_logit_bytes, 0.0)
    logits = last * logit_tokens * shapes.vocabulary / np.where(cases.software.whole_logits > 0, 1.0, layouts.tensor)
    transient = rates.working_layers * whole + _waiting_bytes(cases)
    working = (
        np.where(layouts.activation_checkpointing > 0, whole - kept_per_layer, _recomputed_at_once(cases))
        if again is None
        else again.working
    ) + transient
    modules = last * shapes.modules
    all_kept = all_kept + modules * _module_kept(cases)
    unpacked = unpacked_bytes(cases) + rounded_bytes(cases) + grouped_matrix_bytes(cases)
    shared, static = shared_memory(layouts), static_messages(cases, layers)
    pool = static + (1 - shared) * (tokens * (all_kept + transient) + unpacked)
    # Of each further loss the logarithms of probabilities are kept until backward, in at least fp32.
    further = logits * shapes.modules * np.maximum(layouts.parameter_bytes, 4.0)
    loss, waiting = logits * cases.software.logit_bytes + further, np.zeros(1)
    if np.any(fused := loss_fused(cases)):
        loss = np.where(fused, last * loss_peak(cases, targets) + modules * loss_kept(cases, targets), loss)
        waiting = np.where(fused, (last + modules) * (ahead - 1) * loss_kept(cases, targets), 0.0)
    if np.any(chunked := (layouts.loss_chunk_size > 0) & ~losses_wait(layouts)):
        # Gradients computed in forward coexist with the logits of a chunk.
        gradients = (
            layouts.parameter_bytes * shapes.hidden * (targets + shapes.vocabulary / layouts.tensor * trained_head(cases))
        )
        # The logits, and their probabilities in at least fp32, which become the gradient.
        logit_bytes = layouts.parameter_bytes + np.maximum(layouts.parameter_bytes, 4.0)
        loss = np.where(chunked, logits * logit_bytes + (last + modules) * gradients, loss)
    peak = np.maximum(shared * (tokens * working + unpacked), loss) + logits * outlive + waiting
    return Activations(
        begins=shared * tokens * on_device(cases, layers, all_kept, ahead) + ahead * embedded + peak + pool,
        ends=shared * (tokens * transient + unpacked) + pool,
        forward=tokens * (on_device(cases, layers, all_kept, np.ones(1)) + transient) + embedded + unpacked + static,
        host=host_bytes(cases, layers, all_kept, ahead),
    )


def _waiting_bytes(cases: Cases) -> Array:
    """Bytes per token of the gradient of a shared expert's hidden layer, which waits for the backward of the other experts if
    that computes while tokens travel (`shared_expert_overlap`)."""
    layouts, shapes = cases.layouts, cases.shapes
    waits = (layouts.shared_expert_overlap > 0) & (layouts.expert > 1)
    return np.where(waits, layouts.parameter_bytes * shapes.shared_ffn / layouts.tensor, 0.0)


def _module_kept(cases: Cases) -> Array:
    """Bytes per token that a module for multi-token prediction keeps besides its layer: inputs and results of its three norms,
    those of the first two joined for their projection. `norm_extra` is that of a layer's two."""
    elements = cases.layouts.parameter_bytes * 6 + 1.5 * norm_extra(cases)
    return elements * cases.shapes.hidden / _divided(cases)


def grouped_matrix_bytes(cases: Cases) -> Array:
    """Bytes of a rank's expert matrices of one name, which a grouped product stores in one tensor: in 16 bits."""
    shapes, layouts = cases.shapes, cases.layouts
    local_experts = shapes.experts / layouts.expert
    groups = (local_experts > 1) & (shapes.expert_share > 0) & (layouts.parameter_bytes == 2) & (shapes.frozen_bytes == 0)
    return np.where(groups, local_experts * shapes.hidden * shapes.ffn / layouts.expert_tensor * layouts.parameter_bytes, 0.0)


def _mean_kept(cases: Cases, kept_per_layer: Array) -> Array:
    """Bytes per token that a mean layer keeps if middle layers process some of the tokens; `kept_per_layer`: with all."""
    if not drops_tokens(cases):
        return kept_per_layer
    middle = kept_layer_bytes(with_kept_tokens(cases)) * cases.layouts.kept_tokens / trained_tokens(cases)
    return kept_per_layer + middle_share(cases) * (middle - kept_per_layer)


def _divided(cases: Cases) -> Array:
    return np.where(cases.layouts.sequence_parallel > 0, cases.layouts.tensor, 1.0)


def layer_bytes(cases: Cases) -> Array:
    """Bytes per token that a layer keeps without recomputation.

    A frozen matrix keeps no input: only the input of adapters and of nonlinear operations remains. A bottleneck keeps its input
    and both sides of its nonlinearity; a prefix is concatenated with the keys and values of each sample.
    Inputs of norms and of products: 8 h outside of what tensor parallelism divides; queries, keys, values (of all context
    ranks, if gathered), the output (twice, if it is assembled or sent) and its log-sum-exp; the MLP's hidden layer. Dropout
    keeps masks of one byte [Korthikanti 2022, 4.1].
    """
    shapes, layouts, software = cases.shapes, cases.layouts, cases.software
    width, t = layouts.parameter_bytes, layouts.tensor
    masks = shapes.dropout * 2 * shapes.hidden
    norms = (2 * width + norm_extra(cases)) * shapes.hidden + masks
    frozen = shapes.frozen_bytes > 0
    inputs = np.where(frozen, width * shapes.low_rank, 2 * width) * software.input_share * shapes.hidden
    attention = width * (_outputs(cases) * shapes.query + 2 * _keys_kept(cases) * shapes.key_value) + 4 * shapes.heads
    outputs = width * (shapes.query + 2 * shapes.key_value + 2 * shapes.hidden + (shapes.matrices - 1) * shapes.ffn)
    attention = attention + software.frozen_outputs * outputs
    attention = attention + (width + eager_norm_extra(cases) / 2) * shapes.normed_heads
    gathered = np.where(gathered_kept(layouts, software), 1.0, _divided(cases))
    attention = attention + width * 2 * shapes.key_value * shapes.prefix / shapes.sequence
    # Narrow vectors before and after their norms; the results of the products are as wide as queries, padded values too.
    norms = norms + width * (2 * (shapes.query_rank + shapes.key_value_rank) + shapes.rotated)
    attention = attention + width * shapes.value
    norms = norms + np.where(shapes.bottleneck > 0, width * (2 * shapes.hidden + 4 * shapes.bottleneck), 0.0)
    inputs = inputs * _inputs_kept(cases, gathered)
    return norms / _divided(cases) + inputs + (attention + _scores(cases)) / t + _inside_mlp(cases)


def _inside_mlp(cases: Cases) -> Array:
    """Bytes per token that a layer keeps of its MLP's hidden layer, and of the rows of its experts."""
    shapes, layouts, width = cases.shapes, cases.layouts, cases.layouts.parameter_bytes
    hidden = mlp_bytes(cases)
    least = np.where(shapes.frozen_bytes > 0, np.minimum(hidden, width * (2 * shapes.matrices - 3)), hidden)
    routed = np.where(shapes.experts > 0, shapes.routed, 0.0)
    # A rank's own rows come back; of those that its experts got, the busiest rank has the most. They are whole on each of the
    # ranks that divide an expert.
    more = layouts.busiest_kept - 1
    rows = (2 + more) * width * routed * shapes.hidden * layouts.expert_tensor
    return (rows + least * (shapes.mlp_width + more * shapes.expert_width)) / layouts.tensor


def _inputs_kept(cases: Cases, gathered: Array) -> Array:
    """Factor for the inputs of products, half of them the MLP's: of a share of the tokens where fewer ranks than the tensor
    ranks divide each expert.
    """
    shapes, layouts = cases.shapes, cases.layouts
    apart = layouts.expert_tensor < layouts.tensor
    if not np.any(apart):
        return 1 / gathered
    share = np.where(apart, 0.5 * shapes.expert_share, 0.0)
    of_experts = layouts.expert_tensor / layouts.tensor + np.where(shapes.shared_ffn > 0, 1 / gathered, 0.0)
    return (1 - share) / gathered + share * of_experts


def _outputs(cases: Cases) -> Array:
    """Factor for queries and attention results: results count once if the kernel's output is used directly, else twice."""
    layouts, shapes = cases.layouts, cases.shapes
    in_parts = (
        ((shapes.window < shapes.sequence) & (shapes.whole_chunks == 0))
        | (shapes.document > 0)
        | ((layouts.context > 1) & (layouts.context_parallel_method > 0))
    )
    return np.where(in_parts, 3.0, 2.0)


def _keys_kept(cases: Cases) -> Array:
    """Tokens whose keys are kept, copies included, as a multiple of the rank's own."""
    layouts = cases.layouts
    return (
        np.where(layouts.context_parallel_method == CONTEXT_METHODS.index("gather"), layouts.context, 1.0) + cases.shapes.copied
    )


def _scores(cases: Cases) -> Array:
    """Bytes per token of the attention matrix, if the kernel keeps it."""
    shapes = cases.shapes
    return cases.software.scores * shapes.heads * (attended_tokens(cases) + shapes.prefix)


def kept_layer_bytes(cases: Cases) -> Array:
    """Mean bytes per token that a layer keeps under the configured recomputation.

    Full: the layer's input. Selective: results that are expensive to recompute stay, scores and cheap inputs are dropped.
    """
    if cases.module is not None:
        return _module_kept_bytes(cases, cases.module)
    shapes, layouts, software = cases.shapes, cases.layouts, cases.software
    whole = layer_bytes(cases)
    full = layouts.parameter_bytes * shapes.hidden / _divided(cases)
    # torchtitan's per-operator policy keeps outputs of every other product and of attention, and the input: 15.5 of the 41 h
    # bytes per token in a layer with grouped queries and an MLP of 3.5 h.
    without_scores = np.where(software.scores > 0, whole - _scores(cases) / layouts.tensor, 0.38 * whole)
    selective = np.where(software.keeps_products > 0, _kept_results(cases), without_scores)
    policy_bytes = np.select(
        [layouts.activation_checkpointing == 2, layouts.activation_checkpointing == 1], [full, selective], default=whole
    )
    return whole + (policy_bytes - whole) / layouts.checkpoint_every_k - sum(_dropped(cases))


def _dropped(cases: Cases) -> tuple[Array, Array]:
    """Bytes per token that a layer's MLP and its attention, with their norms, do not keep because modules are recomputed:
    results of modules, and what operators save inside them. With sequence parallelism products keep gathered inputs, which no
    norm computes again. Latent attention keeps a copy of the values, unless it is recomputed, too."""
    shapes, layouts, software = cases.shapes, cases.layouts, cases.software
    if not np.any(layouts.recompute_modules):
        return np.zeros(1), np.zeros(1)
    width, t, divided = layouts.parameter_bytes, layouts.tensor, _divided(cases)
    frozen = shapes.frozen_bytes > 0
    inputs = np.where(frozen, width * shapes.low_rank, 2 * width) * software.input_share * shapes.hidden
    norms = norm_extra(cases) * shapes.hidden / divided + np.where(divided > 1, 0.0, inputs * _inputs_kept(cases, np.ones(1)))
    norm = recomputes(layouts, NORMS) * norms / 2
    hidden = mlp_bytes(cases)
    hidden = np.where(frozen, np.minimum(hidden, width * (2 * shapes.matrices - 3)), hidden) - width * (shapes.matrices - 1)
    dense = hidden * (shapes.mlp_width - shapes.expert_width)
    experts = hidden * shapes.expert_width * layouts.busiest_kept
    latent = shapes.key_value_rank > 0
    results = np.where(latent, shapes.value, (_outputs(cases) - 1) * shapes.query)
    attention = width * (results + 2 * shapes.copied * shapes.key_value) + 4 * shapes.heads + _scores(cases)
    up = np.where(latent, width * (2 * shapes.query + recomputes(layouts, ATTENTION) * shapes.value), 0.0)
    mlp = recomputes(layouts, ACTIVATIONS) * dense + recomputes(layouts, EXPERT_ACTIVATIONS) * experts
    attention = recomputes(layouts, ATTENTION) * attention + recomputes(layouts, UP_PROJECTIONS) * up
    return norm + mlp / t, norm + attention / t


def _recomputed_at_once(cases: Cases) -> Array:
    """Bytes per token that modules of the layer in backward have recomputed: its MLP's, and then, as what the MLP kept is
    freed, its attention's."""
    mlp, attention = _dropped(cases)
    return np.maximum(np.maximum(mlp, attention - (_inside_mlp(cases) - mlp)), 0.0)


def _kept_results(cases: Cases) -> Array:
    """Bytes per token of a layer's input, and of its results of products, attention and collectives (`selective.KEPT`).

    Results of products with divided inputs are whole, and are summed in place without sequence parallelism. Overlapped gathers
    are repeated in backward.
    """
    shapes, layouts = cases.shapes, cases.layouts
    width, t, divided = layouts.parameter_bytes, layouts.tensor, _divided(cases)
    routed = np.where(shapes.experts > 0, shapes.routed, 0.0)
    hidden = width * shapes.hidden
    summed = np.where(divided > 1, 2 * hidden / divided, 0.0)
    gathered = np.where((divided > 1) & (layouts.async_tensor_parallel == 0), 2 * hidden, 0.0)
    attention = width * (2 * shapes.query + 2 * shapes.key_value) + 4 * shapes.heads + _scores(cases)
    mlp = width * (shapes.matrices - 1) * shapes.mlp_width
    rows = routed * hidden * np.where(layouts.expert > 1, 3.0, 1.0) * layouts.expert_tensor / t
    return hidden / divided + 2 * hidden + summed + gathered + rows + (attention + mlp) / t


def _module_kept_bytes(cases: Cases, module: DescribedModule) -> Array:
    """Mean bytes that a block of a user's module keeps, per token of the micro-batch."""
    layouts = cases.layouts
    if not np.any(layouts.offload_activations > 0):  # only then is it read
        return np.zeros(1)
    columns = (layouts.activation_checkpointing, layouts.checkpoint_every_k, layouts.micro_batch_size)
    bytes_of = np.vectorize(lambda policy, every, batch: kept_bytes(module, int(policy), every, batch), otypes=[np.float64])
    per_token: Array = bytes_of(*columns) / (layouts.micro_batch_size * cases.shapes.sequence)
    return per_token
