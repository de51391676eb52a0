"""Rows as files: what is written is read back the same, in either kind of database; what is not whole changes nothing."""

import io
import json
from pathlib import Path

import pytest

from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import Interval, RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.errors import TransferError, UnknownJobError
from storage.leases import current_owner
from storage.records import Ask, AttemptState, JobFilter, Lease, QueueLimits, Submission
from storage.service_records import Quota, Quotas
from storage.store import Store, open_store


def work_on(store: Store, job_id: str, trials: int = 3) -> Lease:
    """Measure some trials, and leave one running."""
    lease = store.jobs.acquire(job_id, current_owner())
    for number in range(trials + 1):
        store.trials.add(lease, TrialConfig(zero_stage=number % 4, micro_batch_size=1 + number), Purpose.SEARCH)
        token = store.attempts.start(lease, number).token
        if number < trials:
            rank = RankMeasurement(
                rank=0, host="here", peak_memory_bytes=2**40, memory_by_tag={"parameters": 2**40}, tag_peak_bytes={},
                rss_peak_bytes=1, cpu_seconds_per_step=0.5, collectives=(),
            )  # fmt: skip
            rate = Interval(mean=80.0, low=79.0, high=81.0)
            store.attempts.finish(
                lease,
                TrialResult(
                    attempt=token, outcome=Outcome.OK, losses=(5.0, float("nan")), samples_per_second=rate, ranks=(rank,)
                ),
            )
    store.jobs.set_reference_losses(lease, (5.0, 4.0))
    return lease


def text_of(store: Store, job_id: str | None = None) -> str:
    sink = io.StringIO()
    store.transfer.dump(sink, job_id)
    return sink.getvalue()


@pytest.fixture
def elsewhere(tmp_path: Path):
    with open_store(str(tmp_path / "elsewhere.db")) as other:
        yield other


def test_a_job_goes_to_another_database_with_all_that_belongs_to_it(store: Store, elsewhere: Store) -> None:
    other_job = store.jobs.create({"model": "none"})
    job = store.queue.submit(
        {"model": "llama-tiny", "pins": {"a": [1, 2]}}, Submission(submitter="anna", priority=3, devices=2)
    )[0]
    store.jobs.release(work_on(store, job.id), JobState.SUCCEEDED, "BUDGET", "spent")
    assert elsewhere.transfer.load_job(io.StringIO(text_of(store, job.id)), "berta") == job.id
    assert repr(elsewhere.trials.of(job.id)) == repr(store.trials.of(job.id))  # losses hold a NaN, which equals nothing
    assert repr(elsewhere.attempts.of(job.id)) == repr(store.attempts.of(job.id))
    assert elsewhere.events.of(job.id) == store.events.of(job.id)
    here, there = store.jobs.get(job.id), elsewhere.jobs.get(job.id)
    assert (there.state, there.reason, there.request, there.submitter, there.version, there.devices) == (
        here.state, here.reason, {**here.request, "origin": "file"}, "berta", here.version, 2,
    )  # fmt: skip
    assert there.queued is None
    assert elsewhere.jobs.exact([other_job.id]) == {}


@pytest.mark.prove
def test_a_job_that_runs_is_paused_where_it_is_imported_and_can_go_on(store: Store, elsewhere: Store) -> None:
    job = store.queue.submit({}, Submission())[0]
    work_on(store, job.id)
    elsewhere.transfer.load_job(io.StringIO(text_of(store, job.id)))
    there = elsewhere.jobs.get(job.id)
    assert (there.state, there.reason, there.owner) == (JobState.PAUSED, "imported", None)
    assert elsewhere.queue.claim(current_owner()) is None
    assert elsewhere.attempts.of(job.id)[-1].state is AttemptState.ABANDONED
    assert [event.sequence for event in elsewhere.events.of(job.id)] == list(range(1, there.version + 1))
    lease = elsewhere.jobs.acquire(job.id, current_owner())
    assert elsewhere.attempts.start(lease, 3).number == 2
    assert store.jobs.get(job.id).state is JobState.RUNNING


@pytest.mark.prove
def test_a_backup_holds_everything_and_running_jobs_are_taken_over(store: Store, elsewhere: Store, clock) -> None:
    running = store.queue.submit({"n": 0}, Submission(submitter="anna", key="k0"))[0]
    clock.advance(1)
    waiting = store.queue.submit({"n": 1}, Submission(submitter="anna", key="k1"))[0]
    held = store.queue.claim(current_owner())
    assert held is not None
    work_on_held(store, held)
    _, secret = store.keys.create("anna", ("read",))
    webhook = store.webhooks.create("anna", "https://a.example/")
    assert set(elsewhere.transfer.load(io.StringIO(text_of(store)))) == {running.id, waiting.id}
    assert elsewhere.keys.authenticate(secret) is not None
    assert [store.webhooks.signing_secret(hook) for hook in elsewhere.webhooks.of()] == [webhook.secret], "with the same key"
    assert elsewhere.webhooks.of() == store.webhooks.of()
    assert elsewhere.queue.submit({"n": 0}, Submission(submitter="anna", key="k0"))[0].id == running.id
    lease = elsewhere.queue.claim(current_owner(), limits=QueueLimits())
    assert lease is not None
    assert (lease.job_id, lease.state) == (running.id, JobState.RUNNING)
    assert lease.token > held.token
    assert text_of(elsewhere).count('"table":"events"') > text_of(store).count('"table":"events"')


