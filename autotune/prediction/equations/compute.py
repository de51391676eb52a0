"""Seconds of computation and tensor-parallel communication of one layer and of the output projection, per micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from autotune.prediction.equations.cases import CONTEXT_METHODS, Array, Cases, Flags, gathered_kept, recomputes
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import (
    collective_seconds,
    context_group,
    crosses_domains,
    exchange_seconds,
    expert_group,
    expert_tensor_group,
    tensor_group,
)
from autotune.prediction.equations.kernels import (
    LAYER_KERNELS,
    SMALLEST_KERNEL,
    attention_slowdown,
    copy_seconds,
    launches,
    loss_fused,
    loss_moved,
    moved_elements,
    pieces,
    product_seconds,
    product_speed,
    rounding_seconds,
    smooth_maximum,
    unpacking_seconds,
)
from autotune.prediction.equations.layer_shapes import of_kind
from autotune.prediction.equations.megatron import recomputes_module
from autotune.prediction.equations.module_compute import module_seconds
from autotune.prediction.equations.overlap import saved_seconds
from autotune.prediction.equations.parameters import layer_parameters, own_experts
from autotune.prediction.equations.schedules import (
    attended_tokens,
    drops_tokens,
    middle_share,
    rank_tokens,
    trained_tokens,
    with_kept_tokens,
)
from autotune.prediction.equations.software import EXCHANGE_HIDDEN, FLEX, MEGATRON_EXPERT_WORK, UNFUSED
from autotune.prediction.equations.transformers import added_launches, added_seconds, covers, layer_traffic
from search_spaces.communication import ROW_PARTS
from search_spaces.knobs.computation import ACTIVATIONS

_ONE = np.ones(1)


GROUPED_EXPERTS, SEPARATE_EXPERTS, SEPARATE_EXPERT, BIASED_EXPERT = 0.41, 0.2, 0.16, 0.09
"""Kernels that experts add to a layer's hundred of forward and backward, counted on our engine (docs/results/kernel-counts.md):
41 with grouped products; where each expert is multiplied by itself, 20, and 16 for each of a rank's experts. Nine more for each
expert to whose results torch adds a bias [Megatron-Core, TEGroupedMLP: a product and a sum; two products, three sums and two
casts in backward]."""
BEYOND_DOMAIN = 0.35
"""What a rank of a tensor group waits in a collective that crosses link domains, as a share of what it waits if the host
blocks on messages between stages [nanotron on 16 and 32 tensor ranks: 4 and 12 ms a layer, whatever its width]."""
ROUTED, ROUTED_BETWEEN_RANKS, PADDED = 4.0, 2.0, 2.6
"""Passes over the rows of experts in forward, in fused kernels: rows are taken (read and written), weighted and added to the
sums of their tokens (read, and the sums written). Between ranks they are also put in the order of experts. Padding copies the
inputs and results of experts, in backward as often as in forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSeconds:
    """Seconds of one micro-batch: forward, backward and recomputation."""

    layer: Array
    """Computation of a layer, recomputation included."""
    layer_communication: Array
    """Tensor, context and expert communication of a layer."""
    head: Array
    """Output projection and loss, and modules for multi-token prediction, only on the last stage."""
    head_communication: Array
    """Communication of these modules."""
    embedding: Array


def micro_batch(cases: Cases, rates: Coefficients) -> MicroBatchSeconds:
    """For a mean layer, over the kinds of layers. If middle layers process a part of the tokens, selecting and reinserting
    them takes a pass each.

    A user's module is divided evenly over its blocks; of its communication inside of blocks, that of tensor parallelism is
    assumed to be a transformer's.
    """
    if cases.module is not None:
        nothing = np.zeros(1)
        communication = _layer_communication(cases, rates) if np.any(cases.layouts.tensor > 1) else nothing
        layer = module_seconds(cases, rates) / cases.shapes.layers
        return MicroBatchSeconds(
            layer=layer, layer_communication=communication, head=nothing, head_communication=nothing, embedding=nothing
        )
    if cases.kinds:
        return mean_micro_batch(cases, [micro_batch(of_kind(cases, kind), rates) for kind in cases.kinds])
    whole = _micro_batch(cases, rates)
    if not drops_tokens(cases):
        return whole
    middle, share = _micro_batch(with_kept_tokens(cases), rates), middle_share(cases)
    moved = 4 * rank_tokens(cases) * cases.shapes.hidden * cases.layouts.parameter_bytes
    bypass = 2 * moved * rates.traffic / cases.hardware.bandwidth
    return replace(
        whole,
        layer=whole.layer + share * (middle.layer + bypass - whole.layer),
        layer_communication=whole.layer_communication + share * (middle.layer_communication - whole.layer_communication),
    )


