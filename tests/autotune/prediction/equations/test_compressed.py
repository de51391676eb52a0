"""What the prediction makes of compressed communication: bytes on the links, a second copy, the work of packing."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.communication import UNPACK_BYTES, coding_seconds
from autotune.prediction.equations.parameters import stage_parameters
from autotune.prediction.equations.step import predict
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.communication import INTEGER_BYTES, SIGN_BYTES
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WORKLOAD = Workload(global_batch_size=64, sequence_length=512)
MODEL = resolve_model("llama-2-7b")
assert isinstance(MODEL, ModelSpec)
NODES = "dgx-a100:4"
SHARDED = {"zero_stage": 3, "param_persistence_threshold": 0}


def cases(*changes: dict[str, Any]) -> Any:
    configs = [TrialConfig(precision="bf16", micro_batch_size=1, overlap_comm=False).replace(change) for change in changes]
    return cases_of(MODEL, resolve_cluster(NODES), WORKLOAD, configs, "native")


def predicted(*changes: dict[str, Any], network: float = 1.0) -> Any:
    """The prediction of each of the changes, in one call, where nothing hides communication; `network`: speed of its links."""
    found = cases(*changes)
    hardware = dataclasses.replace(found.hardware, inter=found.hardware.inter * network)
    return predict(dataclasses.replace(found, hardware=hardware), rates_for(resolve_cluster(NODES), "native"))


def test_across_slow_links_each_way_saves_what_it_does_not_send() -> None:
    ways: list[dict[str, Any]] = [
        SHARDED,
        {**SHARDED, "gather_dtype": "int8"},
        {**SHARDED, "secondary_shard_size": 8},
        {**SHARDED, "reduce_dtype": "int8"},
        {**SHARDED, "gather_dtype": "int8", "secondary_shard_size": 8, "reduce_dtype": "int8"},
    ]
    exact, gathers, near, reductions, all_of_them = predicted(*ways, network=0.1).parts["data"]
    assert all_of_them < min(gathers, near, reductions)
    assert max(gathers, near, reductions) < exact


def test_across_fast_links_packing_costs_more_than_it_saves() -> None:
    exact, gathers = predicted(SHARDED, {**SHARDED, "gather_dtype": "int8"}, network=10.0).parts["data"]
    assert gathers > exact


def test_signs_cost_less_than_the_all_reduce_they_replace_and_more_than_their_bytes_alone() -> None:
    one = {"reduce_bucket_size": 10**10}  # signs are sent in one message
    plain, signs = predicted(one, {"optimizer": "onebit_adam"}).parts["data"]
    assert plain * SIGN_BYTES / 4 < signs < plain / 4


def test_a_second_copy_takes_its_part_of_what_is_gathered() -> None:
    for gathered, width in (("same", 2.0), ("int8", INTEGER_BYTES)):
        held = predicted(*({**SHARDED, "gather_dtype": gathered, "secondary_shard_size": size} for size in (0, 2, 8)))
        none, two, eight = held.memory.by_tag["parameters"]
        assert two - none == pytest.approx(width * MODEL.parameter_count / 2, rel=1e-2)
        assert eight - none == pytest.approx(width * MODEL.parameter_count / 8, rel=1e-2)


def test_where_parameters_stay_gathered_there_is_no_second_copy() -> None:
    kept = {**SHARDED, "reshard_after_forward": False}
    one, other = predicted(kept, {**kept, "secondary_shard_size": 8}).memory.total
    assert one == other


def test_packing_is_work_of_its_own_and_none_on_one_rank() -> None:
    found = cases({**SHARDED, "gather_dtype": "int8"}, SHARDED)
    held = stage_parameters(found, found.shapes.layers, np.ones(1), np.ones(1))
    rates = rates_for(resolve_cluster(NODES), "native")
    seconds = coding_seconds(found, rates, held, np.ones(1), np.full(1, 2.0))
    least = 2 * MODEL.parameter_count * UNPACK_BYTES / found.hardware.bandwidth
    assert seconds[0] > least
    assert seconds[1] == 0.0
    alone = cases({**SHARDED, "gather_dtype": "int8", "tensor_parallel_size": 8, "pipeline_parallel_size": 4})
    assert np.all(coding_seconds(alone, rates, held, np.ones(1), np.ones(1)) == 0.0)


def test_one_call_for_many_is_as_many_calls() -> None:
    ways: list[dict[str, Any]] = [
        {}, {"reduce_dtype": "int8"}, {"optimizer": "onebit_adam"}, {"zero_stage": 2, "reduce_dtype": "int8"},
        {**SHARDED, "gather_dtype": "int8", "secondary_shard_size": 4},
        {**SHARDED, "hsdp_shard_size": 8, "reduce_dtype": "int8"},
    ]  # fmt: skip
    together = predicted(*ways)
    alone = [predicted(way) for way in ways]
    np.testing.assert_allclose(together.seconds, [one.seconds[0] for one in alone])
    np.testing.assert_allclose(together.memory.total, [one.memory.total[0] for one in alone])