def work_on_held(store: Store, lease: Lease) -> None:
    store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
    store.attempts.start(lease, 0)


def damaged(text: str) -> list[tuple[str, str]]:
    lines = text.splitlines(keepends=True)
    head = json.loads(lines[0])
    job = json.loads(lines[1])
    return [
        ("", "line 1: is not JSON"),
        ("{}\n", "line 1: is not the head"),
        ("[]\n", "line 1: is not a JSON object"),
        (json.dumps(head | {"schema": "r999"}) + "\n", "another version of autotune .schema r999"),
        (json.dumps(head | {"version": 2}) + "\n", "another version of autotune"),
        (json.dumps(head | {"schema": "0012"}) + "\n", "another version of autotune .schema 0012"),
        (json.dumps(head | {"kind": "house"}) + "\n", "kind 'house'"),
        ("".join(lines[:-1]), "before its last line"),
        ("".join([*lines[:-2], lines[-1]]), "were written"),
        ("".join(lines)[:-400], "is not JSON|before its last"),
        (lines[0] + json.dumps({"table": "jobs", "row": job["row"] | {"colour": 1}}) + '\n{"end":1}\n', "no column 'colour'"),
        (lines[0] + '{"table":"horses","row":{}}\n{"end":1}\n', "table 'horses'"),
        (lines[0] + '{"table":"jobs"}\n', "line 2: is not a row"),
    ]


def test_what_is_not_whole_is_refused_and_nothing_of_it_stays(store: Store, elsewhere: Store) -> None:
    job = store.queue.submit({}, Submission())[0]
    store.jobs.release(work_on(store, job.id), JobState.SUCCEEDED, "", "")
    for text, problem in damaged(text_of(store, job.id)):
        with pytest.raises(TransferError, match=problem):
            elsewhere.transfer.load_job(io.StringIO(text))
        assert elsewhere.jobs.newest() == []
    with pytest.raises(UnknownJobError):
        store.transfer.dump(io.StringIO(), "20200101-000000-aaaa")


def test_what_is_here_already_is_not_written_over(store: Store) -> None:
    job = store.queue.submit({}, Submission())[0]
    with pytest.raises(TransferError, match=f"autotune clean {job.id}"):
        store.transfer.load_job(io.StringIO(text_of(store, job.id)))
    with pytest.raises(TransferError, match="has jobs already"):
        store.transfer.load(io.StringIO(text_of(store)))
    assert [item.id for item in store.jobs.newest()] == [job.id]


def with_rows(text: str, *rows: dict[str, object], **columns: object) -> str:
    """The file of a job with further rows, and other values in the job's own."""
    head, job, *others = [json.loads(line) for line in text.splitlines()]
    job["row"] |= columns
    lines = [head, job, *others[:-1], *rows]
    return "".join(json.dumps(line) + "\n" for line in [*lines, {"end": len(lines) - 1}])


def hostile(text: str) -> list[tuple[str, str]]:
    """Files of a job that hold more than the job, and what is said of each."""
    now = "2030-01-01T00:00:00+00:00"
    key = {"id": "aaaa", "secret_hash": "0" * 64, "owner": "mallory", "scopes": ["admin"], "created": now}
    webhook = {"id": "bbbb", "owner": "anna", "url": "https://evil.example/", "secret": "s", "created": now}
    event = {"job_id": "20200101-000000-aaaa", "sequence": 1, "time": now, "kind": "x", "payload": {}}
    rank = json.loads(next(line for line in text.splitlines() if '"rank_measurements"' in line))
    lines = text.splitlines(keepends=True)
    return [
        (with_rows(text, {"table": "api_keys", "row": key}), "rows of api_keys do not belong in a job's file"),
        (with_rows(text, {"table": "webhooks", "row": webhook}), "rows of webhooks do not belong"),
        (with_rows(text, {"table": "usage", "row": {}}), "rows of usage do not belong"),
        (with_rows(text, {"table": "events", "row": event}), "events of another job"),
        (with_rows(text, rank | {"row": rank["row"] | {"attempt": "f" * 32}}), "rank_measurements of another job"),
        (with_rows(text, json.loads(lines[1])), "is a second job"),
        (lines[0] + lines[2] + '{"end":1}\n', "before the job's"),
        (with_rows(text, lease_host="here"), "no column 'lease_host'"),
        (with_rows(text, id="../../etc/passwd"), "is not a job's id"),
        (with_rows(text, state="zombie"), "jobs.state: 'zombie' is not a valid"),
        (with_rows(text, devices=-8), "cannot have negative seconds or no devices"),
        (with_rows(text, trial_count=2**70), "out of range"),
        (with_rows(text, event_count=0), "more trials or events than it counts"),
        (with_rows(text, request="x"), "request"),
        (with_rows(text, request={"trials": "many"}), "trials of its request"),
        (with_rows(text, created=5), "jobs.created"),
        (with_rows(text, reason=None), "jobs.reason: is missing"),
        (text.replace('"zero_stage":1', '"zero_stage":[]'), "trials"),
        (text.replace('"outcome":"ok"', '"outcome":"fine"').replace('"outcome":"OK"', '"outcome":"fine"'), "outcome"),
    ]


