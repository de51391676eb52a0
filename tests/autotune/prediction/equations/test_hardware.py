"""Clusters of two nodes of which the second has half the speed and half the memory, against every layout there is."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.cases.grid import ConfigGrid
from autotune.prediction.cases.grid_cases import GridCases
from autotune.prediction.equations.hardware import devices_of_ranks, hardware_of
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import predict, seconds_of
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.memory_fit import memory_limits_of
from autotune.prediction.planning.plan import PlanObjective, PlanOptions, plan
from autotune.prediction.planning.question import Question, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from autotune.prediction.planning.stage_program import Menu, solved
from search_spaces.clusters.cluster import PCIE_COPIES, ClusterSpec, DeviceSpec, NodeGroup, mixed_cluster
from search_spaces.clusters.devices import device_preset
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import ClusterFormatError
from search_spaces.models.pipeline import split_layers
from search_spaces.preset_files import preset_tables
from search_spaces.trial_config import TrialConfig


def device(speed: float, memory_bytes: int) -> DeviceSpec:
    return DeviceSpec(
        name=f"x{speed:g}", kind="cuda", memory_bytes=memory_bytes, peak_flops={"bf16": speed * 3e14, "fp32": speed * 2e13},
        memory_bandwidth=2e12,
    )  # fmt: skip


def two_nodes(first: float = 1.0, second: float = 0.5, devices: int = 2, memory_bytes: int = 2**36) -> ClusterSpec:
    """Memory goes with speed."""
    groups = [
        NodeGroup(
            nodes=1, device=device(speed, int(speed * memory_bytes)), intra_node_bandwidth=2e11, inter_node_bandwidth=2e10,
            host_memory_bytes=10**12, cores_per_node=32,
        )
        for speed in (first, second)
    ]  # fmt: skip
    return mixed_cluster("two-nodes", devices, groups)


def asked(cluster: ClusterSpec, layers: int = 8, **fields: Any) -> Question:
    shape = dataclasses.replace(model_of("llama-3-8b", None, None, None), num_layers=layers)
    given: dict[str, Any] = {"global_batch_size": 16, "sequence_length": 4096} | fields
    return question_of(shape, cluster, **given)


def pipeline(ranks: int, **knobs: Any) -> TrialConfig:
    return TrialConfig(precision="bf16", pipeline_parallel_size=ranks, zero_stage=1).replace(knobs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_slower_node_gets_fewer_layers_and_none_is_better(ranks: int) -> None:
    question, menu = asked(two_nodes()), Menu(policies=("none", "selective") if ranks == 2 else ("none",))
    config, limits = pipeline(ranks), memory_limits_of(question)
    answer = solved(question, config, limits, menu)
    assert answer is not None
    counts = [len(layers) for layers in split_layers(question.model, answer, 4096)]
    assert sum(counts[: ranks // 2]) > sum(counts[ranks // 2 :])
    every = [
        config.replace({"pipeline_layout": "-".join(f"{count}{mark}" for count, mark in zip(layout, marks, strict=True))})
        for layout in itertools.product(range(1, 8), repeat=ranks)
        if sum(layout) == 8
        for marks in itertools.product(*(["", *(f"s{again}" for again in range(1, count + 1))] if ranks == 2 else [""]
                                         for count in layout))
    ]  # fmt: skip
    cases = cases_of(question.model, question.cluster, question.workload, every, "native")
    held, seconds = memory(cases, question.rates), seconds_of(cases, question.rates)
    best = float(np.where(limits.holds(held.needed, held.host), seconds, np.inf).min())
    (told,) = estimates(question, [answer])
    assert told.step_seconds.mean == pytest.approx(best, rel=1e-7)
    assert told.fit_probability >= 0.95


def test_each_rank_is_held_against_its_own_device() -> None:
    question = asked(two_nodes(), layers=8)
    heavy_first, heavy_last = (pipeline(2, pipeline_layout=text) for text in ("7-1", "1-7"))
    first, last = estimates(question, [heavy_first, heavy_last])
    assert first.fit_probability > last.fit_probability
    assert first.step_seconds.mean < last.step_seconds.mean
    assert first.memory_limit_bytes == 2**36
    assert last.memory_limit_bytes == 2**35


def test_the_slowest_of_a_data_parallel_group_decides() -> None:
    """Pipelines that lie across both nodes at every place run at the slower one's pace."""
    mixed, slow = asked(two_nodes()), asked(two_nodes(0.5, 0.5))
    assert mixed.cluster.device.memory_bytes == slow.cluster.device.memory_bytes == slow.cluster.most_memory_bytes
    for config in (pipeline(1), pipeline(2, rank_order="tp-cp-pp-dp"), pipeline(1, tensor_parallel_size=2)):
        (one,), (other,) = estimates(mixed, [config]), estimates(slow, [config])
        assert one.step_seconds.mean == pytest.approx(other.step_seconds.mean, rel=1e-9)
        assert one.fit_probability == pytest.approx(other.fit_probability, rel=1e-9)


