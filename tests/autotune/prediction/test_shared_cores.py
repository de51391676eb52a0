"""Predictions of pipelines whose ranks share cores: while some idle, others compute there."""

import dataclasses

import pytest

from autotune.prediction.coefficients import Coefficients
from autotune.prediction.config_cases import cases_of
from autotune.prediction.pipeline import idle_micro_batches
from autotune.prediction.step import predict
from search_spaces.clusters import local_cluster, resolve_cluster
from search_spaces.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL, WORKLOAD = resolve_model("llama-tiny"), Workload(global_batch_size=32, sequence_length=128)
PIPELINE = TrialConfig(micro_batch_size=4, pipeline_parallel_size=2, pipeline_schedule="1f1b")
RATES = Coefficients(hop_seconds=0.0)


@pytest.mark.parametrize(("cores", "share"), [(8, 1.0), (4, 1.0), (3, 0.5), (2, 0.0), (1, 0.0)])
def test_idle_time_is_lost_where_nobody_else_has_the_core(cores: int, share: float) -> None:
    """Ranks of one step of 1F1B idle for (p - 1) micro-batches; of that, where 4 ranks share 3 cores, half."""
    cluster = dataclasses.replace(local_cluster(4), cores_per_node=cores, intra_node_bandwidth=1e15)
    cases = cases_of(MODEL, cluster, WORKLOAD, [PIPELINE], "native")
    assert idle_micro_batches(cases)[0] == pytest.approx(share)
    parts = predict(cases, RATES).parts
    of_a_micro_batch = (parts["compute"] - RATES.step_seconds) / cases.layouts.accumulation
    # The last stage has the output projection: the mean rank idles for less than a micro-batch of it.
    assert 0.5 * share <= parts["pipeline"][0] / of_a_micro_batch[0] <= share + 1e-3


def test_devices_other_than_cpus_are_shared_by_no_ranks() -> None:
    cluster = dataclasses.replace(resolve_cluster("dgx-h100:1"), cores_per_node=1)
    assert idle_micro_batches(cases_of(MODEL, cluster, WORKLOAD, [PIPELINE], "native"))[0] == 1.0
