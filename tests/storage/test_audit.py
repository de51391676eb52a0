"""The audit log: each act is one entry of its transaction, and no entry changes or goes."""

import io
from collections.abc import Callable
from datetime import timedelta

import pytest
import sqlalchemy as sa

from search_spaces.outcome import JobState
from storage.audit import local_actor
from storage.errors import JobStateError, UnknownKeyError
from storage.leases import current_owner
from storage.records import Ask, Submission
from storage.service_records import Actor, Quota
from storage.store import Store

ANNA = Actor(name="anna", key_id="0123456789ab", source="203.0.113.9")


def acts(store: Store) -> list[tuple[str, str]]:
    """Of one moment of the clock: in no order."""
    return sorted((entry.action, entry.target) for entry in store.audit.newest())


@pytest.mark.prove
def test_who_did_what_from_where_and_with_which_key(store: Store, clock) -> None:
    job = store.queue.submit({"model": "m"}, Submission(submitter="anna", by=ANNA))[0]
    (entry,) = store.audit.newest()
    assert (entry.actor, entry.key, entry.source) == ("anna", "0123456789ab", "203.0.113.9")
    assert (entry.action, entry.target, entry.detail) == ("job.submit", job.id, {"model": "m"})
    clock.advance(1)
    store.queue.ask(job.id, Ask.CANCEL)
    assert (store.audit.newest(1)[0].actor, store.audit.newest(1)[0].key) == (local_actor().name, None)


def test_every_act_of_a_person_is_an_entry(store: Store, clock) -> None:
    mine = store.by(ANNA)
    job = mine.queue.submit({"model": "m"}, Submission(submitter="anna", by=ANNA))[0].id
    mine.queue.ask(job, Ask.PAUSE)
    mine.queue.change_request(job, None, {"trials": 5})
    key = mine.keys.create("bert", {"read"})[0].id
    mine.keys.revoke(key)
    mine.quotas.set_limit("bert", Quota.WEBHOOKS, 3)
    hook = mine.webhooks.create("anna", "https://a.example/").id
    mine.webhooks.delete(hook)
    lease = store.jobs.acquire(job, current_owner())
    store.nodes.quarantine(lease, "n1", "slow", 60)
    store.jobs.release(lease, JobState.PAUSED, "paused", "")
    mine.nodes.release("n1")
    file = io.StringIO()
    mine.transfer.dump(file, job)
    mine.jobs.delete(job)
    mine.transfer.load_job(file)
    mine.maintenance.prune(clock())
    assert acts(store) == sorted([
        ("job.submit", job), ("job.pause", job), ("job.change", job), ("key.create", key), ("key.revoke", key),
        ("quota.set", "bert"), ("webhook.create", hook), ("webhook.delete", hook), ("node.release", "n1"),
        ("db.export", job), ("job.delete", job), ("db.import", job), ("db.prune", ""),
    ])  # fmt: skip
    assert {entry.actor for entry in store.audit.newest()} == {"anna"}


def test_what_is_refused_leaves_no_entry(store: Store) -> None:
    job = store.queue.submit({}, Submission(by=ANNA))[0]
    store.queue.ask(job.id, Ask.CANCEL)
    before = store.audit.newest()
    with pytest.raises(JobStateError):
        store.by(ANNA).queue.ask(job.id, Ask.PAUSE)
    with pytest.raises(UnknownKeyError):
        store.by(ANNA).keys.revoke("none")
    assert store.audit.newest() == before


def test_the_database_refuses_to_change_or_remove_an_entry(store: Store, address: str) -> None:
    store.keys.create("anna", {"admin"})
    before = store.audit.newest()
    engine = sa.create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    statements = ["UPDATE audit SET actor = 'nobody'", "DELETE FROM audit"]
    statements += ["TRUNCATE audit"] if engine.dialect.name == "postgresql" else []
    for statement in statements:
        with engine.connect() as connection, pytest.raises(sa.exc.DBAPIError, match="append-only"):
            connection.execute(sa.text(statement))
    engine.dispose()
    assert store.audit.newest() == before


def test_pages_and_what_is_looked_for(store: Store, clock, open_again: Callable[[], Store]) -> None:
    for number in range(5):
        store.by(Actor(name=f"a{number % 2}")).quotas.set_limit("x", Quota.WEBHOOKS, number)
        clock.advance(1)
    newest = store.audit.newest(2)
    assert [entry.detail["most"] for entry in newest] == [4, 3]
    assert [entry.detail["most"] for entry in open_again().audit.newest(9, before=newest[-1].id)] == [2, 1, 0]
    assert [entry.detail["most"] for entry in store.audit.newest(actor="a1")] == [3, 1]
    assert [entry.detail["most"] for entry in store.audit.newest(since=clock() - timedelta(seconds=2))] == [4, 3]
    assert store.audit.newest(action="key.create") == []


def test_a_backup_has_the_log(store: Store, tmp_path) -> None:
    store.by(ANNA).keys.create("anna", {"read"})
    file = io.StringIO()
    store.transfer.dump(file)
    with Store(str(tmp_path / "elsewhere.db")) as other:
        other.transfer.load(file)
        assert sorted(entry.action for entry in other.audit.newest()) == ["db.restore", "key.create"]
        assert other.audit.newest(action="key.create")[0] == store.audit.newest(action="key.create")[0]
