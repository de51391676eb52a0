"""Laws that every prediction keeps, on thousands of random legal configurations at once.

Models: dense, with learned positions and a tied table, with experts, with adapters. Configurations: every schedule, stage,
degree, recomputation and offloading that the engine takes.
"""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.grid import ConfigGrid, KnobRows
from autotune.prediction.cases.grid_cases import GridCases
from autotune.prediction.equations.cases import SCHEDULES, Array, Cases
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.memory import TAGS, rank_memory
from autotune.prediction.equations.pipeline import split_layers
from autotune.prediction.equations.step import PARTS, StepPrediction, predict
from autotune.request.engines import CAPABILITIES
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.spaces import resolve_space
from search_spaces.trial import Workload
from tests.sampling import sampled

ROWS = 4000
"""Random configurations of each place."""
STATES = ("parameters", "gradients", "optimizer_state")
HAIR = 1e-9
"""Relative difference that is rounding."""
STANDING = {
    "reduce_bucket_size": "1e6,5e8", "allgather_bucket_size": "5e8", "prefetch_bucket_size": "0,5e7",
    "max_live_parameters": "1e9", "param_persistence_threshold": "1e5", "contiguous_gradients": "true",
    "fused_optimizer": "true", "rank_order": "tp-cp-dp-pp", "expandable_segments": "false", "attention_backend": "best",
    "loss_chunk_size": "0,1024", "micro_batch_size": "1,2,8", "virtual_stages": "1,2,4", "hsdp_shard_size": "0,2",
    "checkpoint_every_k": "1,4", "gc_interval": 0, "numa_binding": "false", "overlap_param_gather": "false",
    "offload_activations": "false", "async_tensor_parallel": "false", "cuda_graphs": "false",
}  # fmt: skip
PLACES: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "dense": ("llama-3-8b", "dgx-h100:2", 64, 8192, {}),
    "dense-large": ("llama-3.1-405b", "dgx-h100:128", 1024, 8192, {
        "pipeline_parallel_size": "1,16,64", "tensor_parallel_size": "1,8", "context_parallel_size": "1,8",
    }),
    "positions": ("gpt2-xl", "aws-p4d:2", 64, 1024, {}),
    "tied": ("qwen2-0.5b", "dgx-1v", 32, 2048, {"precision": "fp32"}),
    "experts": ("mixtral-8x7b", "dgx-a100:4", 64, 4096, {"engine": None, "expert_parallel_size": "1,2,8"}),
    "adapters": ("llama-3-8b", "gcp-a2-ultra", 32, 4096, {"lora_rank": 16, "frozen_bits": 4}),
    "narrow-network": ("llama-2-13b", "aws-p3dn:4", 64, 2048, {"precision": "fp16", "engine": None}),
    "racks": ("llama-3-8b", "gb200-nvl72:36", 288, 8192, {"tensor_parallel_size": "1,2,8", "pipeline_parallel_size": "1,2,4"}),
    "windowed": ("mistral-7b", "azure-nd-h100-v5:2", 32, 8192, {}),
    "beside-computation": ("llama-3-8b", "dgx-h100:2", 64, 4096, {
        "overlap_param_gather": "true", "offload_activations": "true", "offload_optimizer": "none",
        "async_tensor_parallel": "true",
    }),
    "fused-kernels": ("llama-3-8b", "dgx-h100", 64, 4096, {"fused_kernels": "liger"}),
    "graphs": ("llama-3-8b", "dgx-h100:2", 64, 4096, {
        "cuda_graphs": "all", "zero_stage": "0,1,2", "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "context_parallel_size": 1, "activation_checkpointing": "none", "compile_blocks": "false",
    }),
    "on-processors": ("llama-small", "local", 16, 256, {"precision": "fp32"}),
}  # fmt: skip


@cache
def made(name: str) -> tuple[Cases, StepPrediction]:
    """Random rows of the place's grid as flat cases, and what is predicted of them."""
    preset, cluster_name, batch, length, more = PLACES[name]
    options = dict(more)
    model, cluster = resolve_model(preset), resolve_cluster(cluster_name, 4 if cluster_name == "local" else None)
    adapters = {key: options.pop(key) for key in ("lora_rank", "frozen_bits") if key in options}
    model = dataclasses.replace(model, **adapters)
    engine = options.pop("engine", "native")
    space = resolve_space(
        "full", model, cluster, Workload(global_batch_size=batch, sequence_length=length),
        CAPABILITIES[engine] if engine else None, STANDING | options,
    )  # fmt: skip
    grid = ConfigGrid(space)
    source = GridCases(space, model, engine or "native", grid)
    generator = np.random.default_rng(0)
    parts = [flat(source.of(rows), (rows.count, grid.sides.count)) for rows in some(grid, generator)]
    together = joined_layouts(parts)
    chosen = together.take(generator.integers(len(together), size=ROWS))
    return chosen, predict(chosen, rates_for(cluster, "native"))