def mean_micro_batch(cases: Cases, batches: Sequence[MicroBatchSeconds]) -> MicroBatchSeconds:
    """The mean over the layers, from those of the kinds of layers."""
    shares = [kind.share for kind in cases.kinds]
    layer: Array = reduce(np.add, (share * batch.layer for share, batch in zip(shares, batches, strict=True)))
    sent: Array = reduce(np.add, (share * batch.layer_communication for share, batch in zip(shares, batches, strict=True)))
    # The layers of modules for multi-token prediction are like the model's last ones: with experts, if any layer has them.
    return replace(batches[-1], layer=layer, layer_communication=sent)


def _micro_batch(cases: Cases, rates: Coefficients) -> MicroBatchSeconds:
    """max(operations / speed, launches) per layer; products by their shape, attention by its kernel, the rest by bytes."""
    layouts, software = cases.layouts, cases.software
    forward = _products(cases, rates) + attention_forward(cases, rates) + _elementwise(cases, rates)
    trained = _bottlenecks(cases, rates)
    again = _recomputed(cases, rates, forward + trained)
    backward_only = rates.backward_ratio * np.where(cases.shapes.frozen_bytes > 0, 0.55, 1.0)
    communication = _layer_communication(cases, rates)
    launched = rates.kernel_seconds + np.where(layouts.tensor > 1, rates.collective_launch, 0.0)
    added = _if_checkpointed(cases, cases.software.full_launches, cases.software.selective_launches)
    launched = launched * (launches(cases, rates.backward_ratio) + added)
    plain = launched * cases.software.host_work * (cases.software.captured < 2) if np.any(software.head_work > 0) else launched
    launched = launched * _host_work(cases)
    if np.any(software.stage_work > 0):
        stages = np.where(layouts.pipeline > 1, layouts.pipeline * layouts.virtual_stages, 0.0)
        launched = launched + software.stage_work * plain * stages / cases.shapes.layers
    parts = np.where((layouts.async_tensor_parallel > 0) & (layouts.tensor > 1), ROW_PARTS - 1.0, 0.0)
    launched = launched + parts * rates.collective_launch
    computed = forward * (1 + backward_only) + trained * (1 + rates.backward_ratio) + again + unpacking_seconds(cases)
    if np.any(libraries := covers(cases)):
        computed = np.where(libraries, _of_libraries(cases, rates), computed)
        launched = launched * np.where(libraries, 1 + added_launches(cases), 1.0)
    computed = computed + copy_seconds(cases) + rounding_seconds(cases, rank_tokens(cases))
    if np.any(software.summed_bytes + cases.shapes.biased_experts * software.bias_bytes > 0):
        computed = computed + (_summed_bytes(cases) + _bias_bytes(cases)) / cases.hardware.bandwidth
    # Kernels of a forward, even if each has nothing to do; checkpointing repeats all of them, or about half.
    computed = computed + LAYER_KERNELS * SMALLEST_KERNEL * (1 + rates.backward_ratio + _if_checkpointed(cases, _ONE, _ONE / 2))
    layer = smooth_maximum(computed + communication, launched) - communication
    frozen = covers(cases) & (cases.shapes.frozen_bytes > 0) & (cases.transformers.trained_tables == 0)
    passes = np.where(frozen, 2.0, 1 + rates.backward_ratio) + np.where(cases.transformers.reference > 0, 1.0, 0.0)
    head = _head_forward(cases, rates) * passes
    if np.any(software.head_work > 0):
        head = smooth_maximum(head, software.head_work * plain)
    embedding = 2 * 3 * rank_tokens(cases) * cases.shapes.hidden * layouts.parameter_bytes / cases.hardware.bandwidth
    modules = cases.shapes.modules
    if np.any(modules > 0):
        # A module for multi-token prediction projects its two inputs: all tokens on each tensor rank, or its share of them.
        rows, hidden = rank_tokens(cases) / np.where(layouts.sequence_parallel > 0, layouts.tensor, 1.0), cases.shapes.hidden
        joining = _product(cases, rates, rows, 2 * hidden, hidden)
        head = head + modules * (head + layer + embedding + joining * (1 + rates.backward_ratio))
    return MicroBatchSeconds(
        layer=layer, layer_communication=communication, head=head, head_communication=modules * communication,
        embedding=embedding,
    )  # fmt: skip


