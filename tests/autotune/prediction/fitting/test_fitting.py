"""Coefficients come back from times that they made; what times do not tell of stays where it was."""

import dataclasses

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients, names
from autotune.prediction.equations.step import predict
from autotune.prediction.fitting.trial_fit import fitted
from benchmarks.prediction.scoring.residual import learned
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

TRUTH = dataclasses.replace(
    Coefficients(), matrix_efficiency=0.7, rows_half=700.0, network_efficiency=0.4, update_efficiency=0.45
)
FREE = ("matrix_efficiency", "rows_half", "network_efficiency")


@pytest.fixture(scope="module")
def cases() -> Cases:
    configs = [
        TrialConfig(zero_stage=stage, micro_batch_size=size, tensor_parallel_size=tensor, precision="bf16")
        for stage in (0, 1, 3) for size in (1, 2, 4, 8) for tensor in (1, 2, 4, 8)
    ]  # fmt: skip
    workload = Workload(global_batch_size=256, sequence_length=2048)
    return cases_of(resolve_model("llama-2-7b"), resolve_cluster("dgx-a100:4"), workload, configs, "native")


def seconds(cases: Cases, rates: Coefficients) -> Array:
    return predict(cases, rates).seconds


def test_coefficients_come_back(cases: Cases) -> None:
    measured = seconds(cases, TRUTH) * np.exp(np.random.default_rng(0).normal(0, 0.01, len(cases)))
    found = fitted(FREE, Coefficients(), lambda tried: seconds(cases, tried), measured, 0.01)
    for name in FREE:
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.08), name
    assert np.median(np.abs(seconds(cases, found) / measured - 1)) < 0.01


def test_broken_runs_do_not_turn_the_fit(cases: Cases) -> None:
    measured = seconds(cases, TRUTH)
    measured[::8] *= 30
    found = fitted(FREE, Coefficients(), lambda tried: seconds(cases, tried), measured, 0.05)
    assert np.median(np.abs(seconds(cases, found) / seconds(cases, TRUTH) - 1)) < 0.05


@pytest.mark.prove
def test_what_nothing_tells_of_stays(cases: Cases) -> None:
    found = fitted(names("time"), Coefficients(), lambda tried: seconds(cases, tried), seconds(cases, TRUTH), 0.05)
    assert found.host_update_efficiency == pytest.approx(Coefficients().host_update_efficiency)
    assert found.hop_seconds == pytest.approx(Coefficients().hop_seconds)
    assert found.memory_spread == Coefficients().memory_spread


def test_a_residual_is_learned_for_cases_that_were_not_seen(cases: Cases) -> None:
    """What small micro-batches under tensor parallelism lose here, no equation says; every fourth case is asked about."""
    tensor, size = cases.layouts.tensor, cases.layouts.micro_batch_size
    errors = 0.3 * np.log2(tensor) - 0.1 * np.log2(size)
    asked = np.arange(len(cases)) % 4 == 1
    residual = learned(cases.take(~asked), errors[~asked])
    left = errors[asked] - residual(cases.take(asked))
    assert np.abs(left).mean() < 0.35 * np.abs(errors[asked]).mean()


def test_a_residual_of_nothing_is_nothing(cases: Cases) -> None:
    assert np.abs(learned(cases, np.zeros(len(cases)))(cases)).max() < 1e-9