@pytest.mark.prove
def test_the_file_of_a_job_brings_nothing_but_the_job(store: Store, elsewhere: Store) -> None:
    job = store.queue.submit({"model": "m"}, Submission())[0]
    store.jobs.release(work_on(store, job.id), JobState.SUCCEEDED, "", "")
    text = text_of(store, job.id)
    for changed, problem in hostile(text):
        with pytest.raises(TransferError, match=problem) as refused:
            elsewhere.transfer.load_job(io.StringIO(changed))
        assert "\n" not in str(refused.value)
        assert (elsewhere.jobs.newest(), elsewhere.keys.all(), elsewhere.webhooks.of()) == ([], [], [])
    with pytest.raises(TransferError, match="autotune db restore"):
        elsewhere.transfer.load_job(io.StringIO(text_of(store)))
    with pytest.raises(TransferError, match="autotune db import"):
        elsewhere.transfer.load(io.StringIO(text))


@pytest.mark.prove
def test_a_job_from_a_file_owes_nothing_and_goes_before_nobody(store: Store, elsewhere: Store) -> None:
    job = store.queue.submit({}, Submission(submitter="anna", priority=100))[0]
    work_on(store, job.id)
    elsewhere.transfer.load_job(io.StringIO(with_rows(text_of(store, job.id), lease_token=2**62, charged_seconds=-1e9)))
    there = elsewhere.jobs.get(job.id)
    assert (there.submitter, there.priority, there.owner) == ("", 0, None)
    lease = elsewhere.jobs.acquire(job.id, current_owner())
    assert lease.token == 1
    elsewhere.jobs.release(lease, JobState.PAUSED, "", "")
    assert elsewhere.workers.usage("").device_seconds < 1.0


def test_a_jobs_bytes_are_counted_where_it_is_imported(store: Store, elsewhere: Store) -> None:
    request = {"model": "m", "note": "x" * 1000}
    job = store.queue.submit(request, Submission())[0]
    store.jobs.release(work_on(store, job.id), JobState.SUCCEEDED, "", "")
    with pytest.raises(TransferError, match="has no column 'stored_bytes'"):
        elsewhere.transfer.load_job(io.StringIO(with_rows(text_of(store, job.id), stored_bytes=-(10**15))))
    elsewhere.transfer.load_job(io.StringIO(text_of(store, job.id)), "anna")
    used = {item.quota: item.used for item in elsewhere.quotas.uses("anna", Quotas())}
    assert 1000 < used[Quota.STORED_BYTES] < 2000


@pytest.mark.prove(every=5)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_time_that_is_no_number_is_refused(store: Store, elsewhere: Store, number: str) -> None:
    job = store.queue.submit({}, Submission())[0]
    with pytest.raises(TransferError, match=r"jobs\.active_seconds: is not a finite number"):
        elsewhere.transfer.load_job(io.StringIO(with_rows(text_of(store, job.id), active_seconds={"$number": number})))


@pytest.mark.prove
def test_texts_that_a_database_cannot_hold_are_imported_as_what_it_can(store: Store, elsewhere: Store) -> None:
    job = store.queue.submit({"runner": "local", "tags": ["a"]}, Submission())[0]
    text = text_of(store, job.id).replace('"runner":"local"', '"runner":"local","name":"\\u0000\\ud800","x":{"\\u0000":1}')
    for other in (elsewhere, store):
        if other is store:
            store.jobs.delete(job.id)
        other.transfer.load_job(io.StringIO(text))
        (found,) = other.jobs.newest(having=JobFilter(tags=["a"]))
        assert found.request["name"] == "\\0\\udc80".replace("udc80", "ud800")
        other.queue.ask(job.id, Ask.RESUME)
        assert other.queue.claim(current_owner(), limits=QueueLimits(runners=frozenset({"local"}))) is not None