def _of_libraries(cases: Cases, rates: Coefficients) -> Array:
    """Seconds of a layer of Transformers: products have a gradient for their inputs and, if trained, for their weights; fused
    attention has five products in backward and two in forward; the rest moves bytes. A reference model runs forward."""
    forward, backward = layer_traffic(cases)
    products, attention = _products(cases, rates), attention_forward(cases, rates)
    again = _if_checkpointed(cases, _ONE, _ONE / 2) + np.where(cases.transformers.reference > 0, 1.0, 0.0)
    trained = np.where(cases.shapes.frozen_bytes > 0, 0.0, 1.0)
    moved = rank_tokens(cases) * (forward * (1 + again) + backward) * rates.traffic / cases.hardware.bandwidth
    return products * (2 + trained + again) + attention * (3.5 + again) + moved + added_seconds(cases)


def _host_work_of_arguments(cases: Cases) -> Array:
    """What Megatron-LM's arguments add to the host's work for a layer, as a share of it [functional tests]: operators of
    attention that is not fused, messages and steps of context parallelism, hooks of Megatron-FSDP.
    """
    megatron, layouts = cases.megatron, cases.layouts
    if not np.any(megatron.states > 0):
        return np.zeros(1)
    added = 0.1 * (megatron.attention_backend >= UNFUSED) + 0.25 * (layouts.context > 1) + 0.5 * (layouts.zero_stage == 3)
    return np.where(megatron.states > 0, added, 0.0)


def _host_work(cases: Cases) -> Array:
    """Host's time of a layer, as a multiple of that of launching a dense one: its software's, with the router and dispatcher,
    and the launches of experts' products. What graphs replay is not launched.
    """
    shapes, layouts, software, megatron = cases.shapes, cases.layouts, cases.software, cases.megatron
    stated = megatron.states > 0
    work = software.host_work * (1 + _host_work_of_arguments(cases))
    layer = work * np.where(software.captured > 0, 0.0, 1.0)
    if np.any(shapes.experts > 0):
        apart = (software.separate_experts > 0) | (layouts.rounding_bytes > 0) | (layouts.parameter_bytes > 2)
        local_experts = np.maximum(shapes.experts / layouts.expert, 1.0)
        products = np.where(apart, SEPARATE_EXPERTS + local_experts * SEPARATE_EXPERT, GROUPED_EXPERTS)
        products = products + local_experts * BIASED_EXPERT * shapes.biased_experts * (software.bias_bytes > 0)
        routes = np.maximum(software.expert_work, MEGATRON_EXPERT_WORK * stated) + 0.15 * stated * (megatron.grouped_gemm == 0)
        layer = layer + np.where(shapes.experts > 0, shapes.expert_share * (products + work * routes), 0.0)
    return np.where(software.captured > 1, 0.0, layer)


def _product(cases: Cases, rates: Coefficients, rows: Array, inner: Array, outer: Array) -> Array:
    """Seconds of a product of (rows, inner) and (inner, outer)."""
    hardware = cases.hardware
    peak = hardware.peak * hardware.sustained
    return product_seconds(rows, inner, outer, peak, hardware.bandwidth, cases.layouts.parameter_bytes, rates)


def _products(cases: Cases, rates: Coefficients) -> Array:
    if np.any(cases.layouts.fp8_recipe):
        cases = replace(cases, hardware=replace(cases.hardware, peak=cases.hardware.peak * product_speed(cases)))
    shapes, tensor, tokens = cases.shapes, cases.layouts.tensor, rank_tokens(cases)
    attention = _product(cases, rates, tokens, shapes.hidden, (shapes.query + 2 * shapes.key_value) / tensor) + _product(
        cases, rates, tokens, shapes.query / tensor, shapes.hidden
    )
    if np.any(shapes.key_value_rank > 0):
        attention = np.where(shapes.key_value_rank > 0, _latent_products(cases, rates), attention)
    return attention + sum(_of_mlp(cases, rates))


