"""What must hold of a job's rows, whoever was killed while they were written."""

from collections import Counter

from sqlalchemy import create_engine, text

from search_spaces.outcome import Purpose
from search_spaces.shared_records import JobEvent
from storage.records import AttemptState
from storage.store import Store


def every_event(store: Store, job_id: str) -> list[JobEvent]:
    """All events of the job."""
    return store.events.of(job_id, limit=1_000_000)


def check_whole(store: Store, job_id: str, address: str) -> None:
    """Every trial, attempt, measurement and event is there with all that was written in its transaction."""
    while True:
        events = every_event(store, job_id)
        trials, attempts, rows = store.trials.of(job_id), store.attempts.of(job_id), _rank_rows(address, job_id)
        # A server may commit a moment later what it was asked for by who is killed: then not all of this was read at one time.
        if every_event(store, job_id) == events:
            break
    told = Counter(event.kind for event in events)
    numbered = {event.payload["trial"] for event in events if event.kind in ("trial_added", "trial_refused")}

    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [trial.number for trial in trials] == sorted(numbered)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert len(attempts) == told["attempt_started"]
    assert sum(a.state is AttemptState.ABANDONED for a in attempts) == told["attempt_abandoned"]
    assert sum(a.result is not None for a in attempts) == told["attempt_finished"]
    for trial in trials:
        mine = [a for a in attempts if a.trial_number == trial.number]
        refused = trial.result is not None and not mine
        assert [a.number for a in mine] == list(range(1, trial.attempts + 1))
        assert trial.counted == (bool(mine) and trial.purpose is Purpose.SEARCH)
        assert sum(a.state is AttemptState.ACCEPTED for a in mine) == (trial.outcome is not None and not refused)
    measured = {a.token: len(a.result.ranks) for a in attempts if a.result is not None and a.result.ranks}
    assert rows == measured


def _rank_rows(address: str, job_id: str) -> dict[str, int]:
    """Attempt -> rows of its ranks."""
    query = (
        "SELECT a.token, count(*) FROM attempts a JOIN rank_measurements r ON r.attempt = a.token "
        "WHERE a.job_id = :job GROUP BY a.token"
    )
    engine = create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        rows = {str(token): int(count) for token, count in connection.execute(text(query), {"job": job_id})}
    engine.dispose()
    return rows
