"""The client against a real service."""

import itertools
import json
import threading
from pathlib import Path

import pytest
import served
import table

import autotune
from autotune import Client
from autotune.client import ConflictError, InvalidRequestError, Job, NotFoundError, WaitTimeoutError
from autotune.errors import RequestError
from search_spaces.outcome import JobState
from storage.leases import current_owner
from storage.store import Store
from tests.api.conftest import measure

FIELDS = {"ranks": 2, "trials": 3, "global_batch_size": 8, "sequence_length": 64}


def submit(client: Client, **changes: object) -> Job:
    return client.submit("llama-tiny", **FIELDS | changes)  # type: ignore[arg-type]


def test_submit(client: Client, store: Store) -> None:
    job = submit(client, priority=7, pins={"zero_stage": [1, 2]}, baseline={"zero_stage": 1}, max_seconds=60.0, engine=None)
    assert (job.state, job.priority, job.model, job.ended) == ("QUEUED", 7, "llama-tiny", False)
    assert (job.request["trials"], job.request["max_seconds"], job.request["engine"]) == (3, 60.0, "native")
    assert client.job(job) == client.job(job.id) == job
    assert store.jobs.get(job.id).created == job.created


def test_a_model_is_read_here_and_sent_along(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(table.MODEL_CONFIG)
    monkeypatch.chdir(tmp_path)
    given = {"name": "my-model", "config": json.loads(table.MODEL_CONFIG)}
    for model in ("my-model/config.json", "./my-model", folder, Path("my-model"), given):
        assert client.submit(model, trials=1).model == "my-model"
    (tmp_path / "words.json").write_text("words")
    (tmp_path / "list.json").write_text("[1]")
    for name, problem in (
        ("none.json", "cannot be read"),
        ("words.json", "is not JSON"),
        ("list.json", "holds no JSON"),
    ):
        with pytest.raises(RequestError, match=f"^model: {name} {problem}.*; give a preset"):
            client.submit(name)


def test_a_key_names_a_submission(client: Client) -> None:
    first = submit(client, idempotency_key="mine")
    assert submit(client, idempotency_key="mine") == first
    assert submit(client).id != submit(client).id
    with pytest.raises(InvalidRequestError, match=r"Idempotency-Key: the key 'mine' was used before.*; use a new key"):
        submit(client, idempotency_key="mine", trials=4)
    assert client.clone(first, idempotency_key="again") == client.clone(first, idempotency_key="again")
    assert client.clone(first).request == first.request
    assert len(list(client.jobs())) == 5


@pytest.mark.prove
def test_jobs_come_page_by_page(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.client.jobs.PAGE", 2)
    made = [submit(client).id for _ in range(5)][::-1]
    client.pause(made[1])
    client.cancel(made[3])
    assert [job.id for job in client.jobs()] == made
    assert [job.id for job in client.jobs(limit=3)] == made[:3]
    assert list(client.jobs(limit=0)) == []
    assert [job.id for job in client.jobs(state="PAUSED")] == [made[1]]
    assert [job.id for job in client.jobs(state=["CANCELLED", JobState.PAUSED])] == [made[1], made[3]]
    assert list(client.jobs(submitter="nobody")) == []
    with pytest.raises(InvalidRequestError, match="state"):
        list(client.jobs(state="ASLEEP"))


def test_steering(client: Client) -> None:
    job = submit(client)
    assert [client.pause(job).state, client.pause(job.id).state, client.resume(job).state] == ["PAUSED", "PAUSED", "QUEUED"]
    stopped = client.stop(job)
    assert (stopped.state, stopped.reason) == ("SUCCEEDED", "STOPPED")
    assert client.stop(job) == stopped
    with pytest.raises(ConflictError, match=f"job {job.id} is SUCCEEDED, so that it cannot pause; it has ended"):
        client.pause(job)
    other = submit(client)
    assert [client.cancel(other).state, client.cancel(other).state] == ["CANCELLED", "CANCELLED"]


def test_a_budget_is_extended_if_nothing_has_happened_since(client: Client) -> None:
    job = submit(client)
    longer = client.extend(job, trials=9)
    assert longer.request["trials"] == 9
    with pytest.raises(ConflictError, match="If-Match: the job has changed since; read it again"):
        client.extend(job, max_seconds=5.0)
    assert client.extend(longer, max_seconds=5.0).request["max_seconds"] == 5.0
    assert client.extend(job.id, trials=2).request["trials"] == 2
    with pytest.raises(InvalidRequestError, match="body: changes nothing; give some of trials, max_seconds, name, tags, note"):
        client.extend(job.id)
    client.cancel(job)
    with pytest.raises(ConflictError, match="has ended"):
        client.extend(job.id, trials=5)


def test_a_job_has_labels_that_may_change(client: Client) -> None:
    job = submit(client, name="nightly", tags=("a100", "smoke"), note="first")
    assert (job.name, job.tags, job.note) == ("nightly", ("a100", "smoke"), "first")
    submit(client)
    assert [found.id for found in client.jobs(tag="smoke")] == [job.id]
    assert [[found.id for found in client.jobs(text=text)] for text in ("FIRST night", "second")] == [[job.id], []]
    client.cancel(job)
    changed = client.label(job, tags=["smoke"], note="")
    assert (changed.state, changed.name, changed.tags, changed.note) == ("CANCELLED", "nightly", ("smoke",), "")
    assert list(client.jobs(tag=("a100", "smoke"))) == []
    with pytest.raises(InvalidRequestError, match="tags"):
        client.label(job, tags=["two words"])


def test_a_job_that_has_succeeded_goes_on_with_a_larger_budget(client: Client, store: Store) -> None:
    job = submit(client)
    client.stop(job)
    store.jobs.release(store.jobs.acquire(job.id, current_owner()), JobState.SUCCEEDED, "BUDGET", "3 of 3 trials are spent")
    with pytest.raises(ConflictError, match="give it a larger budget"):
        client.resume(job)
    assert (client.resume(job, trials=30).state, client.job(job).request["trials"]) == ("QUEUED", 30)


def test_results(client: Client, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.client.results.PAGE", 2)
    job = submit(client)
    with pytest.raises(NotFoundError, match="has no configuration that may win; raise"):
        client.best(job)
    measure(store, job.id, trials=3)
    trials = list(client.trials(job))
    assert [trial.number for trial in trials] == [0, 1, 2]
    assert trials[2].outcome == "OK"
    assert trials[2].config["zero_stage"] == 2
    assert trials[2].result is not None
    assert trials[2].result["samples_per_second"]["mean"] == 102.0
    assert trials[2].result["losses"] == [5.0, None]
    assert list(client.trials(job, first=1)) == trials[1:]
    (attempt,) = client.attempts(job, trials[1])
    assert client.attempts(job, 1) == (attempt,)
    assert (attempt.state, attempt.trial, attempt.result) == ("accepted", 1, trials[1].result)
    best = client.best(job)
    assert best["best"]["trial"] == best["decision"]["trial"]
    exported = json.loads(client.export(job).text)
    assert (exported["best"], exported["job"]) == (best["best"], best["job"])  # the provenance tells the time of each
    deepspeed = client.export(job, "deepspeed")
    assert json.loads(deepspeed.text)["zero_optimization"]["stage"] == best["best"]["config"]["zero_stage"]
    with pytest.raises(NotFoundError, match="format: 'nemo' is not known; use one of json, deepspeed"):
        client.export(job, "nemo")
    events = list(client.events(job, follow=False))
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert list(client.events(job, after=4, follow=False)) == events[4:]
    assert events[0].kind == "job_created"


def test_what_there_is_to_choose_from(client: Client) -> None:
    assert "llama-tiny" in client.models()
    assert "local" in client.clusters()
    assert "zero" in client.spaces()
    assert {engine["engine"] for engine in client.engines()} >= {"native"}
    assert {knob["name"] for knob in client.knobs()} >= {"zero_stage"}
    space = client.count_space("llama-tiny", ranks=2)
    assert 0 < space.legal <= space.raw
    assert space.domains["zero_stage"] == (0, 1, 2, 3)
    good = client.validate_config("llama-tiny", {"zero_stage": 3}, ranks=2)
    assert (good.legal, good.config["zero_stage"], good.refusals) == (True, 3, ())
    bad = client.validate_config("llama-tiny", {"micro_batch_size": 3}, ranks=2)
    assert (bad.legal, bad.refusals[0].rule) == (False, "batch-divides")
    assert bad.refusals[0].remedy


REFUSED: dict[str, dict[str, object]] = {
    "^trials: 0 is not a whole number of 1 or more; give at least 1": {"trials": 0},
    "^strategy: 'genetic' is not known; use one of guided": {"strategy": "genetic"},
    "^pins.zero_stage: 7.*; give 0, 1, 2 or 3": {"pins": {"zero_stage": 7}},
    "no space has this name; use one of": {"space": "../x.toml"},
}


def test_a_field_that_is_refused(client: Client, store: Store) -> None:
    for says, fields in REFUSED.items():
        with pytest.raises(InvalidRequestError, match=says) as found:
            submit(client, **fields)
        assert isinstance(found.value, ValueError)
        assert "\n" not in str(found.value)
        assert found.value.problems
        assert store.jobs.newest() == []


@pytest.mark.parametrize("job", ["", ".", "../models", "a/b", "x" * 101, "20300101-000000-aaaa\n"])
def test_what_is_no_id_is_not_asked_for(job: str) -> None:
    asked: list[served.Request] = []
    with (
        served.answering(asked.append) as url,
        Client(url) as client,
        pytest.raises(RequestError, match="is no id of a job; give a whole id"),
    ):
        client.job(job)
    assert asked == []


def test_an_unknown_job(client: Client) -> None:
    for call in (client.job, client.best, client.cancel, client.clone, client.wait, lambda job: next(client.events(job))):
        with pytest.raises(NotFoundError, match="there is no job '20300101-000000-aaaa'"):
            call("20300101-000000-aaaa")


@pytest.mark.prove
def test_waiting(client: Client, store: Store) -> None:
    job = submit(client)
    with pytest.raises(WaitTimeoutError, match=f"job: {job.id} has not ended after 0.3 s; wait longer, or stop it"):
        client.wait(job, timeout=0.3)
    timer = threading.Timer(0.3, lambda: client.cancel(job))
    timer.start()
    assert client.wait(job, timeout=120).state == "CANCELLED"
    timer.join()


def test_events_end_with_the_job(client: Client, store: Store) -> None:
    job = submit(client)
    lease = store.queue.claim(current_owner())
    assert lease is not None

    def work() -> None:
        for number in range(50):
            store.events.add(lease, "note", {"number": number})
        store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "")

    worker = threading.Thread(target=work)
    events = client.events(job)
    found = [next(events)]
    worker.start()
    found += list(events)
    worker.join()
    assert [event.sequence for event in found] == list(range(1, 54))
    assert (found[-1].kind, found[-1].payload["state"]) == ("job_released", "SUCCEEDED")
    assert list(client.events(job, after=50)) == found[50:]
    assert list(client.events(job, after=53)) == []


def test_several_threads_share_a_client(client: Client) -> None:
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.append(submit(client).id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(job.id for job in client.jobs())
    assert len(set(made)) == 8


def test_address_and_key_come_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_URL", raising=False)
    assert Client().url == "http://127.0.0.1:8000"
    monkeypatch.setenv("AUTOTUNE_URL", f"{url}/")
    with Client() as client:
        assert client.url == url
        assert list(itertools.islice(client.jobs(), 1)) == []
    assert Client("https://example.org/autotune").url == "https://example.org/autotune"


def test_it_is_a_name_of_autotune() -> None:
    assert "Client" in autotune.__all__
    assert autotune.Client is Client