def _of_mlp(cases: Cases, rates: Coefficients) -> tuple[Array, Array, Array]:
    """Products of a mean layer's routed experts, of its shared expert and of a dense MLP.

    Fewer slices of each expert: wider ones, for a share of the tensor group's tokens. Each of a rank's experts multiplies its
    own rows: those of the tokens of all ranks that divide the experts.
    """
    shapes, tensor, tokens = cases.shapes, cases.layouts.tensor, rank_tokens(cases)
    slices, routed = cases.layouts.expert_tensor, np.maximum(shapes.experts_per_token, 1)
    rows = tokens * routed * cases.layouts.busiest_rows * slices / tensor
    local_experts = np.maximum(shapes.experts / cases.layouts.expert, 1.0)
    mlp = local_experts * _mlp_products(cases, rates, rows / local_experts, shapes.ffn, slices)
    sparse = shapes.experts > 0
    if not np.any(shapes.shared_ffn + shapes.dense_ffn > 0):
        return np.where(sparse, mlp, 0.0), np.zeros(1), np.where(sparse, 0.0, mlp)
    shared, dense = (
        _mlp_products(cases, rates, tokens, np.maximum(width, 1.0), tensor) for width in (shapes.shared_ffn, shapes.dense_ffn)
    )
    share = shapes.expert_share
    shared = share * np.where(shapes.shared_ffn > 0, shared, 0.0)
    dense = (1 - share) * np.where(shapes.dense_ffn > 0, dense, 0.0)
    return np.where(sparse, share * mlp, 0.0), shared, dense + np.where(sparse, 0.0, share * mlp)


def _mlp_products(cases: Cases, rates: Coefficients, rows: Array, width: Array, slices: Array) -> Array:
    shapes = cases.shapes
    return _product(cases, rates, rows, shapes.hidden, (shapes.matrices - 1) * width / slices) + _product(
        cases, rates, rows, width / slices, shapes.hidden
    )


def _latent_products(cases: Cases, rates: Coefficients) -> Array:
    """Products of latent attention; those to narrow vectors are of a rank's share of the tokens, or of all."""
    shapes, tensor, tokens = cases.shapes, cases.layouts.tensor, rank_tokens(cases)
    local_tokens = tokens / np.where(cases.layouts.sequence_parallel > 0, tensor, 1.0)
    down = shapes.query_rank + shapes.key_value_rank + shapes.rotated
    return (
        _product(cases, rates, local_tokens, shapes.hidden, np.maximum(down, 1.0))
        + _up_projections(cases, rates)
        + _product(cases, rates, tokens, np.maximum(shapes.value, 1.0) / tensor, shapes.hidden)
    )


def _up_projections(cases: Cases, rates: Coefficients) -> Array:
    """Products from the narrow vectors of latent attention."""
    shapes, tensor, tokens = cases.shapes, cases.layouts.tensor, rank_tokens(cases)
    source = np.where(shapes.query_rank > 0, shapes.query_rank, shapes.hidden)
    keys = shapes.query - shapes.heads * shapes.rotated + shapes.value
    return _product(cases, rates, tokens, source, shapes.query / tensor) + _product(
        cases, rates, tokens, np.maximum(shapes.key_value_rank, 1.0), keys / tensor
    )


def _bottlenecks(cases: Cases, rates: Coefficients) -> Array:
    """Seconds of a layer's two bottlenecks, which every tensor rank computes whole, or for its share of the tokens."""
    shapes, layouts = cases.shapes, cases.layouts
    rows = rank_tokens(cases) / np.where(layouts.sequence_parallel > 0, layouts.tensor, 1.0)
    columns = np.maximum(shapes.bottleneck, 1.0)
    sides = _product(cases, rates, rows, shapes.hidden, columns) + _product(cases, rates, rows, columns, shapes.hidden)
    return np.where(shapes.bottleneck > 0, 2 * sides, 0.0)


