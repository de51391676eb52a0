"""Coefficients from trials of the database: few move little, many are learnt from, spreads are honest."""

import dataclasses
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import predict
from autotune.prediction.fitting.trial_fit import fit_runs, trial_history
from autotune.prediction.planning.calibrated import calibrated
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import resolve
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import local_cluster, resolve_cluster
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.store import Store, open_store

CLUSTER = "dgx-a100:1"
SHIPPED = Coefficients()
TRUTH = dataclasses.replace(
    SHIPPED, matrix_efficiency=0.7, kernel_seconds=8e-4, link_efficiency=0.4, step_seconds=0.05, workspace_bytes=9e8,
    activation_scale=1.15,
)  # fmt: skip
CONFIGS = tuple(
    TrialConfig(zero_stage=stage, micro_batch_size=size, precision="bf16", tensor_parallel_size=tensor)
    for stage in (0, 1, 2, 3) for size in (1, 2, 4) for tensor in (1, 2, 4)
)  # fmt: skip


def coefficients_from_trials(store: Store, cluster: ClusterSpec, engine: str, before: Coefficients) -> tuple[Coefficients, int]:
    return fit_runs(trial_history(store, cluster, engine), before)


def cluster() -> ClusterSpec:
    return resolve_cluster(CLUSTER)


def run_job(
    store: Store,
    count: int,
    noise: float,
    *,
    truth: Coefficients = TRUTH,
    seed: int = 0,
    name: str = CLUSTER,
    **changes: object,
) -> None:
    """A job whose trials took what `truth` says, give or take `noise`."""
    fields = {"model": "qwen2-0.5b", "cluster": name, "global_batch_size": 32, "sequence_length": 1024}
    engine = str(changes.pop("engine", "native"))
    session = resolve(request_from_fields({**fields, "engine": engine, "space": "zero"}))
    draw = np.random.default_rng(seed)
    chosen = [CONFIGS[place] for place in draw.permutation(len(CONFIGS))[:count]]
    cases = cases_of(session.model, session.cluster, session.request.workload, chosen, engine)  # type: ignore[arg-type]
    seconds = predict(cases, truth).seconds * np.exp(noise * draw.standard_normal(count))
    peaks = memory(cases, truth).allocated * np.exp(noise / 3 * draw.standard_normal(count))
    lease = store.jobs.acquire(store.jobs.create(request_to_row(session.request)).id, current_owner())
    for number, config in enumerate(chosen):
        token = store.attempts.start(lease, store.trials.add(lease, config, Purpose.SEARCH).number).token
        rate = 32 / float(seconds[number])
        result = TrialResult(
            attempt=token, outcome=Outcome.OK, samples_per_second=Interval(mean=rate, low=rate, high=rate),
            peak_memory_bytes=int(peaks[number]),
        )  # fmt: skip
        store.attempts.finish(lease, dataclasses.replace(result, **changes))  # type: ignore[arg-type]
    store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "")


def errors(store: Store, rates: Coefficients) -> tuple[float, float]:
    """Median relative errors of time and memory on all configurations."""
    session = resolve(request_from_fields({"model": "qwen2-0.5b", "cluster": CLUSTER, "global_batch_size": 32}))
    workload = dataclasses.replace(session.request.workload, sequence_length=1024)
    cases = cases_of(session.model, cluster(), workload, CONFIGS, "native")  # type: ignore[arg-type]
    time = predict(cases, rates).seconds / predict(cases, TRUTH).seconds
    held = memory(cases, rates).allocated / memory(cases, TRUTH).allocated
    return float(np.median(np.abs(time - 1))), float(np.median(np.abs(held - 1)))


def test_without_trials_nothing_moves(store: Store) -> None:
    assert coefficients_from_trials(store, cluster(), "native", SHIPPED) == (SHIPPED, 0)


