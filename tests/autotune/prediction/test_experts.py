"""Experts on different ranks: what the equations say of memory and of communication, against counts of parameters."""

import dataclasses

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import collective_seconds, exchange_seconds, expert_group
from autotune.prediction.equations.compute import (
    GROUPED_EXPERTS,
    PADDED,
    SEPARATE_EXPERT,
    SEPARATE_EXPERTS,
    MicroBatchSeconds,
    crossing_rows,
    micro_batch,
)
from autotune.prediction.equations.software import EXCHANGE_HIDDEN, megatron_of, with_numbers
from autotune.prediction.equations.step import StepPrediction, predict
from executor.dry.dry_run import dry_run
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob import Value
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import HeadNorm
from search_spaces.training.states import states_lower_bound_bytes
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

MODEL = dataclasses.replace(resolve_model("mixtral-8x7b"), num_layers=2)
CLUSTER = resolve_cluster("dgx-a100:4")
RANKS = CLUSTER.world_size
WORKLOAD = Workload(global_batch_size=64, sequence_length=1024)
EXPERTS = MODEL.num_layers * MODEL.num_experts * 3 * MODEL.hidden_size * MODEL.ffn_hidden_size
RATES = Coefficients()
COMMON = MODEL.parameter_count - EXPERTS
TENSOR: dict[str, Value] = {"tensor_parallel_size": 4, "sequence_parallel": True, "micro_batch_size": 4}
FOLDED: dict[str, Value] = {**TENSOR, "expert_parallel_size": 8, "expert_tensor_parallel_size": 1}


def cases(model: object = MODEL, **knobs: Value) -> Cases:
    return cases_of(model, CLUSTER, WORKLOAD, [TrialConfig(precision="bf16").replace(knobs)], "native")


def predicted(**knobs: Value) -> StepPrediction:
    return predict(cases(**knobs), RATES)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 8])
def test_states_of_a_rank_are_its_share_of_what_is_common_and_of_its_own_experts(stage: int, ranks: int) -> None:
    tags = predicted(zero_stage=stage, expert_parallel_size=ranks, param_persistence_threshold=0).memory.by_tag
    whole, share = COMMON + EXPERTS / ranks, COMMON / RANKS + EXPERTS / ranks / (RANKS / ranks)
    expected = {
        "parameters": 2 * (share if stage == 3 else whole),
        "gradients": 4 * (share if stage >= 2 else whole),
        "optimizer_state": 12 * (share if stage >= 1 else whole),
    }
    for tag, size in expected.items():
        assert float(tags[tag][0]) == pytest.approx(size, rel=1e-3), tag


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("slices", "ranks"), [(1, 1), (1, 8), (2, 4)])
def test_states_of_experts_that_fewer_ranks_divide_than_the_rest(stage: int, slices: int, ranks: int) -> None:
    knobs = {"tensor_parallel_size": 4, "expert_tensor_parallel_size": slices, "expert_parallel_size": ranks}
    tags = predicted(zero_stage=stage, param_persistence_threshold=0, **knobs).memory.by_tag
    own = EXPERTS / (slices * ranks)
    whole, share = COMMON / 4 + own, COMMON / RANKS + EXPERTS / RANKS
    expected = {
        "parameters": 2 * (share if stage == 3 else whole),
        "gradients": 4 * (share if stage >= 2 else whole),
        "optimizer_state": 12 * (share if stage >= 1 else whole),
    }
    for tag, size in expected.items():
        assert float(tags[tag][0]) == pytest.approx(size, rel=2e-3), tag


def test_whole_experts_are_exchanged_inside_a_node() -> None:
    """Eight tensor ranks a node: slices of experts are exchanged over the network, whole ones with the node's own ranks."""
    knobs = {"zero_stage": 1, "tensor_parallel_size": 8, "sequence_parallel": True, "micro_batch_size": 4}
    sliced = predicted(**knobs, expert_parallel_size=4)
    whole = predicted(**knobs, expert_parallel_size=8, expert_tensor_parallel_size=1)
    assert float(whole.parts["tensor"][0]) < 0.5 * float(sliced.parts["tensor"][0])
    groups = [
        expert_group(cases(**knobs, **other)) for other in ({"expert_parallel_size": 4}, {"expert_tensor_parallel_size": 1})
    ]
    assert [float(group.in_domain[0]) for group in groups] == [1.0, 1.0]
    group = expert_group(cases(**knobs, expert_parallel_size=16, expert_tensor_parallel_size=1))
    assert (float(group.ranks[0]), float(group.in_domain[0])) == (16.0, 8.0)