def attention_forward(cases: Cases, rates: Coefficients) -> Array:
    """Scores and values: half of them (causal) in a fused kernel; all of them, moved through memory, if scores are kept.
    With a window, only the visited blocks in either case.
    """
    shapes, layouts, hardware = cases.shapes, cases.layouts, cases.hardware
    attended = attended_tokens(cases)
    visited = (shapes.window < trained_tokens(cases)) & (shapes.document == 0)
    causal = attended * np.where(visited, 1.0, 0.5) + shapes.prefix
    attended = attended + shapes.prefix
    products = 4 * rank_tokens(cases) * attended * shapes.query / layouts.tensor
    elements = rank_tokens(cases) * attended * shapes.heads / layouts.tensor
    keeps_scores = cases.software.scores > 0
    speed = hardware.peak * rates.attention_efficiency * cases.software.attention_speed
    width = np.maximum(shapes.query / shapes.heads, 1.0)
    fused = products * causal / attended / speed * attention_slowdown(2 * causal, width, hardware.peak)
    passes = 2 + cases.software.scores
    whole = products / (hardware.peak * rates.matrix_efficiency * 0.6) + elements * passes * 2 / hardware.bandwidth
    return np.where(keeps_scores, whole, fused)


def _elementwise(cases: Cases, rates: Coefficients) -> Array:
    """Norms, residuals and dropout over the hidden width, divided only under sequence parallelism; the MLP's activations."""
    shapes, layouts = cases.shapes, cases.layouts
    divided = np.where(layouts.sequence_parallel > 0, layouts.tensor, 1.0)
    widths = shapes.mlp_width + (layouts.busiest_rows - 1) * shapes.expert_width
    wide = (shapes.matrices + 0.0) * widths / layouts.tensor
    norms, rotations = (
        (8 + 2 * shapes.dropout) * shapes.hidden / divided,
        4 * (shapes.query + shapes.key_value) / layouts.tensor,
    )
    routed = cases.software.elementwise * _routed_elements(cases)
    moved = rank_tokens(cases) * (moved_elements(cases, wide, norms, rotations) + routed) * layouts.parameter_bytes
    return moved * rates.traffic / cases.hardware.bandwidth


def _summed_bytes(cases: Cases) -> Array:
    """Bytes moved to add a layer's gradients to those of earlier micro-batches."""
    layer = layer_parameters(cases)
    elements = (layer.attention + layer.dense) / cases.layouts.tensor + own_experts(cases, layer)
    return elements * cases.software.summed_bytes


def _bias_bytes(cases: Cases) -> Array:
    """Bytes that operators of their own move to add biases to the results of a layer's experts."""
    shapes, layouts = cases.shapes, cases.layouts
    rows = rank_tokens(cases) * shapes.routed * layouts.busiest_rows * layouts.expert_tensor / layouts.tensor
    return shapes.biased_experts * rows * shapes.hidden * cases.software.bias_bytes


def _routed_elements(cases: Cases) -> Array:
    """Elements that a layer moves for a token to give its rows to experts and to add up their results."""
    shapes, layouts = cases.shapes, cases.layouts
    if not np.any(shapes.experts > 0):
        return np.zeros(1)
    passes = ROUTED + np.where(layouts.expert > 1, ROUTED_BETWEEN_RANKS, 0.0) + PADDED * cases.software.pads_experts
    rows = shapes.routed * layouts.busiest_rows * layouts.expert_tensor / layouts.tensor
    return np.where(shapes.experts > 0, passes * rows * shapes.hidden, 0.0)


def _recomputed(cases: Cases, rates: Coefficients, forward: Array) -> Array:
    """Seconds of recomputation in backward: the whole layer, or the cheap and large parts: attention with its inputs, or what
    lies between products."""
    keeps_scores = cases.software.scores > 0
    attention = np.where(keeps_scores, attention_forward(cases, rates), 0.5 * forward)
    selective = np.where(cases.software.keeps_products > 0, _elementwise(cases, rates), attention)
    selective = np.where(cases.megatron.states > 0, 0.0, selective)  # its modules are those that its arguments name
    return _if_checkpointed(cases, forward, selective) + _recomputed_modules(cases, rates)


