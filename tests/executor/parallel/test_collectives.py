"""Collectives of a step by operation and mesh dimension, on four real ranks, against docs/closed-forms.md."""

import dataclasses
from collections.abc import Callable

import pytest
from closed_forms import BYTES, LONG, RANKS, SHORT, SPEC, TIED, Layout

from search_spaces.models.model import HeadNorm, NormPlace
from search_spaces.trial import TrialResult
from tests.sampling import sampled

Count = Callable[..., TrialResult]

SHORT_TIED = dataclasses.replace(SHORT, tied_embeddings=True)
LONG_TIED = dataclasses.replace(LONG, tied_embeddings=True)
EXPERTS = dataclasses.replace(SHORT, num_experts=4, experts_per_token=2)
CAPPED = dataclasses.replace(EXPERTS, capacity_factor=1.25, load_balance=0.01)
SHARED = dataclasses.replace(EXPERTS, shared_expert_size=16, load_balance=0.01)
BIASED = dataclasses.replace(EXPERTS, sigmoid_routing=True, router_correction=True)
POST_NORM = dataclasses.replace(SHORT, norm_place=NormPlace.SUM)
GEMMA = dataclasses.replace(
    SHORT, norm_place=NormPlace.BOTH, head_norm=HeadNorm.HEAD, zero_centered_norms=True,
    attention_softcap=5.0, output_softcap=5.0, embedding_scale=4.0, sliding_window=4, whole_layers=(False, True),
    window_rope_theta=100.0,
)  # fmt: skip
OLMO = dataclasses.replace(SHORT, norm_place=NormPlace.OUTPUT, head_norm=HeadNorm.WIDTH, rotated_layers=(True, False))

PP2 = {"pipeline_parallel_size": 2, "micro_batch_size": 1}
PP4 = {"pipeline_parallel_size": 4, "micro_batch_size": 1}
TWO = {"virtual_stages": 2}
SCHEDULES = {
    "gpipe": {"pipeline_schedule": "gpipe"},
    "1f1b": {"pipeline_schedule": "1f1b"},
    "interleaved_1f1b": {"pipeline_schedule": "interleaved_1f1b", **TWO},
    "looped_bfs": {"pipeline_schedule": "looped_bfs", **TWO},
    "zero_bubble_1": {"pipeline_schedule": "interleaved_zero_bubble"},
    "interleaved_zero_bubble": {"pipeline_schedule": "interleaved_zero_bubble", **TWO},
    "zbv": {"pipeline_schedule": "zbv", **TWO},
    "dualpipev": {"pipeline_schedule": "dualpipev", **TWO},
}
WHOLE = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
"""Schedules that make all of a micro-batch's gradients at once."""
TP2, TP4 = {"tensor_parallel_size": 2, "micro_batch_size": 4}, {"tensor_parallel_size": 4, "micro_batch_size": 4}
CP2, CP4 = {"context_parallel_size": 2, "micro_batch_size": 4}, {"context_parallel_size": 4, "micro_batch_size": 4}
SP = {"sequence_parallel": True}
ASYNC = {"async_tensor_parallel": True}
ULYSSES = {"context_parallel_method": "ulysses"}
EP2, EP4 = {"expert_parallel_size": 2, "micro_batch_size": 1}, {"expert_parallel_size": 4, "micro_batch_size": 1}
BESIDE, LOADS = {"shared_expert_overlap": True}, {"router_bias_update_rate": 0.01}
WHOLE_EXPERTS, HALVED_EXPERTS = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
HELD = {"zero_stage": 3, "reshard_after_forward": False}
HSDP = {"zero_stage": 3, "hsdp_shard_size": 2}