def test_rows_for_other_nodes_pass_through_their_own_ranks_part_of_the_network() -> None:
    """Of 16 ranks on two nodes, each sends 8/15 of its bytes to the other node. A ring of all would use all cards for the same
    bytes; inside of one node both move them over the fast link."""

    def seconds(ranks: int, crossing: float = 1.0) -> tuple[float, float]:
        each = cases(zero_stage=1, expert_parallel_size=ranks)
        group, volume = expert_group(each), np.array([1e10])
        exchanged = exchange_seconds(each, group, volume, np.ones(1), RATES, crossing)
        return float(exchanged[0]), float(collective_seconds(each, group, volume, np.ones(1), RATES)[0])

    own = CLUSTER.inter_node_bandwidth / CLUSTER.devices_per_node * RATES.network_efficiency
    exchanged, ring = seconds(16)
    assert exchanged == pytest.approx(1e10 * 8 / 15 / own, rel=0.01)
    assert ring == pytest.approx(exchanged * 15 / 8 / CLUSTER.devices_per_node, rel=0.05)
    assert seconds(16, crossing=0.5)[0] == pytest.approx(exchanged / 2, rel=0.01)
    assert seconds(8)[0] == seconds(8)[1]


def test_a_token_that_goes_once_to_a_node_is_forwarded_there() -> None:
    """Two experts of a token are on the same of two nodes in half of the cases: three rows of four are sent."""
    across, inside = (cases(zero_stage=1, expert_parallel_size=ranks) for ranks in (16, 8))
    assert float(crossing_rows(across)[0]) == 1.0
    for each, share in ((across, 0.75), (inside, 0.5)):
        software = dataclasses.replace(each.software, once_per_domain=np.ones(1))
        assert float(crossing_rows(dataclasses.replace(each, software=software))[0]) == pytest.approx(share)


@pytest.mark.parametrize(("precision", "added"), [("bf16", GROUPED_EXPERTS), ("fp32", SEPARATE_EXPERTS + 8 * SEPARATE_EXPERT)])
def test_launches_of_experts(precision: str, added: float) -> None:
    """Where the host is slow, a layer takes as long as its launches: the more, the more experts are multiplied one by one."""
    slow = dataclasses.replace(RATES, kernel_seconds=10.0)
    dense = dataclasses.replace(MODEL, num_experts=0, experts_per_token=0)
    seconds = [
        float(micro_batch(cases_of(model, CLUSTER, WORKLOAD, [TrialConfig(precision=precision)], "native"), slow).layer[0])
        for model in (dense, MODEL)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(1 + added, rel=0.01)


def test_bytes_of_routing() -> None:
    """Where memory is slow: tokens' rows are moved for each of their experts, and once more between ranks."""
    slow = dataclasses.replace(RATES, traffic=1e4)

    def seconds(**knobs: Value) -> float:
        each = cases(zero_stage=0, **knobs)
        bandwidth, width = float(each.hardware.bandwidth[0]), float(each.software.elementwise[0]) * 2 * MODEL.hidden_size
        moved = float(micro_batch(each, slow).layer[0]) * bandwidth / (1 + slow.backward_ratio) / slow.traffic
        return moved / WORKLOAD.sequence_length / width

    assert seconds(expert_parallel_size=8) - seconds() == pytest.approx(2 * MODEL.experts_per_token, rel=0.01)
    each = cases(zero_stage=0)
    padded = dataclasses.replace(each, software=with_numbers(each.software, {"pads_experts": 1.0}))
    whole, more = (float(micro_batch(made, slow).layer[0]) for made in (each, padded))
    rows = WORKLOAD.sequence_length * MODEL.experts_per_token * MODEL.hidden_size * 2 * float(each.software.elementwise[0])
    moved = (more - whole) * float(each.hardware.bandwidth[0]) / (1 + slow.backward_ratio) / slow.traffic
    assert moved / rows == pytest.approx(PADDED, rel=0.01)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("knobs", "within"),
    sampled(
        [
            ({"zero_stage": 0, "expert_parallel_size": 2}, 0.06),
            ({"zero_stage": 1, "expert_parallel_size": 8}, 0.08),
            ({"zero_stage": 2, "expert_parallel_size": 4}, 0.10),
            ({"zero_stage": 3, "expert_parallel_size": 8}, 0.15),
            ({"zero_stage": 1, "expert_parallel_size": 8, "activation_checkpointing": "full", "micro_batch_size": 2}, 0.10),
            ({"zero_stage": 1, **TENSOR, "expert_parallel_size": 2}, 0.12),
            ({**FOLDED, "zero_stage": 1}, 0.10),
            ({**FOLDED, "zero_stage": 3}, 0.15),
            ({**FOLDED, "zero_stage": 2, "expert_parallel_size": 4, "expert_tensor_parallel_size": 2}, 0.10),
            ({**FOLDED, "sequence_parallel": False}, 0.10),
        ],
        every=3,
    ),
    ids=str,
)
def test_memory_is_what_the_engine_takes_on_tensors_without_data(knobs: dict[str, Value], within: float) -> None:
    config = TrialConfig(precision="bf16").replace(knobs)
    real = dry_run(MODEL, config, WORKLOAD, RANKS, backend="nccl").peak_memory_bytes
    assert float(predicted(**knobs).memory.allocated[0]) == pytest.approx(real, rel=within)
    assert states_lower_bound_bytes(config, MODEL, RANKS) <= real