def _recomputed_modules(cases: Cases, rates: Coefficients) -> Array:
    """Seconds of the forward of modules that are recomputed by themselves, by our knob or by Megatron's arguments."""
    shapes, layouts = cases.shapes, cases.layouts
    if not np.any(layouts.recompute_modules) and not np.any(
        (cases.megatron.states > 0) & (layouts.activation_checkpointing == 1)
    ):
        return np.zeros(1)
    norm, experts_act, attention, up, mlp, moe, shared_experts = (
        recomputes_module(cases, name)
        for name in ("layernorm", "moe_act", "core_attn", "mla_up_proj", "mlp", "moe", "shared_experts")
    )
    shared_experts = np.maximum(shared_experts, moe)
    divided = np.where(layouts.sequence_parallel > 0, layouts.tensor, 1.0)
    shared = np.where(shapes.experts > 0, shapes.expert_share * shapes.shared_ffn, 0.0)
    dense, experts = shapes.mlp_width - shapes.expert_width - shared, shapes.expert_width * layouts.busiest_rows
    activations = recomputes(layouts, ACTIVATIONS)
    widths = np.maximum(activations, mlp) * dense + np.maximum(activations, shared_experts) * shared
    widths = widths + np.maximum(experts_act, moe) * experts
    moved = moved_elements(cases, shapes.matrices * widths / layouts.tensor, norm * 4 * shapes.hidden / divided, np.zeros(1))
    routed = moe * cases.software.elementwise * _routed_elements(cases)
    elementwise = rank_tokens(cases) * (moved + routed) * layouts.parameter_bytes * rates.traffic / cases.hardware.bandwidth
    products = (moe, shared_experts, mlp)
    seconds = elementwise + sum(named * part for named, part in zip(products, _of_mlp(cases, rates), strict=True))
    seconds = seconds + up * np.where(shapes.key_value_rank > 0, _up_projections(cases, rates), 0.0)
    again: Array = seconds + attention * attention_forward(cases, rates)
    return again


def _if_checkpointed(cases: Cases, full: Array, selective: Array) -> Array:
    """What checkpointing adds to a layer, as a mean over all layers, where it adds this to one that is checkpointed."""
    kind = cases.layouts.activation_checkpointing
    return np.select([kind == 2, kind == 1], [full, selective], default=0.0) / cases.layouts.checkpoint_every_k


def _head_forward(cases: Cases, rates: Coefficients) -> Array:
    """Virtual tokens have no logits. A fused loss kernel computes them some rows at a time and moves all bytes in forward."""
    shapes, layouts = cases.shapes, cases.layouts
    tokens = rank_tokens(cases) - layouts.micro_batch_size * shapes.prompt / layouts.context
    divided = shapes.vocabulary / layouts.tensor
    software = cases.software
    per_logit = np.where(software.loss_bytes > 0, software.loss_bytes / (1 + rates.backward_ratio), software.logit_bytes)
    loss = tokens * divided * per_logit / cases.hardware.bandwidth
    whole = _product(cases, rates, tokens, shapes.hidden, divided) + loss
    if not np.any(fused := loss_fused(cases)):
        return whole
    cut, moved = pieces(cases, tokens), loss_moved(cases, tokens) / (1 + rates.backward_ratio)
    return np.where(
        fused, cut.times * _product(cases, rates, cut.rows, shapes.hidden, divided) + moved / cases.hardware.bandwidth, whole
    )


def _hidden_behind_products(cases: Cases, rates: Coefficients, message: Array) -> Array:
    """Seconds of a layer's sums that tensor ranks hide; sums of experts are not hidden; frozen columns have no gradients."""
    if not np.any(cases.layouts.async_tensor_parallel > 0):
        return np.zeros(1)
    shapes, layouts, tokens = cases.shapes, cases.layouts, rank_tokens(cases)
    again = np.where(layouts.activation_checkpointing == 2, 1.0, 0.0) / layouts.checkpoint_every_k
    dense, trained = np.where(shapes.experts > 0, 0.0, 1.0), np.where(shapes.frozen_bytes > 0, 0.0, 1.0)
    output = _product(cases, rates, tokens, shapes.query / layouts.tensor, shapes.hidden)
    down = _product(cases, rates, tokens, shapes.ffn / layouts.tensor, shapes.hidden)
    heads = _product(cases, rates, tokens, shapes.hidden, (shapes.query + 2 * shapes.key_value) / layouts.tensor)
    up = _product(cases, rates, tokens, shapes.hidden, (shapes.matrices - 1) * shapes.ffn / layouts.tensor)
    return saved_seconds(cases, rates, message, [(output, 1 + again), (down, dense)], [trained * heads, trained * dense * up])