LAYOUTS = {
    # Tensor and sequence parallelism, alone and beside ZeRO.
    "tp4": Layout(SHORT, **TP4),
    "tp4 full": Layout(SHORT, **TP4, **FULL),
    "tp4 experts": Layout(EXPERTS, **TP4),
    "tp4 post-norm full": Layout(POST_NORM, **TP4, **FULL),
    "tp4 sp": Layout(SHORT, **TP4, **SP),
    "tp4 sp full": Layout(SHORT, **TP4, **SP, **FULL),
    "tp4 sp post-norm full": Layout(POST_NORM, **TP4, **SP, **FULL),
    "tp4 sp tied": Layout(SHORT_TIED, **TP4, **SP),
    **{f"tp2 sp zero{stage}": Layout(SHORT, **TP2, **SP, zero_stage=stage) for stage in (0, 2, 3)},
    "tp2 zero3": Layout(SHORT, **TP2, zero_stage=3),
    "tp2 sp selective": Layout(SHORT, **TP2, **SP, **SELECTIVE),
    "tp2 chunked loss": Layout(SHORT, **TP2, loss_chunk_size=32),
    # Its sums beside products, in parts.
    **{f"tp2 {name} async": Layout(SHORT, **TP2, **knobs, **ASYNC) for name, knobs in {"": {}, "selective": SELECTIVE}.items()},
    "tp4 full async": Layout(SHORT, **TP4, **FULL, **ASYNC),
    "tp4 sp post-norm full async": Layout(POST_NORM, **TP4, **SP, **FULL, **ASYNC),
    "tp2 sp zero3 selective async": Layout(SHORT, **TP2, **SP, **SELECTIVE, **ASYNC, zero_stage=3),
    "pp2 interleaved tp2 sp full async": Layout(
        **PP2, **SCHEDULES["interleaved_1f1b"], tensor_parallel_size=2, **SP, **FULL, **ASYNC
    ),
    "ep2 tp2 sp async": Layout(EXPERTS, **EP2, tensor_parallel_size=2, **SP, **ASYNC),
    # Context parallelism: its ranks are ZeRO ranks too.
    "cp4": Layout(SHORT, **CP4),
    "cp4 full": Layout(SHORT, **CP4, **FULL),
    "cp2 selective": Layout(SHORT, **CP2, **SELECTIVE),
    **{f"cp2 zero{stage}": Layout(SHORT, **CP2, zero_stage=stage) for stage in (0, 2, 3)},
    "cp2 tp2": Layout(SHORT, **CP2, tensor_parallel_size=2),
    "cp2 tp2 sp zero3": Layout(SHORT, **CP2, tensor_parallel_size=2, zero_stage=3, **SP),
    # Tokens exchanged for heads.
    "cp4 ulysses": Layout(SHORT, **CP4, **ULYSSES),
    "cp4 ulysses full": Layout(SHORT, **CP4, **ULYSSES, **FULL),
    "cp2 ulysses selective zero3": Layout(SHORT, **CP2, **ULYSSES, **SELECTIVE, zero_stage=3),
    "cp2 ulysses tp2 sp": Layout(SHORT, **CP2, **ULYSSES, tensor_parallel_size=2, **SP),
    "cp2 ulysses pp2 zbv full": Layout(**PP2, **SCHEDULES["zbv"], context_parallel_size=2, **ULYSSES, **FULL),
    # Every schedule: alone, with the ZeRO stages that send for each micro-batch; with the others, one of either kind.
    **{f"pp4 {name}": Layout(LONG, **PP4, **knobs) for name, knobs in SCHEDULES.items()},
    # A stage of one unit alone keeps it from a forward to the next: here each has at least two.
    **{
        f"pp2 {name} zero{stage}": Layout(LONG if stage == 3 else SPEC, **PP2, **SCHEDULES[name], zero_stage=stage)
        for name in WHOLE
        for stage in ((0, 1, 2, 3) if name == "1f1b" else (2, 3))
    },
    **{
        f"pp2 {name} zero{stage}": Layout(**PP2, **SCHEDULES[name], zero_stage=stage)
        for name in SCHEDULES
        if name not in WHOLE
        for stage in ((0, 1, 2) if name == "zbv" else (2,))
    },
    **{
        f"pp2 {name} zero3 held": Layout(**PP2, **knobs, **HELD)
        for name, knobs in SCHEDULES.items()
        if name == "1f1b" or name not in WHOLE
    },
    "pp2 zero2 deferred": Layout(**PP2, zero_stage=2, defer_gradient_reduction=True),
    **{f"pp2 {name} tp2 sp": Layout(**PP2, **SCHEDULES[name], tensor_parallel_size=2, **SP) for name in ("1f1b", "zbv")},
    "pp2 1f1b tp2 full": Layout(**PP2, tensor_parallel_size=2, **FULL),
    "pp2 zbv tp2 sp full": Layout(**PP2, **SCHEDULES["zbv"], tensor_parallel_size=2, **SP, **FULL),
    "pp2 zbv tp2 selective": Layout(**PP2, **SCHEDULES["zbv"], tensor_parallel_size=2, **SELECTIVE),
    "pp2 zbv cp2 full": Layout(**PP2, **SCHEDULES["zbv"], context_parallel_size=2, **FULL),
    # A tied weight.
    **{f"pp2 tied zero{stage}": Layout(TIED, **PP2, zero_stage=stage) for stage in (0, 2, 3)},
    "pp4 tied": Layout(TIED, **PP4),
    "pp2 tied tp2": Layout(TIED, **PP2, tensor_parallel_size=2),
    "pp4 tied interleaved": Layout(LONG_TIED, **PP4, **SCHEDULES["interleaved_1f1b"]),
    "pp4 tied zbv": Layout(LONG_TIED, **PP4, **SCHEDULES["zbv"]),
    # Copies of the shards.
    "hsdp": Layout(SHORT, **HSDP, micro_batch_size=2),
    "hsdp held": Layout(SHORT, **HSDP, micro_batch_size=2, reshard_after_forward=False),
    "hsdp cp2": Layout(SHORT, **HSDP, **CP2),
    # Experts on different ranks: two or all that hold different ones.
    **{f"ep2 zero{stage}": Layout(EXPERTS, **EP2, zero_stage=stage) for stage in range(4)},
    **{f"ep4 zero{stage}": Layout(EXPERTS, **EP4, zero_stage=stage) for stage in (0, 3)},
    **{f"ep2 capped zero{stage}": Layout(CAPPED, **EP2, zero_stage=stage) for stage in (0, 2)},
    "ep2 full": Layout(EXPERTS, **EP2, **FULL),
    "ep2 selective": Layout(EXPERTS, **EP2, **SELECTIVE),
    "ep2 capped full": Layout(CAPPED, **EP2, **FULL),
    "ep2 tp2 zero3": Layout(EXPERTS, **EP2, tensor_parallel_size=2, zero_stage=3),
    "ep2 tp2 sp": Layout(EXPERTS, **EP2, tensor_parallel_size=2, **SP),
    "ep2 cp2 zero2": Layout(EXPERTS, **EP2, context_parallel_size=2, zero_stage=2),
    "ep2 pp2 zero1": Layout(EXPERTS, **PP2, expert_parallel_size=2, zero_stage=1),
    "ep4 cp2 zero1": Layout(EXPERTS, **EP4, context_parallel_size=2, zero_stage=1),
    # Fewer ranks for each expert than tensor ranks: tokens are divided among the others.
    **{
        f"tp4 etp1 ep4 zero{stage}": Layout(EXPERTS, **TP4, **WHOLE_EXPERTS, expert_parallel_size=4, zero_stage=stage)
        for stage in (0, 3)
    },
    **{
        f"tp4 sp etp1 ep2 zero{stage}": Layout(EXPERTS, **TP4, **SP, **WHOLE_EXPERTS, expert_parallel_size=2, zero_stage=stage)
        for stage in range(4)
    },
    "tp4 etp1 zero2 full": Layout(SHARED, **TP4, **WHOLE_EXPERTS, **FULL, zero_stage=2),
    "tp4 sp etp2 ep2 full": Layout(EXPERTS, **TP4, **SP, **HALVED_EXPERTS, **FULL, expert_parallel_size=2),
    "tp4 etp2 ep2 shared full": Layout(SHARED, **TP4, **HALVED_EXPERTS, **FULL, expert_parallel_size=2),
    "tp4 sp etp2 post-norm full": Layout(
        dataclasses.replace(EXPERTS, norm_place=NormPlace.SUM), **TP4, **SP, **HALVED_EXPERTS, **FULL
    ),
    "tp2 sp etp1 ep4 zero3 selective": Layout(
        SHARED, **TP2, **SP, **WHOLE_EXPERTS, **SELECTIVE, expert_parallel_size=4, zero_stage=3
    ),
    "tp2 etp1 ep2 zero3": Layout(EXPERTS, **TP2, **WHOLE_EXPERTS, expert_parallel_size=2, zero_stage=3),
    "tp2 cp2 etp1 ep4": Layout(EXPERTS, **TP2, **WHOLE_EXPERTS, context_parallel_size=2, expert_parallel_size=4),
    "tp2 pp2 etp1 ep2 full": Layout(EXPERTS, **PP2, **WHOLE_EXPERTS, **FULL, tensor_parallel_size=2, expert_parallel_size=2),
    "tp2 sp etp1 async": Layout(SHARED, **TP2, **SP, **ASYNC, **WHOLE_EXPERTS, expert_parallel_size=2, zero_stage=1),
    "ep2 held": Layout(EXPERTS, **EP2, **HELD),
    # Shared experts that compute while tokens travel, and biases of routers that follow the loads.
    "ep2 beside zero2": Layout(SHARED, **EP2, **BESIDE, zero_stage=2),
    "ep2 beside full": Layout(SHARED, **EP2, **BESIDE, **FULL),
    "ep2 beside selective": Layout(SHARED, **EP2, **BESIDE, **SELECTIVE),
    "tp2 etp1 ep4 beside full": Layout(SHARED, **TP2, **WHOLE_EXPERTS, **BESIDE, **FULL, expert_parallel_size=4),
    "tp4 etp2 ep2 beside full": Layout(SHARED, **TP4, **HALVED_EXPERTS, **BESIDE, **FULL, expert_parallel_size=2),
    "tp2 sp etp1 ep2 beside full": Layout(SHARED, **TP2, **SP, **WHOLE_EXPERTS, **BESIDE, **FULL, expert_parallel_size=2),
    "ep2 loads zero1": Layout(BIASED, **EP2, **LOADS, zero_stage=1),
    "cp2 tp2 loads": Layout(BIASED, **CP2, **LOADS, tensor_parallel_size=2),
    "tp2 etp1 ep2 loads full": Layout(BIASED, **TP2, **WHOLE_EXPERTS, **LOADS, **FULL, expert_parallel_size=2),
    # Norms in other places and of heads, limits of scores, windows in some layers: only norms send more, their gradients.
    **{f"gemma dp4 zero{stage}": Layout(GEMMA, zero_stage=stage) for stage in (0, 2, 3)},
    "gemma tp4": Layout(GEMMA, **TP4),
    "gemma tp4 full": Layout(GEMMA, **TP4, **FULL),
    "gemma tp2 sp full zero3": Layout(GEMMA, **TP2, **SP, **FULL, zero_stage=3),
    "gemma tp2 chunked loss": Layout(GEMMA, **TP2, loss_chunk_size=32),
    "gemma cp4": Layout(GEMMA, **CP4),
    "gemma cp2 ulysses selective": Layout(GEMMA, **CP2, **ULYSSES, **SELECTIVE),
    "gemma pp2 zero1": Layout(GEMMA, **PP2, zero_stage=1),
    **{f"olmo dp4 zero{stage}": Layout(OLMO, zero_stage=stage) for stage in (0, 3)},
    "olmo cp2 full zero2": Layout(OLMO, **CP2, **FULL, zero_stage=2),
    # Data parallelism alone, with accumulation.
    **{f"dp4 zero{stage}": Layout(SHORT, zero_stage=stage) for stage in range(4)},
    "tp2 sp zero1 gathered late": Layout(SHORT, **TP2, **SP, zero_stage=1, overlap_param_gather=True),
    "pp2 zbv zero2 gathered late": Layout(**PP2, **SCHEDULES["zbv"], zero_stage=2, overlap_param_gather=True),
    "dp4 zero2 deferred": Layout(SHORT, zero_stage=2, defer_gradient_reduction=True),
    "dp4 zero3 held": Layout(SHORT, **HELD),
}