@pytest.mark.prove
def test_trials_teach_what_was_not_known(store: Store) -> None:
    before = errors(store, SHIPPED)
    run_job(store, 16, 0.02)
    found, count = coefficients_from_trials(store, cluster(), "native", SHIPPED)
    after = errors(store, found)
    assert count == 16
    assert before[0] > 0.2
    assert after[0] < 0.05
    assert after[1] < min(0.02, before[1])


@pytest.mark.prove
def test_four_trials_help_too(store: Store) -> None:
    before = errors(store, SHIPPED)
    run_job(store, 4, 0.02)
    after = errors(store, coefficients_from_trials(store, cluster(), "native", SHIPPED)[0])
    assert after[0] < before[0] / 2
    assert after[1] < before[1]


@pytest.mark.nightly
def test_spreads_shrink_with_good_trials_and_grow_with_bad_ones(store: Store, tmp_path) -> None:
    run_job(store, 24, 0.02)
    good = coefficients_from_trials(store, cluster(), "native", SHIPPED)[0]
    assert good.time_spread < SHIPPED.time_spread * 0.7
    assert good.memory_spread < SHIPPED.memory_spread
    run_job(store, 24, 0.5, seed=1)
    assert coefficients_from_trials(store, cluster(), "native", SHIPPED)[0].time_spread > 1.5 * SHIPPED.time_spread


def test_one_trial_that_is_as_predicted_leaves_the_spread_near_where_it_was(store: Store) -> None:
    run_job(store, 1, 0.0, truth=SHIPPED)
    found = coefficients_from_trials(store, cluster(), "native", SHIPPED)[0]
    assert 0.85 < found.time_spread / SHIPPED.time_spread <= 1.0
    assert found.matrix_efficiency == pytest.approx(SHIPPED.matrix_efficiency, rel=0.01)


def test_one_trial_that_is_far_off_widens_the_band(store: Store) -> None:
    run_job(store, 1, 0.0)
    assert coefficients_from_trials(store, cluster(), "native", SHIPPED)[0].time_spread > SHIPPED.time_spread


@pytest.mark.prove
def test_a_broken_trial_does_not_turn_the_fit(store: Store) -> None:
    run_job(store, 16, 0.02)
    run_job(store, 1, 0.0, truth=dataclasses.replace(TRUTH, step_seconds=500.0), seed=3)
    assert errors(store, coefficients_from_trials(store, cluster(), "native", SHIPPED)[0])[0] < 0.08


@pytest.mark.parametrize(
    "changes", [{"name": "dgx-a100:2"}, {"engine": "fsdp2"}, {"unstable": True}, {"outcome": Outcome.FAILED}], ids=str
)
def test_trials_that_tell_nothing_of_this_are_left_out(store: Store, changes: dict) -> None:
    run_job(store, 4, 0.0, **changes)
    assert trial_history(store, cluster(), "native") == []


def test_old_jobs_that_cannot_be_read_are_passed_by(store: Store) -> None:
    store.jobs.create({"model": "m", "trials": "many"})
    store.jobs.create({})
    run_job(store, 3, 0.0)
    assert [len(runs.keys) for runs in trial_history(store, cluster(), "native")] == [3]


@pytest.mark.prove
def test_a_damaged_trial_leaves_out_its_job_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    with open_store(str(path)) as store:
        run_job(store, 3, 0.0)
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE trials SET config = '{'")
            connection.execute("UPDATE calibrations SET cluster = '5'")
        run_job(store, 3, 0.0, seed=1)
        assert [len(runs.keys) for runs in trial_history(store, cluster(), "native")] == [3]
        assert calibrated(store, cluster(), "native", SHIPPED).source == "3 trials on the same hardware"


@pytest.mark.prove
def test_repeats_are_one_figure(store: Store) -> None:
    for seed in (0, 0, 0):
        run_job(store, 3, 0.05, seed=seed)
    (runs,) = trial_history(store, cluster(), "native")
    assert list(runs.repeats) == [3, 3, 3]
    assert calibrated(store, cluster(), "native", SHIPPED).source == "9 trials on the same hardware"
    assert trial_history(store, local_cluster(2), "native") == []