def some(grid: ConfigGrid, generator: np.random.Generator) -> Iterator[KnobRows]:
    """A few rows of every block."""
    for rows in grid.blocks(500_000):
        yield rows.take(generator.integers(rows.count, size=min(rows.count, 3000)))


def flat(cases: Cases, shape: tuple[int, int]) -> Cases:
    layouts = {
        field.name: np.broadcast_to(getattr(cases.layouts, field.name), shape).ravel()
        for field in dataclasses.fields(cases.layouts)
    }
    return dataclasses.replace(cases, layouts=type(cases.layouts)(**layouts))


def joined_layouts(parts: list[Cases]) -> Cases:
    first = parts[0]
    names = [field.name for field in dataclasses.fields(first.layouts)]
    columns = {name: np.concatenate([getattr(part.layouts, name) for part in parts]) for name in names}
    return dataclasses.replace(first, layouts=type(first.layouts)(**columns))


def with_layouts(cases: Cases, **fields: Array) -> Cases:
    return dataclasses.replace(cases, layouts=dataclasses.replace(cases.layouts, **fields))


def again(name: str, cases: Cases) -> StepPrediction:
    return predict(cases, rates_for(resolve_cluster(PLACES[name][1], 4 if PLACES[name][1] == "local" else None), "native"))