@pytest.mark.nightly
def test_memory_of_one_expert_of_normed_heads_and_of_chunks() -> None:
    whole = dataclasses.replace(resolve_model("llama-4-scout-17b-16e"), num_layers=4, vocab_size=32000, sliding_window=256)
    for model in (whole, dataclasses.replace(whole, head_norm=HeadNorm.NONE)):
        config = TrialConfig(precision="bf16").replace({"zero_stage": 1, "expert_parallel_size": 8, "micro_batch_size": 2})
        real = dry_run(model, config, WORKLOAD, RANKS, backend="nccl").peak_memory_bytes
        found = predict(cases_of(model, CLUSTER, WORKLOAD, [config], "native"), Coefficients()).memory.allocated[0]
        assert float(found) == pytest.approx(real, rel=0.06)


def test_more_expert_ranks_move_more_tokens_and_reduce_less() -> None:
    found = [predicted(zero_stage=1, expert_parallel_size=ranks) for ranks in (1, 2, 4, 8)]
    assert np.all(np.diff([float(each.parts["tensor"][0]) for each in found]) > 0)
    assert np.all(np.diff([float(each.parts["data"][0]) for each in found]) < 0)


SHARED = dataclasses.replace(MODEL, ffn_hidden_size=2048, shared_expert_size=8192, vocab_size=4096)
BESIDE: dict[str, Value] = {"zero_stage": 1, "micro_batch_size": 2, "expert_parallel_size": 8}


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_tokens_travel_while_shared_experts_compute(recomputed: str) -> None:
    """Narrow shared experts take less time than tokens travel: then only as much is hidden."""
    rates = Coefficients()
    hidden = []
    for model in (SHARED, dataclasses.replace(SHARED, shared_expert_size=64)):
        waited, beside = (
            predict(cases(model, **BESIDE, activation_checkpointing=recomputed, shared_expert_overlap=overlap), rates)
            for overlap in (False, True)
        )
        hidden.append(1 - float(beside.parts["tensor"][0] / waited.parts["tensor"][0]))
        assert beside.parts["compute"] == pytest.approx(waited.parts["compute"], rel=0.01)
    assert hidden[0] == pytest.approx(1 - rates.overlap_slowdown)
    assert 0 < hidden[1] < 0.7 * hidden[0]


@pytest.mark.parametrize("knobs", [{"expert_parallel_size": 1}, {"expert_parallel_size": 8}], ids=str)
def test_without_shared_experts_or_expert_ranks_nothing_is_hidden(knobs: dict[str, Value]) -> None:
    model = SHARED if knobs["expert_parallel_size"] == 1 else MODEL
    waited, beside = (
        predict(cases(model, **knobs, shared_expert_overlap=overlap), Coefficients()) for overlap in (False, True)
    )
    assert beside.seconds == pytest.approx(waited.seconds)
    assert beside.memory.total == pytest.approx(waited.memory.total)