def _layer_communication(cases: Cases, rates: Coefficients) -> Array:
    """Tensor: two all-reduces forward and two backward, or as many gathers and scatters [Shoeybi 2019; Korthikanti 2022].

    Sequence parallelism that gathers its inputs again moves 10 units instead of 8. Full recomputation repeats the forward ones
    except the last. Context: keys and values are gathered forward, scattered backward; or queries, keys and values go to the
    ranks of their heads and results back, with gradients in reverse [Jacobs 2023]. Experts: tokens out and back, forward and
    backward, and forward again under full recomputation; of a share of the tokens, if fewer than the tensor ranks divide each
    expert (`_sums_of_experts`).
    """
    shapes, layouts = cases.shapes, cases.layouts
    n, width = layouts.tensor, layouts.parameter_bytes
    message = rank_tokens(cases) * shapes.hidden * width
    again = (layouts.sequence_parallel > 0) & ~gathered_kept(layouts, cases.software)
    units = np.where(again, 10.0, 8.0) + np.where(layouts.activation_checkpointing == 2, 2.0, 0.0) / layouts.checkpoint_every_k
    beyond = cases.hardware.scatter_volume - 1
    scattered = np.where(
        layouts.sequence_parallel > 0,
        4.0 + np.where(layouts.activation_checkpointing == 2, 1.0, 0.0) / layouts.checkpoint_every_k,
        0.0,
    )
    apart = layouts.expert_tensor < n
    at_experts = np.zeros(1)
    if np.any(apart):  # false for most spaces
        fewer, expert_collectives = _sums_of_experts(cases, apart, units)
        share = layouts.expert_tensor / n
        sliced = expert_collectives * (layouts.expert_tensor - 1) / layouts.expert_tensor * message * share
        at_experts = collective_seconds(cases, expert_tensor_group(cases), sliced, expert_collectives, rates)
        units, scattered = units - fewer, scattered * (1 - fewer / units)
    volume = (units + beyond * scattered) * (n - 1) / n * message
    tensor = collective_seconds(cases, tensor_group(cases), volume, units / 2, rates)
    tensor = tensor - _hidden_behind_products(cases, rates, message)
    tensor = tensor * (1 - cases.software.tensor_hidden)
    # The ranks of a tensor group resume at different times after messages to other domains: its own, and those that block.
    waits = np.where((cases.software.blocks_sends > 0) & crosses_domains(cases), 1.0, 0.0)
    waits = (n > 1) * (waits + np.where(n > tensor_group(cases).in_domain, BEYOND_DOMAIN, 0.0))
    if np.any(waits > 0):
        tensor = tensor + waits * units / 2 * n * rates.crossed_seconds
    sent, times = context_messages(cases)
    passes = 2.0 + np.where(layouts.activation_checkpointing == 2, 1.0, 0.0) / layouts.checkpoint_every_k
    share = (layouts.context - 1) / layouts.context
    once = passes + np.where(times > 1, 0.0, beyond)
    moved = cases, context_group(cases), once * sent * share, passes * times, rates
    context, exchanges = collective_seconds(*moved), layouts.context_parallel_method == CONTEXT_METHODS.index("ulysses")
    if np.any(exchanges):
        context = np.where(exchanges, exchange_seconds(*moved), context)
    e = layouts.expert
    routed = message * layouts.expert_tensor / n * shapes.routed * layouts.busiest_rows * (e - 1) / e
    travels = 2 * (passes + 0 * e)
    expert = exchange_seconds(cases, expert_group(cases), travels * routed, travels, rates, crossing_rows(cases))
    expert = expert - _hidden_behind_shared_experts(cases, rates, routed)
    hidden = np.maximum(cases.software.exchange_hidden, EXCHANGE_HIDDEN * cases.megatron.moe_comm_overlap)
    if np.any(hidden > 0):
        # Megatron-Core hides none with one stage on a rank of a pipeline, or with full recomputation.
        together = ((layouts.pipeline > 1) & (layouts.virtual_stages == 1)) | (layouts.activation_checkpointing == 2)
        expert = expert * (1 - np.where(together, 0.0, hidden))
    communication: Array = tensor + context + expert + at_experts
    return communication


