"""A machine that was never measured is measured before it is predicted for; no other cluster is, and nothing twice."""

import dataclasses
from unittest.mock import patch

import pytest

from autotune.cli.predict import with_calibration
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.planning.calibrated import asked_here, calibrated, fingerprint
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.request.rows import request_from_fields
from autotune.session.calibrate import (
    SWITCH,
    CalibrationRequest,
    calibrate_for,
    calibrate_quickly,
    may_calibrate,
    prepare_calibration,
)
from autotune.session.resolve import resolve
from executor.errors import RunnerError
from executor.runners.one_process import measure_processors
from search_spaces.clusters.microbenchmark import MicrobenchmarkResult, Operation
from search_spaces.clusters.presets import local_cluster, resolve_cluster
from storage.store import Store


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "on")


@pytest.fixture(scope="module")
def measured() -> MicrobenchmarkResult:
    """What two real ranks of this machine measured, however slow it is beside other tests."""
    with patch("executor.runners.one_process.TIMEOUT_SECONDS", 120.0):
        return measure_processors(2)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, measured: MicrobenchmarkResult) -> list[int]:
    """The numbers of ranks that were measured."""
    counts: list[int] = []

    def measure(world_size: int) -> MicrobenchmarkResult:
        counts.append(world_size)
        return measured

    monkeypatch.setattr("autotune.session.calibrate.measure_processors", measure)
    return counts


def asked(ranks: int = 2) -> Question:
    return question_of(model_of("llama-tiny", None, None, None), cluster_of("local", ranks, None))


@pytest.mark.prove
def test_real_ranks_measure_layers_and_messages(measured: MicrobenchmarkResult) -> None:
    shapes = {operation: {row.shape for row in measured.rows if row.operation is operation} for operation in Operation}
    assert len(shapes[Operation.LAYER]) == 3
    assert all(
        len(shapes[operation]) == 2 for operation in (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER)
    )
    assert shapes[Operation.UPDATE] == {(2**20,)}
    assert {row.group.ranks for row in measured.rows if row.operation is Operation.ALL_REDUCE} == {2}
    assert all(0 < row.low <= row.seconds <= row.high for row in measured.rows)


@pytest.mark.prove
def test_the_first_prediction_rests_on_this_machine(tmp_path, runs: list[int]) -> None:
    database = str(tmp_path / "jobs.db")
    question = with_calibration(asked(), database)
    (before,), (after,) = estimates(asked(), [question.config()]), estimates(question, [question.config()])
    assert question.calibration_source.startswith("a quick micro-benchmark of this cluster")
    # By how much it differs from what is shipped depends on the machine, and on what runs beside the test.
    assert question.rates != asked().rates
    assert after.samples_per_second.mean != before.samples_per_second.mean
    assert after.step_seconds.high / after.step_seconds.low >= 0.999 * before.step_seconds.high / before.step_seconds.low
    again = with_calibration(asked(), database)
    assert again.rates == question.rates
    assert runs == [2]


def test_a_job_is_measured_for_before_its_ranks_start(store: Store, runs: list[int]) -> None:
    session = resolve(request_from_fields({"model": "llama-tiny", "runner": "local", "ranks": 1}))
    calibrate_for(store, session)
    assert runs == [1]
    assert asked_here(store, asked(1)).calibration_source.startswith("a quick")
    assert asked_here(store, asked(2)).calibration_source.startswith("shipped")


def test_no_other_cluster_is_measured_here(store: Store, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    here = local_cluster(2)
    others = [
        resolve_cluster("dgx-h100:1"), dataclasses.replace(here, nodes=2),
        dataclasses.replace(here, cores_per_node=here.cores_per_node + 1),
    ]  # fmt: skip
    assert not any(map(may_calibrate, others))
    assert [calibrate_quickly(store, cluster) for cluster in others] == [None] * 3
    monkeypatch.setenv(SWITCH, "off")
    assert calibrate_quickly(store, here) is None
    assert runs == []


def test_what_was_measured_quickly_is_measured_in_full_when_that_is_asked_for(store: Store, runs: list[int]) -> None:
    record = calibrate_quickly(store, local_cluster(2))
    assert record is not None and record.quick
    _, found, why = prepare_calibration(store, CalibrationRequest(ranks=2, runner="local"))
    assert found is None
    assert "quickly" in why


def test_a_full_measurement_is_never_replaced_by_a_quick_one(
    store: Store, runs: list[int], measured: MicrobenchmarkResult
) -> None:
    cluster = local_cluster(2)
    store.calibrations.save(fingerprint(cluster), cluster, measured, 20.0)
    assert calibrate_quickly(store, cluster) is None
    assert not calibrated(store, cluster, "native", rates_for(cluster, "native")).source.startswith("a quick")
    assert runs == []


def test_ranks_that_fail_leave_predictions_as_they_were(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> MicrobenchmarkResult:
        raise RunnerError("no ranks")

    monkeypatch.setattr("autotune.session.calibrate.measure_processors", fail)
    assert calibrate_quickly(store, local_cluster(2)) is None
    assert asked_here(store, asked()).calibration_source.startswith("shipped")


def test_nothing_is_made_for_a_cluster_elsewhere(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_DB", raising=False)
    monkeypatch.setattr("storage.private_files.default_file", lambda: tmp_path / "autotune.db")
    elsewhere = dataclasses.replace(asked(), cluster=resolve_cluster("dgx-h100:1"))
    assert with_calibration(elsewhere, None) is elsewhere
    assert not (tmp_path / "autotune.db").exists()