@pytest.mark.prove(every=11)
@pytest.mark.parametrize("name", sampled(LAYOUTS, every=14))
def test_every_rank_sends_what_the_closed_form_says(count: Count, name: str) -> None:
    layout = LAYOUTS[name]
    result = count(layout)
    for rank in range(RANKS):
        expected = {key: (times, size * BYTES) for key, (times, size) in layout.traffic(rank).items()}
        assert sent(result, rank) == expected, f"rank {rank}"


PER_LAYER = {
    "tp4": (4, 0),
    "tp4 full": (5, 0),
    "tp4 post-norm full": (6, 0),
    "tp4 sp": (0, 8),
    "tp4 sp full": (0, 11),
    "tp4 sp post-norm full": (0, 12),
}
"""Layout -> all-reduces, and all-gathers with reduce-scatters, of a layer and micro-batch: the laws of MODELS, spelled out."""


@pytest.mark.parametrize("name", sampled(PER_LAYER, every=6))
def test_a_layer_sends_what_MODELS_says(count: Count, name: str) -> None:
    """Two of the tables' layouts differ in what is not a layer's; that of the embedding, the head and the loss is known."""
    layout = LAYOUTS[name]
    row = sent(count(layout), 0)
    ends = 2 * layout.micro_batches
    reduced = row["all_reduce", "tensor"][0] - ends - 1
    moved = sum(row.get((operation, "tensor"), (0, 0))[0] for operation in ("all_gather", "reduce_scatter"))
    # With sequence parallelism the embedding and the head move twice as often, and the norms' gradients are reduced once.
    layers = SHORT.num_layers * layout.micro_batches
    expected = PER_LAYER[name]
    assert (reduced - (1 if moved else ends), moved - (2 * ends if moved else 0)) == (
        expected[0] * layers,
        expected[1] * layers,
    )


def sent(result: TrialResult, rank: int) -> dict[tuple[str, str], tuple[int, int]]:
    return {(row.operation, row.mesh_dimension): (row.count, row.bytes) for row in result.ranks[rank].collectives if row.count}