@pytest.mark.prove
def test_a_gradient_of_shared_experts_waits_for_the_others() -> None:
    found = []
    for overlap in (False, True):
        config = TrialConfig(precision="bf16").replace({**BESIDE, "shared_expert_overlap": overlap})
        real = dry_run(SHARED, config, WORKLOAD, RANKS, backend="nccl").peak_memory_bytes
        found.append(
            (real, float(predict(cases_of(SHARED, CLUSTER, WORKLOAD, [config], "native"), Coefficients()).memory.allocated[0]))
        )
    (waited, predicted_waited), (beside, predicted_beside) = found
    assert beside - waited == 2 * WORKLOAD.sequence_length * SHARED.shared_expert_size * 2
    assert predicted_beside - predicted_waited == pytest.approx(beside - waited)


def of_loads(loads: tuple[float, ...], **knobs: Value) -> StepPrediction:
    model = dataclasses.replace(MODEL, expert_loads=(loads,))
    return predict(cases(model, **knobs), Coefficients())


EVEN, UNEVEN = (1.0,) * 8, (3.0, *(1.0,) * 7)
"""Of ten parts, a rank of eight has three instead of 1.25."""


def test_the_busiest_rank_takes_longer_and_keeps_more() -> None:
    even, uneven = (of_loads(loads, zero_stage=1, expert_parallel_size=8) for loads in (EVEN, UNEVEN))
    plain = predicted(zero_stage=1, expert_parallel_size=8)
    assert float(even.seconds[0]) == float(plain.seconds[0])
    assert uneven.seconds[0] > even.seconds[0]
    rows = WORKLOAD.sequence_length * MODEL.experts_per_token * (3 / 1.25 - 1)
    # bf16: the hidden layer's three parts and its product, and what the experts read.
    kept = rows * (8 * MODEL.ffn_hidden_size + 2 * MODEL.hidden_size)
    more = float(uneven.memory.by_tag["activations"][0]) - float(even.memory.by_tag["activations"][0])
    assert more == pytest.approx((MODEL.num_layers + Coefficients().working_layers) * kept)


def test_loads_are_the_same_to_ranks_that_have_all_experts_and_in_full_places() -> None:
    for knobs in ({"zero_stage": 1}, {"zero_stage": 1, "tensor_parallel_size": 2}):
        assert float(of_loads(UNEVEN, **knobs).seconds[0]) == float(predicted(**knobs).seconds[0])
    full = dataclasses.replace(MODEL, capacity_factor=1.0)
    one, other = (
        predict(cases(model, expert_parallel_size=8), Coefficients()).seconds
        for model in (full, dataclasses.replace(full, expert_loads=(UNEVEN,)))
    )
    assert float(one[0]) == float(other[0])


def test_empty_places_of_experts_are_computed_too() -> None:
    rows = [cases(dataclasses.replace(MODEL, capacity_factor=factor)).shapes.experts_per_token for factor in (0.0, 1.0, 1.5)]
    assert [float(each[0]) for each in rows] == [2.0, 2.0, 3.0]


def test_a_flex_dispatcher_and_an_overlap_of_megatron() -> None:
    """The dispatcher sends a token once to a node; the overlap hides what it hides of software that has it always."""
    each = cases(zero_stage=1, expert_parallel_size=16)

    def stated(**words: str) -> Cases:
        return dataclasses.replace(each, megatron=megatron_of(words, "h100"))

    assert float(crossing_rows(stated(dispatcher="flex"))[0]) == pytest.approx(0.75)
    assert float(crossing_rows(stated(dispatcher="alltoall"))[0]) == 1.0
    plain, hidden = (
        float(micro_batch(stated(dispatcher="alltoall", moe_comm_overlap=overlaps), RATES).layer_communication[0])
        for overlaps in ("false", "true")
    )
    assert hidden == pytest.approx((1 - EXCHANGE_HIDDEN) * plain)


def test_captured_launches_and_hidden_exchanges() -> None:
    """Graphs of layers leave the launches of experts, one of the iteration none; a hidden share of an exchange is free."""
    slow, each = dataclasses.replace(RATES, kernel_seconds=10.0), cases(zero_stage=1, expert_parallel_size=8)

    def batch(**features: float) -> MicroBatchSeconds:
        return micro_batch(dataclasses.replace(each, software=with_numbers(each.software, features)), slow)

    launched, layers, iteration = (float(batch(captured=kind).layer[0]) for kind in (0, 1, 2))
    assert launched / layers == pytest.approx(1 + 1 / GROUPED_EXPERTS, rel=0.01)
    assert iteration < layers / 100
    exchanges = [float(batch(exchange_hidden=share).layer_communication[0]) for share in (0, 0.25)]
    assert exchanges[1] == pytest.approx(0.75 * exchanges[0])
