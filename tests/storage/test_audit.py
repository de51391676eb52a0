"""The audit log: each act is one entry of its transaction, and no entry changes or goes."""

import io
from collections.abc import Callable
from datetime import timedelta

import pytest
import sqlalchemy as sa

from search_spaces.outcome import JobState
from storage.audit import local_actor
from storage.errors import JobStateError, UnknownKeyError
from storage.owners import current_owner
from storage.records import Ask, Submission
from storage.service_records import Actor, Quota
from storage.store import Store

ANNA = Actor(name="anna", key_id="0123456789ab", source="203.0.113.9")


def acts(store: Store) -> list[tuple[str, str]]:
    """Of one moment of the clock: in no order."""
    return sorted((entry.action, entry.target) for entry in store.audit())


@pytest.mark.prove
def test_who_did_what_from_where_and_with_which_key(store: Store, clock) -> None:
    job = store.submit({"model": "m"}, Submission(submitter="anna", by=ANNA))[0]
    (entry,) = store.audit()
    assert (entry.actor, entry.key_id, entry.source) == ("anna", "0123456789ab", "203.0.113.9")
    assert (entry.action, entry.target, entry.detail) == ("job.submit", job.id, {"model": "m"})
    clock.advance(1)
    store.ask(job.id, Ask.CANCEL)
    assert (store.audit(1)[0].actor, store.audit(1)[0].key_id) == (local_actor().name, None)


def test_every_act_of_a_person_is_an_entry(store: Store, clock) -> None:
    mine = store.by(ANNA)
    job = mine.submit({"model": "m"}, Submission(submitter="anna", by=ANNA))[0].id
    mine.ask(job, Ask.PAUSE)
    mine.change_request(job, None, {"trials": 5})
    key = mine.create_key("bert", {"read"})[0].id
    mine.revoke_key(key)
    mine.set_quota("bert", Quota.WEBHOOKS, 3)
    hook = mine.create_webhook("anna", "https://a.example/").id
    mine.delete_webhook(hook)
    lease = store.acquire(job, current_owner())
    store.quarantine_node(lease, "n1", "slow", 60)
    store.release(lease, JobState.PAUSED, "paused", "")
    mine.release_node("n1")
    file = io.StringIO()
    mine.dump(file, job)
    mine.delete_job(job)
    mine.load_job(file)
    mine.prune(clock())
    assert acts(store) == sorted([
        ("job.submit", job), ("job.pause", job), ("job.change", job), ("key.create", key), ("key.revoke", key),
        ("quota.set", "bert"), ("webhook.create", hook), ("webhook.delete", hook), ("node.release", "n1"),
        ("db.export", job), ("job.delete", job), ("db.import", job), ("db.prune", ""),
    ])  # fmt: skip
    assert {entry.actor for entry in store.audit()} == {"anna"}


def test_what_is_refused_leaves_no_entry(store: Store) -> None:
    job = store.submit({}, Submission(by=ANNA))[0]
    store.ask(job.id, Ask.CANCEL)
    before = store.audit()
    with pytest.raises(JobStateError):
        store.by(ANNA).ask(job.id, Ask.PAUSE)
    with pytest.raises(UnknownKeyError):
        store.by(ANNA).revoke_key("none")
    assert store.audit() == before


def test_the_database_refuses_to_change_or_remove_an_entry(store: Store, address: str) -> None:
    store.create_key("anna", {"admin"})
    before = store.audit()
    engine = sa.create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    statements = ["UPDATE audit SET actor = 'nobody'", "DELETE FROM audit"]
    statements += ["TRUNCATE audit"] if engine.dialect.name == "postgresql" else []
    for statement in statements:
        with engine.connect() as connection, pytest.raises(sa.exc.DBAPIError, match="append-only"):
            connection.execute(sa.text(statement))
    engine.dispose()
    assert store.audit() == before


def test_pages_and_what_is_looked_for(store: Store, clock, open_again: Callable[[], Store]) -> None:
    for number in range(5):
        store.by(Actor(name=f"a{number % 2}")).set_quota("x", Quota.WEBHOOKS, number)
        clock.advance(1)
    newest = store.audit(2)
    assert [entry.detail["most"] for entry in newest] == [4, 3]
    assert [entry.detail["most"] for entry in open_again().audit(9, before=newest[-1].id)] == [2, 1, 0]
    assert [entry.detail["most"] for entry in store.audit(actor="a1")] == [3, 1]
    assert [entry.detail["most"] for entry in store.audit(since=clock() - timedelta(seconds=2))] == [4, 3]
    assert store.audit(action="key.create") == []


def test_a_backup_has_the_log(store: Store, tmp_path) -> None:
    store.by(ANNA).create_key("anna", {"read"})
    file = io.StringIO()
    store.dump(file)
    with Store(str(tmp_path / "elsewhere.db")) as other:
        other.load(file)
        assert sorted(entry.action for entry in other.audit()) == ["db.restore", "key.create"]
        assert other.audit(action="key.create")[0] == store.audit(action="key.create")[0]
