"""Predictions of what reductions move, and of when they may begin."""

import dataclasses
from typing import Any

import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import predict
from autotune.prediction.fitting.calibration import predicted_rows
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import GroupShape, MeasuredRow, Operation
from search_spaces.clusters.presets import local_cluster, resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

CPUS, GPUS = local_cluster(4), resolve_cluster("dgx-h100:1")
# Latencies aside, seconds are bytes.
RATES = Coefficients(
    link_seconds=1e-12, network_seconds=1e-12, chunk_seconds=0.0, data_exposed=1.0, overlap_slowdown=1e-9
)  # fmt: skip


def data_seconds(cluster: ClusterSpec, rates: Coefficients = RATES, **knobs: Any) -> float:
    model, workload = resolve_model("llama-tiny"), Workload(global_batch_size=32, sequence_length=128)
    config = TrialConfig(micro_batch_size=8).replace(knobs)
    return float(predict(cases_of(model, cluster, workload, [config], "native"), rates).parts["data"][0])


@pytest.mark.parametrize(("cluster", "times"), [(CPUS, 3.0), (GPUS, 2.0)], ids=["gloo", "nccl"])
def test_a_scatter_of_gloo_moves_what_an_all_reduce_moves(cluster: ClusterSpec, times: float) -> None:
    """Stage 1 scatters and gathers what stage 0 all-reduces: two parts, of which gloo's first is two itself."""
    whole, divided = data_seconds(cluster, zero_stage=0), data_seconds(cluster, zero_stage=1)
    assert divided / whole == pytest.approx(times / 2, rel=0.01)


@pytest.mark.parametrize(("cluster", "times"), [(CPUS, 2.0), (GPUS, 1.0)], ids=["gloo", "nccl"])
def test_a_measured_scatter_is_held_against_what_it_moves(cluster: ClusterSpec, times: float) -> None:
    told = {"shape": (1 << 24,), "precision": "fp32", "seconds": 1.0, "low": 1.0, "high": 1.0, "samples": 5}
    group = GroupShape(ranks=4, in_node=4)
    rows = [MeasuredRow(operation=one, group=group, **told) for one in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER)]
    gather, scatter = (float(predicted_rows([row], cluster, "native")(RATES)[0]) for row in rows)
    assert scatter / gather == pytest.approx(times, rel=0.01)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_copies_of_whole_shards_are_summed_once_a_step_as_stage_0_sums(accumulated: int) -> None:
    """In shards of one rank nothing is gathered or scattered; what is left is stage 0's all-reduce."""
    knobs = {"micro_batch_size": 8 // accumulated}
    copies = data_seconds(CPUS, zero_stage=3, hsdp_shard_size=1, **knobs)
    assert copies == pytest.approx(data_seconds(CPUS, zero_stage=0, **knobs), rel=0.01)


@pytest.mark.parametrize("knobs", [{"zero_stage": 0}, {"zero_stage": 3, "hsdp_shard_size": 1}], ids=["stage 0", "copies"])
def test_small_buckets_are_sent_beside_backward(knobs: dict[str, Any]) -> None:
    hides = dataclasses.replace(RATES, data_exposed=0.01)
    whole, parted = (data_seconds(CPUS, hides, reduce_bucket_size=size, **knobs) for size in (10**9, 100_000))
    assert parted < 0.5 * whole


def test_what_no_live_parameters_leave_room_for_is_waited_for() -> None:
    """Of a block's gather as large a share hides as fits beside the running block; a bucket of any size prefetches a block."""
    hides, block = dataclasses.replace(RATES, data_exposed=0.01), resolve_model("llama-tiny").layer_parameters

    def seconds(live: float, **knobs: Any) -> float:
        return data_seconds(
            CPUS, hides, zero_stage=3, param_persistence_threshold=0, max_live_parameters=int(live * block), **knobs
        )

    whole, *found, more = (seconds(live) for live in (1, 1.25, 1.5, 2, 3))
    hidden = [(whole - exposed) / (whole - more) for exposed in found]
    assert hidden == pytest.approx([0.25, 0.5, 1.0], abs=0.01)
    assert seconds(3, prefetch_bucket_size=1) == more
    assert seconds(3, prefetch_bucket_size=0) == whole
