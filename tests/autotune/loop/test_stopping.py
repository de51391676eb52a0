"""When a search is over before its trials are spent."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import table

from autotune.errors import RequestError
from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import read_snapshot
from autotune.request.job_fields import Objective
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from search_spaces.outcome import JobState, Outcome
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import JobRecord
from storage.store import open_store


def run(folder: Path, **changes: Any) -> tuple[JobRecord, int]:
    """The job as it ended, and its search trials."""
    session = table.session(folder, strategy="guided", trials=15, confirm_repeats=0, **changes)
    with open_store(str(folder / "jobs.db")) as store:
        job = store.jobs.create(request_to_row(session.request))
        ended = run_job(session, store, job.id, table.runner())
        return ended, read_snapshot(store, job.id).spent


@pytest.mark.prove
def test_it_ends_when_nothing_better_is_likely_to_be_left(tmp_path: Path) -> None:
    ended, spent = run(tmp_path, stop_margin=0.5)
    assert (ended.state, ended.reason) == (JobState.SUCCEEDED, "CONVERGED")
    assert "% sure that nothing untried is more than 50 % faster" in ended.message
    assert 1 < spent < 15


def test_it_ends_when_a_trial_costs_more_than_it_saves(tmp_path: Path) -> None:
    ended, spent = run(tmp_path, run_device_hours=1e-7)
    assert ended.reason == "CONVERGED"
    assert "is expected to save" in ended.message
    assert spent < 15


@pytest.mark.nightly
def test_a_long_run_is_worth_every_trial_that_may_help(tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    (tmp_path / "long").mkdir()
    assert run(tmp_path / "short", run_device_hours=1e-4)[1] <= run(tmp_path / "long", run_device_hours=1e9)[1]


def test_device_hours_are_a_budget(tmp_path: Path) -> None:
    ended, spent = run(tmp_path, device_hours=1e-9)
    assert (ended.reason, spent) == ("BUDGET", 0)
    assert ended.message == "1e-09 device-hours are spent before a trial could start"


@pytest.mark.parametrize("name", ["stop_margin", "run_device_hours"])
def test_who_does_not_predict_cannot_stop_by_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: random does not predict.*use --strategy guided"):
        table.session(tmp_path, strategy="random", **{name: 0.1})


@pytest.mark.parametrize("name", ["stop_margin", "run_device_hours"])
def test_what_asks_for_one_best_is_refused_where_a_front_is_sought(name: str) -> None:
    line = f"^{name}: predicts the gain .*, which the objective pareto does not rank by; leave it out"
    with pytest.raises(RequestError, match=line):
        JobRequest(model="m", objective=Objective.PARETO, **{name: 0.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["device_hours", "stop_margin", "run_device_hours"])
def test_what_is_not_positive_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: 0 is not a positive number"):
        table.session(tmp_path, strategy="guided", **{name: 0})


def test_an_error_that_every_trial_has_ends_the_search_and_is_told(tmp_path: Path) -> None:
    def broken(config: TrialConfig) -> TrialResult:
        size = config.micro_batch_size
        return table.ended(Outcome.FAILED, f"rank {size % 2}: RuntimeError: shapes cannot be multiplied ({size}x8)")

    session = table.session(tmp_path, trials=20, confirm_repeats=0)
    with open_store(str(tmp_path / "jobs.db")) as store:
        job = store.jobs.create(request_to_row(session.request))
        ended = run_job(session, store, job.id, table.runner(broken))
    assert (ended.state, ended.reason) == (JobState.FAILED, "EVERY_TRIAL_FAILED")
    told, _, remedy = ended.message.partition("; ")
    assert told == "every one of 3 of 20 trials failed alike: rank 1: RuntimeError: shapes cannot be multiplied (1x8)"
    assert remedy == "correct that and start it again; the first trial's traceback is in `autotune show`"


@pytest.mark.prove
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.TIMEOUT, Outcome.LOST])
def test_a_job_whose_first_trials_end_for_one_cause_has_that_cause_as_its_reason(tmp_path: Path, outcome: Outcome) -> None:
    ports = iter(range(30_000, 40_000))

    def unreachable(config: TrialConfig) -> TrialResult:
        message = f"rank 1: the ranks did not meet at 10.0.0.1:{next(ports)} within 60 s"
        return dataclasses.replace(table.ended(outcome, message), cause="collective-timeout")

    session = table.session(tmp_path, trials=20)
    with open_store(str(tmp_path / "jobs.db")) as store:
        job = store.jobs.create(request_to_row(session.request))
        ended = run_job(session, store, job.id, table.runner(unreachable))
        assert read_snapshot(store, job.id).spent == 3
    assert (ended.state, ended.reason) == (JobState.FAILED, "collective-timeout")
    assert ended.message.count("the ranks did not meet at 10.0.0.1:300") == 1


@pytest.mark.prove
def test_what_does_not_fit_or_has_two_causes_is_not_the_jobs_failure(tmp_path: Path) -> None:
    def full(config: TrialConfig) -> TrialResult:
        return dataclasses.replace(table.ended(Outcome.INFEASIBLE, "out of memory"), cause="device-memory")

    def mixed(config: TrialConfig) -> TrialResult:
        cause = "collective" if config.zero_stage else "python-error"
        return dataclasses.replace(table.ended(Outcome.FAILED, "it failed"), cause=cause)

    session = table.session(tmp_path, trials=6, strategy="grid")
    with open_store(str(tmp_path / "jobs.db")) as store:
        for answer, reason in ((full, "NOTHING_FEASIBLE"), (mixed, "EVERY_TRIAL_FAILED")):
            job = store.jobs.create(request_to_row(session.request))
            assert run_job(session, store, job.id, table.runner(answer)).reason == reason
            assert read_snapshot(store, job.id).spent == 6


def test_errors_that_differ_do_not_end_the_search(tmp_path: Path) -> None:
    def broken(config: TrialConfig) -> TrialResult:
        return table.ended(
            Outcome.FAILED, config.hash.translate({ord("0") + digit: "ghijklmnop"[digit] for digit in range(10)})
        )

    session = table.session(tmp_path, trials=8, confirm_repeats=0)
    with open_store(str(tmp_path / "jobs.db")) as store:
        job = store.jobs.create(request_to_row(session.request))
        ended = run_job(
            session,
            store,
            job.id,
            table.runner(lambda config: table.ended(Outcome.FAILED, "".join(chr(97 + ord(c) % 26) for c in config.hash))),
        )
        assert read_snapshot(store, job.id).spent == 8
    assert ended.message == "every one of 8 of 8 trials failed (8 FAILED); see `autotune show`"
