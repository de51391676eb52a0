"""The last stage over a table of measurements: what is measured, when, on which layout, and what comes of it."""

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import table
from played import run, searched

from autotune.errors import RequestError
from autotune.explain.explain import explain
from autotune.explain.findings import KnobVerdict
from autotune.frameworks.exporters import EXPORTERS
from autotune.loop.budget import stop_of, time_is_up
from autotune.loop.environment_stage import reserved_seconds
from autotune.loop.loop import run_job
from autotune.outcome.best_config import build_best_config, environment_line
from autotune.outcome.job_snapshot import read_snapshot
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import session_of
from autotune.session.session import Session
from executor.runners.replay import ReplayRunner
from search_spaces.environment import standard_settings
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from storage.store import Store, open_store

ARENAS, PASSIVE, ACTIVE = "MALLOC_ARENA_MAX=1", "OMP_WAIT_POLICY=passive", "OMP_WAIT_POLICY=active"
SETTINGS = (ARENAS, PASSIVE, ACTIVE)


def session_with(folder: Path, *settings: str, **changes: Any) -> Session:
    return table.session(folder, **{"trials": 12, "environment_settings": settings or SETTINGS, **changes})


def times(**factors: float) -> Callable[[TrialConfig], TrialResult]:
    """The table's rates, times a factor for an environment."""

    def answer(config: TrialConfig) -> TrialResult:
        result = table.measured(config)
        assert result.samples_per_second is not None
        factor = factors.get(config.environment.partition("=")[2], 1.0)
        return table.ok(result.samples_per_second.mean * factor, result.peak_memory_bytes or 0)

    return answer


def environments(trials: list[TrialRecord]) -> list[str]:
    return [trial.config.environment for trial in trials]


class Interrupted(ReplayRunner):
    """Ctrl-C as soon as a trial of this environment begins."""

    def __init__(self, environment: str, seconds: float) -> None:
        super().__init__(table.measured, seconds_per_trial=seconds)
        self._environment = environment

    def submit(self, request: TrialRequest) -> str:
        if request.config.environment == self._environment:
            raise KeyboardInterrupt
        return super().submit(request)


def left_within(session: Session, store: Store, environment: str, seconds: float = 0.0) -> str:
    """A job that was interrupted when a trial of this environment had been started; its id."""
    job = store.jobs.create(request_to_row(session.request))
    with pytest.raises(KeyboardInterrupt):
        run_job(session, store, job.id, Interrupted(environment, seconds))
    assert store.jobs.get(job.id).state is JobState.PAUSED
    return job.id


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["random", "guided"])
def test_settings_come_last_on_the_leader_and_out_of_the_trials(tmp_path: Path, store: Store, strategy: str) -> None:
    runner = table.Recorded(slots=2)
    snapshot = run(session_with(tmp_path, strategy=strategy), store, runner)
    trials = searched(snapshot)
    assert environments(trials) == [""] * 9 + list(SETTINGS)
    assert (snapshot.spent, snapshot.job.reason, snapshot.job.message) == (12, "BUDGET", "12 of 12 trials are spent")
    rates = [trial.result.samples_per_second.mean for trial in trials[:9] if trial.result and trial.result.samples_per_second]
    leader = trials[rates.index(max(rates))].config
    assert {trial.config for trial in trials[9:]} == {leader.replace({"environment": text}) for text in SETTINGS}
    fresh = {(request.config.environment, request.fresh_processes) for request in runner.requests[:12]}
    assert fresh == {("", False), *((text, True) for text in SETTINGS)}


