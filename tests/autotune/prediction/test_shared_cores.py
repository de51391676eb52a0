"""Predictions of pipelines whose ranks share cores: while some wait, others compute there."""

import dataclasses

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.pipeline import idle_micro_batches
from autotune.prediction.equations.step import predict
from search_spaces.clusters.presets import local_cluster, resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL, WORKLOAD = resolve_model("llama-tiny"), Workload(global_batch_size=32, sequence_length=128)
PIPELINE = TrialConfig(micro_batch_size=4, pipeline_parallel_size=2, pipeline_schedule="1f1b")


@pytest.mark.parametrize(("cores", "share"), [(8, 1.0), (4, 1.0), (3, 0.5), (2, 0.0), (1, 0.0)])
def test_idle_time_is_lost_where_nobody_else_has_the_core(cores: int, share: float) -> None:
    """Ranks of one step of 1F1B idle for (p - 1) micro-batches; of that, where 4 ranks share 3 cores, half."""
    cluster = dataclasses.replace(local_cluster(4), cores_per_node=cores)
    cases = cases_of(MODEL, cluster, WORKLOAD, [PIPELINE], "native")
    assert idle_micro_batches(cases)[0] == pytest.approx(share)


def seconds(cores: int, layout: str) -> float:
    """Of a step's products."""
    cluster = dataclasses.replace(local_cluster(4), cores_per_node=cores)
    config = PIPELINE.replace({"pipeline_layout": layout})
    parts = predict(cases_of(MODEL, cluster, WORKLOAD, [config], "native"), Coefficients(step_seconds=0.0)).parts
    return float(np.squeeze(parts["compute"] + parts["tensor"]))


def test_micro_batches_go_at_the_pace_of_the_slowest_or_of_the_mean_where_cores_are_shared() -> None:
    """The slowest of two has three of four layers: half of a step more than the mean, on cores of its own."""
    assert seconds(2, "3-1") == pytest.approx(seconds(2, "2-2"), rel=0.02)
    assert seconds(4, "3-1") > 1.15 * seconds(4, "2-2")
    assert seconds(2, "3-1") < seconds(3, "3-1") < seconds(4, "3-1")


def test_devices_other_than_cpus_are_shared_by_no_ranks() -> None:
    cluster = dataclasses.replace(resolve_cluster("dgx-h100:1"), cores_per_node=1)
    assert idle_micro_batches(cases_of(MODEL, cluster, WORKLOAD, [PIPELINE], "native"))[0] == 1.0
