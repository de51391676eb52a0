"""PostgreSQL goes away: killed in the midst of writes, or the connection breaks while a transaction commits."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, event

from search_spaces.outcome import JobState
from search_spaces.shared_records import JobEvent
from storage.errors import DatabaseUnavailableError
from storage.leases import current_owner
from storage.store import Store
from tests.storage.postgres import PostgresServer

WRITES = 300


@pytest.fixture
def store(mortal_postgres: PostgresServer) -> Iterator[Store]:
    with Store(mortal_postgres.new_database(), outage_seconds=300.0) as store:
        yield store


def notes(events: list[JobEvent]) -> list[int]:
    return [event.payload["number"] for event in events if event.kind == "note"]


@pytest.mark.prove
def test_a_killed_server_is_waited_for_and_everything_is_written_once(mortal_postgres: PostgresServer, store: Store) -> None:
    lease = store.jobs.acquire(store.jobs.create({}).id, current_owner(), seconds=600)
    failures: list[BaseException] = []
    written, enough = threading.Event(), threading.Event()
    numbers: list[int] = []

    def write() -> None:
        try:
            while len(numbers) < WRITES or not enough.is_set():
                store.events.add(lease, "note", {"number": len(numbers)})
                numbers.append(len(numbers))
                written.set()
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(3):
        written.clear()
        assert written.wait(120), failures
        time.sleep(random.uniform(0.0, 0.1))
        mortal_postgres.kill()
        time.sleep(random.uniform(0.0, 0.3))
        mortal_postgres.start()
    enough.set()
    writer.join(600)
    assert failures == []
    events = store.events.of(lease.job_id, limit=1_000_000)
    assert notes(events) == numbers
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))


@pytest.mark.prove
@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_that_nobody_confirmed_takes_place_once(store: Store, committed: bool) -> None:
    """Break the connection right after the server has committed, or right before it is asked to."""
    lease = store.jobs.acquire(store.jobs.create({}).id, current_owner())
    broken: list[int] = []

    def commit(connection: Connection) -> None:
        driver = connection.connection.dbapi_connection
        if not broken:
            broken.append(1)
            if committed:
                driver.commit()
            driver.close()

    event.listen(store.database._engine, "commit", commit)
    store.events.add(lease, "note", {"number": 1})
    assert broken == [1]
    assert notes(store.events.of(lease.job_id)) == [1]


@pytest.mark.prove
def test_a_server_that_stays_away_is_told_in_one_line(mortal_postgres: PostgresServer) -> None:
    address = mortal_postgres.new_database()
    with Store(address, outage_seconds=0.5) as store:
        store.jobs.create({})
        mortal_postgres.kill()
        try:
            with pytest.raises(DatabaseUnavailableError, match=r"cannot be used .*; check that it runs"):
                store.jobs.newest()
            with pytest.raises(DatabaseUnavailableError, match="check that it runs"):
                Store(address)
        finally:
            mortal_postgres.start()
        assert [job.state for job in store.jobs.newest()] == [JobState.QUEUED]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda address: address.replace("/jobs", "/nowhere"), "does not exist on the server; create it with createdb"),
        (lambda address: address.replace("postgresql:", "postgresql+asyncpg:"), "pip install 'autotune"),
    ],
)
def test_a_wrong_address_is_refused_at_once(mortal_postgres: PostgresServer, change: Callable[[str], str], remedy: str) -> None:
    with pytest.raises(DatabaseUnavailableError) as caught:
        Store(change(mortal_postgres.new_database()))
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.prove
def test_the_answer_is_the_same_where_it_is_asked_again(store: Store) -> None:
    """The connection may break once more while it is asked: what stands for the lost transaction is then there already."""
    database = store.database
    for _ in range(2):
        assert database._once(database._writer, lambda session: database._backend.was_committed(session, "lost")) is False
    marks: list[str | None] = []
    database.migrate(lambda session: marks.append(database._backend.mark(session)))
    for _ in range(2):
        assert database._once(database._writer, lambda session: database._backend.was_committed(session, marks[-1])) is True