def test_devices_are_those_of_the_ranks() -> None:
    cluster = two_nodes(devices=4)
    assert devices_of_ranks(pipeline(2), cluster) == (0, 1)
    assert devices_of_ranks(pipeline(8), cluster) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert devices_of_ranks(pipeline(4, tensor_parallel_size=2), cluster) == (0, 0, 1, 1)
    assert devices_of_ranks(pipeline(2, rank_order="tp-cp-pp-dp"), cluster) == (2, 2)
    assert devices_of_ranks(pipeline(2), two_nodes(1.0, 1.0)) == ()


def test_a_grid_on_nodes_that_differ_is_what_its_configurations_are() -> None:
    question = asked(two_nodes(devices=4), layers=12, space="3d", pins={
        "pipeline_layout": ",7-5,4f-4-2-2,2-2-1-7", "pipeline_schedule": "1f1b,zbv", "virtual_stages": "1,2",
        "zero_stage": "0,2", "rank_order": "tp-cp-dp-pp,tp-cp-pp-dp",
    })  # fmt: skip
    space = space_of(question)
    grid = ConfigGrid(space)
    maker, piped = GridCases(space, question.model, "native", grid), 0
    for rows in grid.blocks(5000):
        configs = list(grid.configs(rows))
        piped += sum(config.pipeline_parallel_size > 1 for config in configs)
        cases = cases_of(question.model, question.cluster, question.workload, configs, "native")
        ours, theirs, shape = (
            predict(maker.of(rows), question.rates),
            predict(cases, question.rates),
            (rows.count, grid.sides.count),
        )
        for one, other in [(ours.seconds, theirs.seconds), (ours.memory.needed, theirs.memory.needed)]:
            np.testing.assert_allclose(np.broadcast_to(one, shape).ravel(), np.broadcast_to(other, len(configs)), rtol=1e-12)
    assert piped > 50


@pytest.mark.prove
def test_a_plan_uses_the_faster_node_more() -> None:
    question = asked(two_nodes(), layers=16, pins={
        "pipeline_layout": "solved", "pipeline_parallel_size": "2,4", "virtual_stages": 1, "tensor_parallel_size": 1,
        "context_parallel_size": 1,
    })  # fmt: skip
    best = plan(question, PlanOptions(top=1)).plans[0].estimate
    half = len(best.ranks) // 2
    assert sum(rank.layers for rank in best.ranks[:half]) > sum(rank.layers for rank in best.ranks[half:])


def test_fewer_nodes_of_those_that_differ_are_not_planned_for() -> None:
    with pytest.raises(ClusterFormatError, match="which differ"):
        plan(asked(two_nodes()), PlanOptions(objective=PlanObjective.COST, price=1.0))


def test_offloaded_states_are_copied_over_the_link_of_the_device() -> None:
    links = {name: device_preset(name).host_link for name in preset_tables("devices")}
    assert {name: link for name, link in links.items() if link != PCIE_COPIES} == {
        "gh200": 450e9, "gb200": 225e9, "gb300": 225e9,
    }  # fmt: skip
    cluster = resolve_cluster("alps-gh200")
    by_pcie = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, host_link=PCIE_COPIES))
    config = TrialConfig(precision="bf16", zero_stage=2, offload_optimizer="cpu")
    fast, slow = (estimates(asked(own), [config])[0].step_seconds.mean for own in (cluster, by_pcie))
    assert fast < slow


def test_fp32_is_not_tf32() -> None:
    """torch multiplies in TF32 only where it is asked for, and the engine does not ask."""
    cluster = resolve_cluster("dgx-h100")
    peaks = cluster.device.peak_flops
    bf16, fp32 = (float(hardware_of(cluster, name).peak[0]) for name in ("bf16", "fp32"))
    assert bf16 / fp32 == pytest.approx(peaks["bf16"] / peaks["fp32"])


def test_a_device_whose_peaks_nobody_states_is_predicted() -> None:
    cluster = resolve_cluster("dgx-h100")
    unknown = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, name="new", peak_flops={}))
    assert 0 < hardware_of(unknown, "fp32").peak[0] < hardware_of(cluster, "fp32").peak[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_only_fp32_is_slower_than_the_fastest_that_is_stated(precision: str) -> None:
    cluster = resolve_cluster("dgx-h100")
    stated = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, peak_flops={"bf16": 8e14}))
    fp32, other = (float(hardware_of(stated, name).peak[0]) for name in ("fp32", precision))
    assert other == pytest.approx(8 * fp32)