@pytest.mark.prove
def test_a_setting_that_is_told_to_be_faster_wins_and_is_carried_everywhere(tmp_path: Path, store: Store) -> None:
    session = session_with(tmp_path)
    runner = table.Recorded(times(passive=1.2, active=0.9))
    snapshot = run(session, store, runner)
    document = build_best_config(session, snapshot)
    assert document["best"]["config"]["environment"] == PASSIVE
    assert document["job"]["runner_up"].get("environment", "") == ""
    assert document["launch"]["env"] == {"OMP_WAIT_POLICY": "passive"}
    won = document["environments"]["tried"][1]
    assert (document["environments"]["won"], won["environment"], won["outcome"]) == (PASSIVE, PASSIVE, "OK")
    assert won["over_layout"]["mean"] == pytest.approx(1.2, rel=0.02) and won["over_layout"]["low"] > 1.05
    assert environment_line(document["environments"]).startswith(f"{PASSIVE} has 1.")
    confirmed = [trial.config for trial in snapshot.trials if trial.purpose is Purpose.CONFIRM]
    assert environments([t for t in snapshot.trials if t.purpose is Purpose.CONFIRM])[:2] == [PASSIVE, ""]
    assert confirmed[1] == confirmed[0].replace({"environment": ""})
    assert all(request.fresh_processes for request in runner.requests[12:])
    explained = explain(store, snapshot.job.id)
    assert any(note.startswith(f"environment: {PASSIVE} has ") for note in explained.notes)
    [finding] = [knob for knob in explained.knobs if knob.knob == "environment"]
    assert finding.verdict is KnobVerdict.FASTER
    assert {point.value for point in finding.curve} == {"", *SETTINGS}
    for name in ("torchrun", "slurm"):
        assert f"export OMP_WAIT_POLICY={shlex.quote('passive')}\n" in EXPORTERS[name](document).text


@pytest.mark.prove
def test_a_setting_that_makes_no_difference_is_not_set(tmp_path: Path, store: Store) -> None:
    session = session_with(tmp_path)
    snapshot = run(session, store, table.runner(times(passive=1.004)))
    document = build_best_config(session, snapshot)
    assert "environment" not in document["best"]["config"]
    assert document["job"]["tie"] is True
    assert document["job"]["runner_up"]["environment"] == PASSIVE
    assert document["environments"]["won"] is None
    line = environment_line(document["environments"])
    assert line.startswith(
        f"none of 3 environments is significantly faster than the layout without it; the fastest, {PASSIVE}, "
    )
    assert line in " ".join(explain(store, snapshot.job.id).notes)


@pytest.mark.prove
def test_settings_that_fail_leave_the_layout_as_it_was(tmp_path: Path, store: Store) -> None:
    failing = TrialResult(attempt="", outcome=Outcome.FAILED, message="no such algorithm")
    session = session_with(tmp_path)
    snapshot = run(session, store, table.runner(lambda config: failing if config.environment else table.measured(config)))
    document = build_best_config(session, snapshot)
    assert snapshot.spent == 12 and document["environments"]["won"] is None
    assert "none of 3 environments was measured in full" in environment_line(document["environments"])


@pytest.mark.prove
@pytest.mark.parametrize("strategy", ["random", "guided"])
def test_interrupted_within_the_stage_it_goes_on_there(tmp_path: Path, store: Store, strategy: str) -> None:
    with open_store(str(tmp_path / "whole.db")) as apart:  # for what a job teaches changes what the next one tries
        whole = run(session_with(tmp_path, strategy=strategy), apart)
    job = left_within(session_with(tmp_path, strategy=strategy), store, PASSIVE)
    run_job(session_of(store.jobs.get(job)), store, job, table.runner())
    snapshot = read_snapshot(store, job)
    assert [trial.config for trial in searched(snapshot)] == [trial.config for trial in searched(whole)]
    assert snapshot.spent == 12 and snapshot.job.state is JobState.SUCCEEDED


@pytest.mark.prove
def test_more_trials_reopen_the_search_and_the_stage_follows_its_new_leader(tmp_path: Path, store: Store) -> None:
    job = left_within(session_with(tmp_path, strategy="grid", trials=5), store, ACTIVE)
    store.queue.change_request(job, None, {"trials": 16})
    run_job(session_of(store.jobs.get(job)), store, job, table.runner())
    trials = searched(read_snapshot(store, job))
    layouts = [trial.config.replace({"environment": ""}) for trial in trials]
    assert environments(trials) == [*[""] * 2, *SETTINGS, *[""] * 8, *SETTINGS]
    assert set(layouts[2:5]) != set(layouts[-3:]) and len(set(layouts[-3:])) == 1


