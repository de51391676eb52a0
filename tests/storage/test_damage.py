"""One damaged JSON value: everything that is about other jobs goes on, and the row is reported."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MicrobenchmarkResult
from search_spaces.clusters.presets import local_cluster
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import LogLines, Progress, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.errors import DamagedRowError
from storage.leases import current_owner
from storage.records import Ask, JobFilter, JobRecord, QueueLimits, Submission
from storage.store import Store, open_store
from tests.storage.job_steps import RANK

OF_JOBS = {
    "jobs": ("request", "summary", "answer", "reference_losses"), "events": ("payload",), "trials": ("config", "refusal"),
    "attempts": ("result", "progress"), "priors": ("prior",), "rank_measurements": ("memory_by_tag",),
}  # fmt: skip
OF_ALL = {"calibrations": ("cluster", "rows"), "api_keys": ("scopes",)}
PLACES = [(table, column) for table, columns in (OF_JOBS | OF_ALL).items() for column in columns]
SHAPES = ("5", '"text"', '{"colour":"red"}', "[[1]]", "1" * 5000)
"""What both databases take for JSON; the last is a number that Python reads no more."""
NOT_UTF8 = "no UTF-8"
TEXTS = ("{", "", NOT_UTF8)
"""What only SQLite does."""
KEYS = {
    "trials": "job_id number", "attempts": "token", "events": "job_id sequence", "priors": "job_id",
    "rank_measurements": "attempt rank",
}  # fmt: skip
ORDERS = {"api_keys": "created", "attempts": "started, trial_number"}
RIGHT_IN_SOME_PLACE = ('{"colour":"red"}', "[[1]]")


@pytest.fixture
def engine(address: str) -> Iterator[Engine]:
    engine = create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    yield engine
    engine.dispose()


@contextmanager
def damage(engine: Engine, table: str, column: str, value: str) -> Iterator[None]:
    """Damage the value in the oldest row, and put it back."""
    new = "CAST(:value AS json)" if engine.dialect.name == "postgresql" else "CAST(:value AS TEXT)"
    key = KEYS.get(table, "id").split()
    with engine.begin() as connection:
        row = connection.execute(text(f"SELECT * FROM {table} ORDER BY {ORDERS.get(table, ', '.join(key))} LIMIT 1")).one()
        named = {name: row._mapping[name] for name in key}
        place = " AND ".join(f"{name} = :{name}" for name in key)
        former = connection.execute(text(f"SELECT CAST({column} AS text) FROM {table} WHERE {place}"), named).scalar()
        update = text(f"UPDATE {table} SET {column} = {new} WHERE {place}")
        raw = b'{"a":"\xff"}' if value == NOT_UTF8 else value
        assert connection.execute(update, {**named, "value": raw}).rowcount == 1
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(update, {**named, "value": former})


def fill(store: Store, clock) -> tuple[JobRecord, JobRecord]:
    """A job of which something will be damaged, and another: both run once, and wait again."""
    store.keys.create("anna", ("read",))
    for hosts in ("a", "b"):
        result = MicrobenchmarkResult(attempt="a" * 32, outcome=Outcome.OK, hosts=(hosts,), environment={}, rows=())
        store.calibrations.save("f", cluster(), result, 1.0)
        clock.advance(1)
    jobs = []
    for name in ("first", "second"):
        request = {"model": "m", "runner": "local", "tags": ["nightly"], "name": name, "trials": 3}
        job = store.queue.submit(request, Submission(submitter="anna"))[0]
        lease = store.jobs.acquire(job.id, current_owner())
        store.jobs.set_prior(lease, {"x": 1})
        store.jobs.set_answer(lease, {"rate": {"mean": 1.0}})
        for number in range(2):
            store.trials.add(lease, TrialConfig(micro_batch_size=1 + number), Purpose.SEARCH)
        done, running = (store.attempts.start(lease, number).token for number in range(2))
        store.attempts.finish(lease, TrialResult(attempt=done, outcome=Outcome.OK, losses=(1.0,), ranks=(RANK,)))
        sign = Progress(attempt=running, phase="timed", step=1, samples_per_second=None, message="")
        store.logs.add(lease, [LogLines(attempt=running, rank=0, text="x")], [sign])
        jobs.append(job)
        clock.advance(1)
    return jobs[0], jobs[1]


def cluster() -> ClusterSpec:
    return local_cluster(2)


def check_others(store: Store, first: JobRecord, second: JobRecord) -> None:
    """Everything that reads rows of several jobs, with the second one as it should be."""
    ids = [first.id, second.id]
    assert [job.id for job in store.jobs.newest()] == [second.id, first.id]
    assert second.id in [job.id for job in store.jobs.newest(having=JobFilter(tags=["nightly"]))]
    assert store.jobs.exact(ids)[second.id].request == store.jobs.get(second.id).request == second.request
    assert store.overviews.of(ids)[second.id].outcomes == {"OK": 1}
    news = store.events.news(dict.fromkeys(ids, 0))
    assert [event.kind for event in news[second.id].events][:2] == ["job_created", "job_acquired"]
    assert len(news[first.id].events) == news[first.id].version
    assert store.logs.progress(ids)[second.id][0].phase == "timed"
    assert store.overviews.figures().best[second.id].samples_per_second == 1.0
    assert store.calibrations.newest("f", 1)[0].cluster == cluster()
    assert len(store.keys.all()) == 1
    assert len(store.trials.figures_of(second.id)) == len(store.trials.of(second.id)) == len(store.trials.plain(second.id)) == 2
    assert set(store.attempts.placements(second.id)) == {0, 1}
    assert store.jobs.prior(second.id) == {"x": 1}
    store.attempts.placements(first.id)
    sink = io.StringIO()
    store.transfer.dump(sink)
    store.transfer.dump(sink, first.id)


@pytest.mark.prove
def test_what_is_damaged_stops_nothing_else_and_is_reported(store: Store, engine: Engine, clock) -> None:
    first, second = fill(store, clock)
    assert store.maintenance.damages() == []
    values = SHAPES if engine.dialect.name == "postgresql" else SHAPES + TEXTS
    for number, (table, column) in enumerate(PLACES):
        # Every value in the column that most reads ask for; of the others, each has some.
        for value in values if column == "request" else (values[number % len(values)], "[[1]]"):
            with damage(engine, table, column, value):
                check_others(store, first, second)
                assert {item.place.split()[0] for item in store.maintenance.damages()} <= {table}
                if value not in RIGHT_IN_SOME_PLACE:
                    assert store.maintenance.damages(), (table, column, value)


def test_a_damaged_request_is_no_job_for_a_worker_that_looks_for_some(store: Store, engine: Engine, clock) -> None:
    for name in ("first", "second"):
        store.queue.submit({"runner": "local", "tags": [], "name": name}, Submission())
        clock.advance(1)
    with damage(engine, "jobs", "request", "5"):
        lease = store.queue.claim(current_owner(), limits=QueueLimits(runners=frozenset({"local"})))
        assert lease is not None
        assert store.jobs.get(lease.job_id).request["name"] == "second"
        taken = store.queue.claim(current_owner())
        assert taken is not None
        job = store.jobs.get(taken.job_id)
        assert (job.damage, job.request) == ("its request cannot be read", {})
        with pytest.raises(DamagedRowError, match=f"job {job.id}: is damaged .*; see `autotune db check`"):
            store.queue.change_request(job.id, None, {"trials": 9})
        assert store.jobs.release(taken, JobState.FAILED, "DamagedRowError", "").state is JobState.FAILED


def test_a_damaged_delivery_is_given_up_and_others_are_made(store: Store, engine: Engine, clock) -> None:
    hook = store.webhooks.create("anna", "https://a.example/")
    for _ in range(2):
        store.queue.ask(store.queue.submit({}, Submission(submitter="anna"))[0].id, Ask.CANCEL)
        clock.advance(1)
    for column in ("payload", "tries"):
        with damage(engine, "deliveries", column, "[[1]]"):
            (claimed,) = store.webhooks.claim_deliveries(seconds=0)
            assert claimed.payload["type"] == "job.ended"
            assert [item.id for item in store.webhooks.deliveries(hook.id)] == [claimed.id]
        with engine.begin() as connection:
            connection.execute(text("UPDATE deliveries SET state = 'pending'"))


def test_the_damaged_address_of_a_webhook_is_reported(store: Store, engine: Engine) -> None:
    hook = store.webhooks.create("anna", "https://a.example/")
    assert store.maintenance.damages() == []
    for url in ("https://[a.example/", "https://a.example:http/"):
        with engine.begin() as connection:
            connection.execute(text("UPDATE webhooks SET url = :url"), {"url": url})
        (found,) = store.maintenance.damages()
        assert found.place == f"webhooks {hook.id}"


def test_the_trials_of_a_job_name_the_damaged_one(store: Store, engine: Engine, clock) -> None:
    first, _ = fill(store, clock)
    with damage(engine, "trials", "config", "5"):
        for read in (store.trials.of, store.trials.figures_of, store.trials.plain):
            with pytest.raises(DamagedRowError, match=f"trial 0 of job {first.id}: is damaged .*; see `autotune db check`"):
                read(first.id)


def test_a_backup_keeps_what_is_damaged_as_it_is(store: Store, engine: Engine, clock, tmp_path: Path) -> None:
    first, second = fill(store, clock)
    with damage(engine, "jobs", "request", "5" if engine.dialect.name == "postgresql" else "{"):
        sink = io.StringIO()
        store.transfer.dump(sink)
    with open_store(str(tmp_path / "elsewhere.db")) as other:
        other.transfer.load(sink)
        assert [item.place for item in other.maintenance.damages()] == [f"jobs {first.id}"]
        assert other.jobs.get(second.id).request == second.request