def require(good: Array, cases: Cases, told: str) -> None:
    """All good, or the first configuration that is not."""
    bad = np.flatnonzero(~np.broadcast_to(good, len(cases)))
    if len(bad):
        fields = {field.name: getattr(cases.layouts, field.name) for field in dataclasses.fields(cases.layouts)}
        example = {name: float(values[bad[0] if len(values) > 1 else 0]) for name, values in fields.items()}
        pytest.fail(f"{told}: {len(bad)} of {len(cases)}, such as {example}")


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(PLACES, every=3))
def test_what_is_predicted_is_a_number_and_sums_up(name: str) -> None:
    cases, prediction = made(name)
    assert tuple(prediction.parts) == PARTS
    assert tuple(prediction.memory.by_tag) == TAGS
    for kind, values in (*prediction.parts.items(), *prediction.memory.by_tag.items(), ("host", prediction.memory.host)):
        require(np.isfinite(values) & (values >= 0), cases, kind)
    require(prediction.seconds > 0, cases, "seconds")
    np.testing.assert_allclose(prediction.seconds, sum(prediction.parts.values()), rtol=1e-12)
    np.testing.assert_allclose(prediction.memory.total, sum(prediction.memory.by_tag.values()), rtol=1e-12)
    low, high = prediction.seconds_band()
    require((low < prediction.seconds) & (prediction.seconds < high), cases, "band")


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(PLACES, every=3))
def test_memory_never_falls_when_the_micro_batch_grows(name: str) -> None:
    """At the same number of micro-batches."""
    cases, prediction = made(name)
    before = prediction.memory.total
    for factor in (2, 3, 16):
        after = again(name, with_layouts(cases, micro_batch_size=cases.layouts.micro_batch_size * factor)).memory.total
        require(after >= before * (1 - HAIR), cases, f"{factor} times the micro-batch")


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(PLACES, every=3))
def test_the_share_of_states_never_rises_with_the_stage(name: str) -> None:
    """Of one and the same rank, the first, the last and one between; and of the fullest, unless another becomes the fullest.

    (What a stage adds to buffers may make that rank the fullest which holds more states.) A second copy of the parameters is
    a state that stage 3 alone has.
    """
    cases, _ = made(name)
    cases = with_layouts(cases, offload_parameters=np.zeros(len(cases)), secondary_shard_size=np.zeros(len(cases)))
    # What stages 1 and 2 alone gather after the update is small here: it makes the share of states there smaller.
    cases = with_layouts(cases, allgather_bucket_size=np.ones(len(cases)))
    split, rates = split_layers(cases), rates_for(resolve_cluster("dgx-h100"), "native")
    p, none, one = cases.layouts.pipeline, np.zeros(1), np.ones(1)
    ranks = {
        "first": (split.first, 0 * p, one, none),
        "inner": (split.most, p // 2, none, none),
        "last": (split.last, p - 1, none, one),
    }
    shares: dict[str, Array] = {}
    fullest = again(name, with_layouts(cases, zero_stage=np.zeros(len(cases)))).memory.stage
    for stage in range(4):
        staged = with_layouts(cases, zero_stage=np.full(len(cases), float(stage)))
        found = {rank: rank_memory(staged, rates, *where) for rank, where in ranks.items()} | {"": again(name, staged).memory}
        for rank, memory in found.items():
            share = sum(memory.by_tag[tag] for tag in STATES) / memory.total
            moved = (found[""].stage != fullest) if not rank else np.zeros(len(cases), dtype=bool)
            require(
                (share <= shares.get(rank, np.inf) * (1 + HAIR)) | moved, cases, f"states of the {rank} rank, stage {stage}"
            )
            shares[rank] = share
        fullest = found[""].stage


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(PLACES, every=3))
@pytest.mark.parametrize("link", ["intra", "inter", "host_link", "bandwidth", "host_bandwidth", "peak"])
def test_no_step_is_faster_on_slower_hardware(name: str, link: str) -> None:
    cases, prediction = made(name)
    before = prediction.seconds
    for factor in (0.9, 0.3, 0.01):
        hardware = dataclasses.replace(cases.hardware, **{link: getattr(cases.hardware, link) * factor})
        after = again(name, dataclasses.replace(cases, hardware=hardware)).seconds
        require(after >= before * (1 - HAIR), cases, f"{link} x {factor}")
        before = after


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(PLACES, every=3))
def test_offloading_never_takes_device_memory(name: str) -> None:
    cases, _ = made(name)
    held = again(name, with_layouts(cases, offload_optimizer=np.zeros(len(cases)))).memory.total
    for ratio in (0.5, 1.0):
        less = again(name, with_layouts(cases, offload_optimizer=np.full(len(cases), ratio))).memory.total
        require(less <= held * (1 + HAIR), cases, f"offload_ratio {ratio}")
        held = less


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(PLACES, every=3))
def test_recomputing_more_never_keeps_more(name: str) -> None:
    cases, _ = made(name)
    kept = {}
    for policy in range(3):
        prediction = again(name, with_layouts(cases, activation_checkpointing=np.full(len(cases), float(policy))))
        kept[policy] = prediction
    require(kept[0].parts["compute"] <= kept[2].parts["compute"] * (1 + HAIR), cases, "full recomputation is faster than none")
    require(kept[2].memory.total <= kept[0].memory.total * (1 + HAIR), cases, "full recomputation keeps more than none")


@pytest.mark.nightly
def test_every_schedule_and_stage_is_among_them() -> None:
    schedules, stages, contexts, experts, near = set[int](), set[int](), set[int](), set[int](), set[int]()
    for name in PLACES:
        layouts = made(name)[0].layouts
        schedules |= set(layouts.pipeline_schedule[layouts.pipeline > 1].astype(int).tolist())
        stages |= set(layouts.zero_stage.astype(int).tolist())
        contexts |= set(layouts.context.astype(int).tolist())
        experts |= set(layouts.expert.astype(int).tolist())
        near |= set(layouts.secondary_shard_size.astype(int).tolist())
        # Selective recomputation keeps on the device what offloading would move, and what Liger rotates in place; graphs
        # compute nothing again, and what they read is on the device.
        without, graphs = layouts.offload_activations.any() or layouts.fused_kernels.any(), layouts.cuda_graphs.any()
        recomputed = {0.0} if graphs else {0.0, 2.0} if without else {0.0, 1.0, 2.0}
        assert set(np.unique(layouts.activation_checkpointing)) == recomputed
        assert layouts.offload_optimizer.max() == float(PLACES[name][4].get("offload_optimizer") != "none")
        assert layouts.offload_parameters.max() == float(not graphs)
    assert schedules == set(range(len(SCHEDULES)))
    assert stages == {0, 1, 2, 3}
    assert len(contexts) > 2
    assert len(experts) > 1
    assert len(near) > 1