def test_the_time_that_settings_take_is_left_over_for_them(tmp_path: Path, store: Store) -> None:
    session = session_with(tmp_path, confirm_repeats=0)
    snapshot = read_snapshot(store, left_within(session, store, ARENAS, seconds=0.02))
    least = len(SETTINGS) * 0.02
    assert reserved_seconds(session, snapshot) >= least
    for max_seconds, search_ends in (
        (snapshot.job.active_seconds + least / 2, True),
        (snapshot.job.active_seconds + 1e6, False),
    ):
        limited = dataclasses.replace(session, request=dataclasses.replace(session.request, max_seconds=max_seconds))
        assert (stop_of(limited, snapshot) is not None) is search_ends
        assert time_is_up(limited, snapshot) is None, "the stage itself still has its time"


def test_without_time_none_is_measured(tmp_path: Path, store: Store) -> None:
    job = left_within(session_with(tmp_path), store, ARENAS)
    store.queue.change_request(job, None, {"max_seconds": 1e-6})
    run_job(session_of(store.jobs.get(job)), store, job, table.runner())
    snapshot = read_snapshot(store, job)
    # The one that was started is wanted; what never began is not.
    assert environments(searched(snapshot)) == [""] * 9 + [ARENAS]


def test_what_every_process_of_the_search_has_is_kept_beneath_the_settings(tmp_path: Path, store: Store) -> None:
    session = session_with(tmp_path, PASSIVE, trials=4, baseline={"zero_stage": 1, "environment": ARENAS})
    trials = searched(run(session, store))
    assert environments(trials) == [ARENAS] * 3 + [f"{ARENAS} {PASSIVE}"]
    pinned = session_with(tmp_path, PASSIVE, trials=4, pins={"environment": ARENAS})
    assert pinned.environment == ARENAS and pinned.request.resolved_environments == (f"{ARENAS} {PASSIVE}",)


def test_standard_settings_are_of_the_device_and_stay_those_of_the_job(tmp_path: Path) -> None:
    session = session_with(tmp_path, "standard")
    assert session.request.resolved_environments == standard_settings("cpu", 1)
    assert request_from_fields({**session_fields(tmp_path), "environment_settings": "standard"}).environment_settings == (
        "standard",
    )
    for nodes in (1, 4):
        chosen = standard_settings("cuda", nodes)
        assert 1 <= len(chosen) <= 4 and all("NCCL" in text for text in chosen)


def session_fields(folder: Path) -> dict[str, Any]:
    return {"model": str(folder / "config.json"), "global_batch_size": 8, "sequence_length": 64}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"environment_settings": ("LD_PRELOAD=/tmp/x.so",)}, "environment_settings: LD_PRELOAD may not be set; use some "),
        ({"environment_settings": ("OMP_WAIT_POLICY=$(id)",)}, "environment_settings: '$(id)' is not a value of OMP_WAIT"),
        ({"environment_settings": (" ",)}, "environment_settings: (' ',) is not a list of settings; "),
        ({"environment_settings": "MALLOC_ARENA_MAX"}, "environment_settings: 'MALLOC_ARENA_MAX' is not NAME=VALUE; "),
        ({"environment_settings": (PASSIVE, PASSIVE)}, f"environment_settings: {PASSIVE} is given twice; "),
        ({"environment_settings": (*SETTINGS, "A=1", "B=2")}, "environment_settings: 5 settings are more than 4, "),
        ({"environment_settings": SETTINGS, "trials": 3}, "environment_settings: 3 settings leave none of 3 trials for "),
        ({"environment_settings": ("standard",), "trials": 4}, "environment_settings: 4 settings leave none of 4 trials for "),
        ({"environment_settings": SETTINGS, "objective": "memory"}, "environment_settings: no variable changes what a rank "),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_told_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_from_fields({"model": "gpt-2-small", **changes})
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "changes", "line"),
    [
        (("NCCL_PROTO=Simple",), {}, "environment_settings: NCCL_PROTO acts on cuda devices, and ranks have cpu here; "),
        ((PASSIVE,), {"pins": {"environment": PASSIVE}}, f"environment_settings: {PASSIVE} equals a measured environment; "),
        (
            (PASSIVE,), {"pins": {"environment": ARENAS}, "baseline": {"environment": f"{ARENAS} {PASSIVE}"}},
            f"environment_settings: {PASSIVE} equals a measured environment; ",
        ),
    ],
)  # fmt: skip
def test_what_means_nothing_here_is_told_before_the_first_trial(
    tmp_path: Path, settings: tuple[str, ...], changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(RequestError) as caught:
        session_with(tmp_path, *settings, **changes)
    assert str(caught.value).startswith(line)
