"""The loop on several nodes: slow ones, broken ones, and a process that dies in between."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import table
from several_nodes import SeveralNodes

from autotune.loop.listener import LoopListener
from autotune.loop.loop import run_job
from autotune.loop.node_monitor import STRIKES
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.request.rows import request_to_row
from search_spaces.failure import FailureRow
from search_spaces.outcome import JobState, Outcome
from search_spaces.shared_records import JobEvent
from search_spaces.trial import NodeEvent, TrialResult
from storage.records import AttemptState, TrialRecord
from storage.store import Store


def run(folder: Path, store: Store, runner: SeveralNodes, job: str = "", listener: Any = None, **changes: Any) -> JobSnapshot:
    session = table.session(folder, **{"trials": 8, "confirm_repeats": 0, **changes})
    job = job or store.jobs.create(request_to_row(session.request)).id
    run_job(session, store, job, runner, listener=listener)
    return read_snapshot(store, job)


def events(store: Store, job: str, kind: str) -> list[JobEvent]:
    return [event for event in store.events.of(job) if event.kind == kind]


def nodes_of(trial: TrialRecord, snapshot: JobSnapshot) -> set[str | None]:
    whole = snapshot.whole(trial).result
    assert whole is not None
    return {rank.node for rank in whole.ranks}


def test_a_slow_node_among_three_is_told_and_its_trials_are_measured_elsewhere(tmp_path: Path, store: Store) -> None:
    told = Told()
    snapshot = run(tmp_path, store, SeveralNodes("a", "b", "c", slow={"b": 1.5}), listener=told)
    found = events(store, snapshot.job.id, "node_slow")
    assert {event.payload["node"] for event in found} == {"b"}
    assert "computes 50 % longer than a rank with the same shapes on other nodes" in found[0].payload["message"]
    assert any(news.startswith("b: slow: rank ") for news in told.news)
    # Measured once on the slow node, and never again: what was measured there did not count.
    assert len(found) == 1
    assert all("b" not in nodes_of(trial, snapshot) for trial in snapshot.trials)
    [first] = [attempt for attempt in store.attempts.of(snapshot.job.id) if attempt.state is AttemptState.RETRIED]
    assert (first.outcome, first.result.slow_nodes if first.result else ()) == (Outcome.OK, ("b",))
    rates = [
        trial.result.samples_per_second.mean for trial in snapshot.trials if trial.result and trial.result.samples_per_second
    ]
    assert rates == [table.measured(trial.config).samples_per_second.mean for trial in snapshot.trials]  # type: ignore[union-attr]


def test_with_nowhere_else_to_go_a_slow_result_is_kept_and_says_so(tmp_path: Path, store: Store) -> None:
    snapshot = run(tmp_path, store, SeveralNodes("a", "b", slow={"b": 1.5}))
    assert all(trial.attempts == 1 and trial.outcome is Outcome.OK for trial in snapshot.trials)
    assert all(trial.result is not None and trial.result.slow_nodes == ("b",) for trial in snapshot.trials)
    assert all("b is slow: rank " in (trial.result.message if trial.result else "") for trial in snapshot.trials)
    assert snapshot.job.state is JobState.SUCCEEDED


def test_a_trial_is_measured_elsewhere_once(tmp_path: Path, store: Store) -> None:
    """Wherever it goes, a node is slow: that must end."""
    runner = SeveralNodes("a", "b", "c", "d", slow={"b": 1.5, "c": 2.0})
    snapshot = run(tmp_path, store, runner)
    assert max(trial.attempts for trial in snapshot.trials) == 2
    assert snapshot.job.state is JobState.SUCCEEDED


def test_one_place_is_never_to_blame(tmp_path: Path, store: Store) -> None:
    """On one machine, one of the ranks is half as fast as the others all the time."""

    def lame(config: Any) -> TrialResult:
        result = table.measured(config)
        seconds = (0.1, 0.2)
        ranks = [
            dataclasses.replace(rank, compute_seconds_per_step=took, compute_relative_error=0.01)
            for rank, took in zip(result.ranks, seconds, strict=True)
        ]
        return dataclasses.replace(result, ranks=tuple(ranks))

    session = table.session(tmp_path, trials=8, confirm_repeats=0)
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(lame))
    assert all(attempt.number == 1 for attempt in store.attempts.of(job.id))
    assert events(store, job.id, "node_slow") == []


LOST = table.ended(Outcome.LOST, "rank 1 was killed by SIGKILL")


@pytest.mark.prove
def test_a_node_that_fails_what_succeeds_elsewhere_is_put_in_quarantine(tmp_path: Path, store: Store) -> None:
    snapshot = run(tmp_path, store, SeveralNodes("a", "b", "c", broken={"c": LOST}), trials=12)
    assert all(trial.outcome is Outcome.OK for trial in snapshot.trials)
    [held] = store.nodes.quarantined()
    assert (held.node, held.job_id) == ("c", snapshot.job.id)
    assert held.reason.startswith(f"{STRIKES} trials in a row failed on it and succeeded elsewhere, last trial ")
    [event] = events(store, snapshot.job.id, "node_quarantined")
    assert event.payload["node"] == "c"
    failed = [attempt for attempt in store.attempts.of(snapshot.job.id) if attempt.outcome is Outcome.LOST]
    assert len(failed) == STRIKES

    # Another job keeps off it from its first trial on; released, it is used again.
    runner = SeveralNodes("a", "b", "c")
    run(tmp_path, store, runner)
    assert all(request.excluded_nodes == ("c",) for request in runner.requests)
    assert store.nodes.release("c")
    again = SeveralNodes("a", "b", "c")
    run(tmp_path, store, again)
    assert any("c" in places for places in again.placed)


@pytest.mark.prove
def test_a_node_whose_trials_fail_now_and_then_is_not(tmp_path: Path, store: Store) -> None:
    class NowAndThen(SeveralNodes):
        """Every second trial that is placed on c fails there."""

        def _answer(self, request: Any) -> TrialResult:
            self.broken = {"c": LOST} if len(self.placed) % 4 == 0 else {}
            return super()._answer(request)

    snapshot = run(tmp_path, store, NowAndThen("a", "b", "c"), trials=20)
    assert sum(attempt.outcome is Outcome.LOST for attempt in store.attempts.of(snapshot.job.id)) > STRIKES
    assert store.nodes.quarantined() == []


@pytest.mark.prove
def test_the_last_nodes_that_a_trial_has_room_on_stay(tmp_path: Path, store: Store) -> None:
    class Flaky(SeveralNodes):
        """The first attempt at each trial fails."""

        def _answer(self, request: Any) -> TrialResult:
            first = sum(one.config == request.config for one in self.requests) == 1
            self.broken = {"b": LOST, "c": LOST} if first else {}
            return super()._answer(request)

    snapshot = run(tmp_path, store, Flaky("a", "b"), trials=12)
    assert store.nodes.quarantined() == []
    assert all(trial.outcome is Outcome.OK for trial in snapshot.trials)


def test_a_broken_device_puts_its_node_in_quarantine_at_once(tmp_path: Path, store: Store) -> None:
    ecc = dataclasses.replace(table.ended(Outcome.FAILED, "rank 0: uncorrectable ECC error"), cause="ecc")
    snapshot = run(tmp_path, store, SeveralNodes("a", "b", "c", broken={"c": ecc}))
    assert [(record.node, record.reason) for record in store.nodes.quarantined()] == [("c", "rank 0: uncorrectable ECC error")]
    assert all(trial.outcome is Outcome.OK for trial in snapshot.trials)
    assert sum(attempt.outcome is Outcome.FAILED for attempt in store.attempts.of(snapshot.job.id)) == 1


@pytest.mark.prove
def test_a_row_of_the_request_keeps_its_own_job_off_a_node_and_no_other(tmp_path: Path, store: Store) -> None:
    row = FailureRow(name="mine", outcome=Outcome.FAILED, remedy="none", message=("anything",), quarantine=True, retries=9)
    for rows, cause in (((row,), "mine"), ((dataclasses.replace(row, name="ecc"),), "ecc")):
        failed = dataclasses.replace(table.ended(Outcome.FAILED, "anything"), cause=cause)
        snapshot = run(tmp_path, store, SeveralNodes("a", "b", "c", broken={"c": failed}), failures=rows, trials=16)
        assert store.nodes.quarantined() == []
        assert [event.payload["node"] for event in events(store, snapshot.job.id, "node_shut")] == ["c"]
        assert sum(attempt.outcome is Outcome.FAILED for attempt in store.attempts.of(snapshot.job.id)) == 1
        assert all(trial.outcome is Outcome.OK for trial in snapshot.trials)


@pytest.mark.prove
def test_failures_by_rows_of_the_request_are_no_strikes(tmp_path: Path, store: Store) -> None:
    row = FailureRow(name="mine", outcome=Outcome.LOST, remedy="none", message=("anything",), retries=9)
    lost = dataclasses.replace(LOST, cause="mine")
    snapshot = run(tmp_path, store, SeveralNodes("a", "b", "c", broken={"c": lost}), failures=(row,), trials=20)
    assert sum(attempt.outcome is Outcome.LOST for attempt in store.attempts.of(snapshot.job.id)) > STRIKES
    assert store.nodes.quarantined() == []


@pytest.mark.prove
def test_an_error_that_may_be_its_nodes_is_tried_elsewhere_and_no_other_is(tmp_path: Path, store: Store) -> None:
    error = table.ended(Outcome.FAILED, "ModuleNotFoundError: No module named 'flash_attn'")
    snapshot = run(tmp_path, store, SeveralNodes("a", "b", "c", broken={"c": error}), trials=12)
    assert all(trial.outcome is Outcome.OK for trial in snapshot.trials)
    assert [record.node for record in store.nodes.quarantined()] == ["c"]

    def wrong(config: Any) -> TrialResult:
        return table.measured(config) if config.zero_stage < 2 else dataclasses.replace(error, node="a")

    everywhere = run(tmp_path, store, SeveralNodes("a", "b", answer=wrong), trials=12)
    failed = [trial for trial in everywhere.trials if trial.outcome is Outcome.FAILED]
    assert failed
    assert all(trial.attempts == 1 for trial in failed)

    nowhere = run(tmp_path, store, SeveralNodes("a", "b", "c", "d", broken=dict.fromkeys("abcd", error)), trials=12)
    assert (nowhere.job.state, nowhere.spent) == (JobState.FAILED, 3)
    assert [trial.attempts for trial in nowhere.trials] == [2, 1, 1]


class Told(LoopListener):
    """Keeps the news; `dies` after so many trials, as a killed process does."""

    def __init__(self, dies: int | None = None) -> None:
        self.news: list[str] = []
        self._left = dies

    def on_news(self, news: str) -> None:
        self.news.append(news)

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        self._left = None if self._left is None else self._left - 1
        if self._left == 0:
            raise KeyboardInterrupt


@pytest.mark.prove
@pytest.mark.parametrize("trials", [1, 2, 4, 6])
def test_what_was_learnt_of_nodes_outlives_the_process(tmp_path: Path, store: Store, trials: int) -> None:
    def nodes() -> SeveralNodes:
        return SeveralNodes("a", "b", "c", "d", slow={"b": 1.5}, broken={"d": LOST})

    session = table.session(tmp_path, trials=16, confirm_repeats=0)
    job = store.jobs.create(request_to_row(session.request)).id
    with pytest.raises(KeyboardInterrupt):
        run_job(session, store, job, nodes(), listener=Told(dies=trials))
    run_job(session, store, job, nodes())
    snapshot = read_snapshot(store, job)
    assert [trial.number for trial in snapshot.trials if trial.outcome is Outcome.OK] == [*range(len(snapshot.trials))]
    assert [event.payload["node"] for event in events(store, job, "node_slow")] == ["b"]
    assert [record.node for record in store.nodes.quarantined()] == ["d"]
    assert len(events(store, job, "node_quarantined")) == 1
    accepted = [attempt for attempt in store.attempts.of(job) if attempt.state is AttemptState.ACCEPTED]
    assert len(accepted) == len(snapshot.trials)


def test_a_node_that_the_runner_lost_is_kept_off_until_it_is_back(tmp_path: Path, store: Store) -> None:
    class Losing(SeveralNodes):
        """Loses c after the third trial; it is back after the sixth."""

        def events(self, timeout: float) -> list[Any]:
            found = super().events(timeout)
            kinds = {3: "lost", 6: "added"}
            kind = kinds.get(len(self.placed)) if found else None
            return [*found, *([("", NodeEvent(node="c", kind=kind, message="as it is"))] if kind else [])]

    runner = Losing("a", "b", "c")
    snapshot = run(tmp_path, store, runner)
    assert [request.excluded_nodes for request in runner.requests] == [()] * 3 + [("c",)] * 3 + [()] * 2
    assert [event.kind for event in store.events.of(snapshot.job.id) if event.kind.startswith("node_")] == [
        "node_lost",
        "node_added",
    ]
