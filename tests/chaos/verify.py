"""What must hold when everything has ended, read from the database itself."""

from collections import Counter
from typing import Any

from search_spaces.outcome import JobState, Purpose
from search_spaces.plain import to_plain
from storage.records import AttemptState, JobRecord
from storage.store import Store, open_store
from tests.chaos.people import Job
from tests.storage.whole import check_whole, every_event


def verify(address: str, submitted: list[Job]) -> Counter[str]:
    """Check every job; return how many rows of each kind there are."""
    found: Counter[str] = Counter()
    with open_store(address) as store:
        rows = store.jobs.newest(limit=10_000)
        assert {row.id for row in rows} == {job.id for job in submitted}, "a job was lost, or opened twice"
        assert len(rows) == len(submitted)
        for job in submitted:
            row = store.jobs.get(job.id)
            check_whole(store, job.id, address)
            _check_end(store, row, job)
            _check_heard(store, job)
            found += _counted(store, job)
    return found


def _check_end(store: Store, row: JobRecord, job: Job) -> None:
    """It succeeded, with its whole budget unless somebody stopped it; each trial that counts does so once."""
    trials, attempts = store.trials.of(job.id), store.attempts.of(job.id)
    told = f"{job.id}: {row.state} {row.reason} {row.message}"
    assert (row.state, row.owner) == (JobState.SUCCEEDED, None), told
    assert row.reason == "BUDGET" or (row.reason == "STOPPED" and job.stop_asked), told
    budget = row.request["trials"]
    assert budget >= job.trials, f"{told}; {job.trials} trials were granted, and {budget} are in the row"
    counted = [trial for trial in trials if trial.counted]
    if row.reason == "BUDGET":
        assert len(counted) == budget, told
        assert all(trial.outcome is not None for trial in trials), told
    keys = {(trial.config.hash, trial.purpose, trial.fidelity, trial.repeat) for trial in trials}
    assert len(keys) == len(trials), told
    assert len({trial.config.hash for trial in counted}) == len(counted) <= budget, told
    assert all(trial.purpose is Purpose.SEARCH for trial in counted), told
    accepted = Counter(attempt.trial_number for attempt in attempts if attempt.state is AttemptState.ACCEPTED)
    assert accepted == {trial.number: 1 for trial in trials if trial.outcome is not None and trial.attempts}, told
    assert not [attempt for attempt in attempts if attempt.state is AttemptState.RUNNING], told
    # Real trials, those on Ray, race: one that has lost is over. A job that was stopped may have one that never ended.
    outcomes = {trial.outcome for trial in counted if trial.outcome}
    assert outcomes <= ({"OK", "PRUNED"} if job.runner == "ray" else {"OK"}), (told, outcomes)


def _check_heard(store: Store, job: Job) -> None:
    """What its client heard, over all its connections, is what the database has: 1, 2, 3, …, each once."""
    heard = [(event["sequence"], event["kind"], event["payload"]) for event in job.follower.events]
    written = [(event.sequence, event.kind, _plain(event.payload)) for event in every_event(store, job.id)]
    assert [number for number, _, _ in heard] == list(range(1, len(written) + 1)), job.id
    assert heard == written, job.id


def _counted(store: Store, job: Job) -> Counter[str]:
    found = Counter(f"attempts {attempt.state}" for attempt in store.attempts.of(job.id))
    events = every_event(store, job.id)
    found["jobs"] = 1
    found["trials"] = sum(trial.counted for trial in store.trials.of(job.id))
    found["confirmations"] = sum(trial.purpose is Purpose.CONFIRM for trial in store.trials.of(job.id))
    found["events"] = len(events)
    found["takeovers"] = sum(event.kind == "job_acquired" and event.payload["taken_from"] is not None for event in events)
    found["connections"] = job.follower.connections
    return found


def _plain(value: Any) -> Any:
    return to_plain(value)
