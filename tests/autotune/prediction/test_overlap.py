"""Predictions of what waits or travels beside computation: late gathers, and saved activations on the host."""

from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.activations import kept_layer_bytes
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.overlap import gathers_late
from autotune.prediction.equations.step import StepPrediction, predict
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL = resolve_model("llama-3-8b")
CLUSTER = resolve_cluster("dgx-h100:2")
WORKLOAD = Workload(global_batch_size=64, sequence_length=4096)
RATES = Coefficients()


def cases(*configs: dict[str, Any]) -> Any:
    made = [TrialConfig(precision="bf16").replace(config) for config in configs]
    return cases_of(MODEL, CLUSTER, WORKLOAD, made, "native")


def predicted(*configs: dict[str, Any]) -> StepPrediction:
    return predict(cases(*configs), RATES)


@pytest.mark.parametrize(
    "layout", [{}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2, "micro_batch_size": 2}], ids=str
)
@pytest.mark.parametrize("stage", [1, 2])
def test_late_gathers_hide_beneath_one_forward_at_most(layout: dict[str, Any], stage: int) -> None:
    knobs = {**layout, "zero_stage": stage}
    early, late = predicted(knobs), predicted({**knobs, "overlap_param_gather": True})
    saved = float((early.seconds - late.seconds)[0])
    accumulation = cases(knobs).layouts.accumulation[0]
    passes = (early.parts["compute"] + early.parts["tensor"])[0] / accumulation
    assert 0.0 < saved <= passes / (1 + RATES.backward_ratio)
    for part in set(early.parts) - {"data"}:
        assert early.parts[part] == pytest.approx(late.parts[part])


@pytest.mark.parametrize(
    "knobs",
    [
        {"zero_stage": 0},
        {"zero_stage": 3},
        {"zero_stage": 1, "tensor_parallel_size": 16},
    ],
    ids=str,
)
def test_where_nothing_comes_late_nothing_changes(knobs: dict[str, Any]) -> None:
    with_it = cases({**knobs, "overlap_param_gather": True})
    assert not gathers_late(with_it)[0]
    one, other = predict(with_it, RATES), predicted(knobs)
    assert one.seconds == pytest.approx(other.seconds)
    assert one.memory.total == pytest.approx(other.memory.total)


def test_late_gathers_need_buffers_and_with_offloading_a_standing_share() -> None:
    knobs = {"zero_stage": 1, "offload_optimizer": "cpu"}
    early, late = predicted(knobs).memory, predicted({**knobs, "overlap_param_gather": True}).memory
    assert late.by_tag["buffers"][0] > 0
    # Gathered at the end of a step, the whole model is on its way in two buckets.
    assert early.by_tag["buffers"][0] > late.by_tag["buffers"][0]
    standing = late.by_tag["parameters"][0] - early.by_tag["parameters"][0]
    assert standing == pytest.approx(2 * MODEL.parameter_count / CLUSTER.world_size, rel=0.01)


def test_saved_activations_are_on_the_device_or_on_the_host() -> None:
    """Without a pipeline the last layer's stay, and two layers' are on the device at once."""
    knobs = {"zero_stage": 1, "micro_batch_size": 2, "loss_chunk_size": 512}
    kept = float(kept_layer_bytes(cases(knobs))[0]) * 2 * WORKLOAD.sequence_length
    plain, offloaded = predicted(knobs).memory, predicted({**knobs, "offload_activations": True}).memory
    assert offloaded.host[0] - plain.host[0] == pytest.approx(kept * (MODEL.num_layers - 1))
    assert plain.by_tag["activations"][0] - offloaded.by_tag["activations"][0] == pytest.approx(kept * (MODEL.num_layers - 2))


def test_in_a_pipeline_every_micro_batch_in_flight_is_on_the_host() -> None:
    knobs = {"zero_stage": 1, "pipeline_parallel_size": 4, "tensor_parallel_size": 2}
    kept = float(kept_layer_bytes(cases(knobs))[0]) * WORKLOAD.sequence_length
    host = predicted({**knobs, "offload_activations": True}).memory.host[0]
    assert host == pytest.approx(4 * kept * MODEL.num_layers / 4, rel=0.05)


def test_copies_that_outrun_the_host_link_take_time_and_recomputation_makes_them_few() -> None:
    knobs = {"zero_stage": 1, "offload_activations": True}
    names = ("none", "full")
    told = predicted(*({**knobs, "activation_checkpointing": name} for name in names))
    plain = predicted(*({"zero_stage": 1, "activation_checkpointing": name} for name in names))
    added = told.parts["offload"] - plain.parts["offload"]
    assert np.all(added > 0)
    assert added[1] < 0.1 * added[0]


@pytest.mark.parametrize(("sequence", "most"), [(False, 7 / 8), (True, 7 / 16)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_sums_hide_beside_their_products_but_the_last_part(ranks: int, sequence: bool, most: float) -> None:
    """Half of the sums are backward's, which may hide whole; of forward's three quarters. Gathers are waited for."""
    knobs = {"tensor_parallel_size": ranks, "sequence_parallel": sequence, "micro_batch_size": 4}
    plain, beside = predicted(knobs), predicted({**knobs, "async_tensor_parallel": True})
    saved = float((plain.parts["tensor"] - beside.parts["tensor"])[0])
    assert 0.2 * most < saved / float(plain.parts["tensor"][0]) <= most
    for part in set(plain.parts) - {"tensor", "data"}:
        assert plain.parts[part] == pytest.approx(beside.parts[part], rel=0.01)


def test_sums_of_few_tokens_are_slower_in_parts() -> None:
    made = [
        cases_of(MODEL, CLUSTER, Workload(global_batch_size=64, sequence_length=8), [config], "native")
        for config in (TrialConfig(tensor_parallel_size=8), TrialConfig(tensor_parallel_size=8, async_tensor_parallel=True))
    ]
    plain, beside = (predict(own, RATES).parts["tensor"][0] for own in made)
    assert beside > plain


def test_one_tensor_rank_hides_nothing() -> None:
    plain, beside = predicted({}), predicted({"async_tensor_parallel": True})
    assert plain.seconds == pytest.approx(beside.seconds)


def test_each_case_is_predicted_as_if_it_were_alone() -> None:
    knobs: list[dict[str, Any]] = [
        {"zero_stage": 1, "overlap_param_gather": True},
        {"zero_stage": 2, "offload_activations": True},
        {"zero_stage": 2, "overlap_param_gather": True, "offload_activations": True, "pipeline_parallel_size": 2},
        {"zero_stage": 3},
        {
            "tensor_parallel_size": 4,
            "async_tensor_parallel": True,
            "sequence_parallel": True,
            "activation_checkpointing": "full",
        },
        {"tensor_parallel_size": 8, "async_tensor_parallel": True},
    ]
    together = predicted(*knobs)
    alone = [predicted(own) for own in knobs]
    assert together.seconds == pytest.approx(np.concatenate([own.seconds for own in alone]))
    assert together.memory.total == pytest.approx(np.concatenate([own.memory.total for own in alone]))
    assert together.memory.host == pytest.approx(np.concatenate([own.memory.host for own in alone]))