def _hidden_behind_shared_experts(cases: Cases, rates: Coefficients, message: Array) -> Array:
    """Seconds in which tokens travel while shared experts compute (`shared_expert_overlap`); computation is slowed by it.

    Of forward's two travels the first hides behind the products up to the activation, the second behind the last one; of
    backward's behind the gradients of these products. `message`: bytes of one travel.
    """
    shapes, layouts, tokens = cases.shapes, cases.layouts, rank_tokens(cases)
    if not np.any(layouts.shared_expert_overlap > 0):
        return np.zeros(1)
    travel = exchange_seconds(cases, expert_group(cases), message, np.ones(1), rates, crossing_rows(cases))
    width = np.maximum(shapes.shared_ffn, 1.0) / layouts.tensor
    halves = (
        _product(cases, rates, tokens, shapes.hidden, (shapes.matrices - 1) * width),
        _product(cases, rates, tokens, width, shapes.hidden),
    )
    forwards = 1 + np.where(layouts.activation_checkpointing == 2, 1.0, 0.0) / layouts.checkpoint_every_k
    hidden = np.zeros(1)
    for half in (shapes.expert_share * half for half in halves):
        behind = forwards * np.minimum(travel, half) + np.minimum(travel, rates.backward_ratio * half)
        hidden = hidden + behind * (1 - rates.overlap_slowdown)
    beside = (layouts.shared_expert_overlap > 0) & (layouts.expert > 1) & (shapes.shared_ffn > 0)
    return np.where(beside, hidden, 0.0)


def crossing_rows(cases: Cases) -> Array:
    """Rows of experts sent to other link domains, as a share of those computed there: 1, or less if a token goes once to each
    domain with several of its experts."""
    flex = (cases.megatron.states > 0) & (cases.megatron.dispatcher == FLEX)
    if not np.any(once := (cases.software.once_per_domain > 0) | flex):
        return np.ones(1)
    group, routed = expert_group(cases), np.maximum(cases.shapes.experts_per_token, 1.0)
    domains = np.maximum(group.ranks / group.in_domain, 1.0)
    reached = domains * (1 - (1 - 1 / domains) ** routed) / routed
    return np.where(once, reached, 1.0)


def _sums_of_experts(cases: Cases, apart: Flags, units: Array) -> tuple[Array, Array]:
    """Units of a mean layer that its tensor ranks do not move because fewer of them divide each expert, and the gathers and
    scatters of these.

    Half of a layer's units are those of its MLP. Shared experts still move them. Without sequence parallelism, the results of
    all tokens are gathered instead, and so are the gradients of the tokens.
    """
    shapes, layouts = cases.shapes, cases.layouts
    share = np.where(apart, shapes.expert_share, 0.0)
    remaining_units = np.where(shapes.shared_ffn > 0, units / 2, 0.0) + np.where(layouts.sequence_parallel > 0, 0.0, 2.0)
    again = np.where(layouts.activation_checkpointing == 2, 1.0, 0.0) / layouts.checkpoint_every_k
    return share * (units / 2 - remaining_units), share * (4.0 + again)


def context_messages(cases: Cases) -> tuple[Array, Array]:
    """Bytes of a layer's messages between context ranks in one direction, of which each rank keeps its own part, and their
    number: gathered keys and values, or queries, keys, values and results. Values of latent attention have their own width."""
    shapes, layouts = cases.shapes, cases.layouts
    latent = shapes.key_value_rank > 0
    values, results = np.where(latent, shapes.value, shapes.key_value), np.where(latent, shapes.value, shapes.query)
    exchanged = layouts.context_parallel_method == CONTEXT_METHODS.index("ulysses")
    elements = np.where(
        exchanged, shapes.query + shapes.key_value + values + results, layouts.context * (shapes.key_value + values)
    )
    sent = rank_tokens(cases) * elements * layouts.parameter_bytes / layouts.tensor
    return sent, np.where(exchanged, 2.0, 1.0)
