"""What the commands know of a service and of a database is the same: one test case for both."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import served
import table

from autotune.cli.backend import JobBackend
from autotune.cli.open_backend import open_backend
from autotune.client import Client, ServiceError
from autotune.errors import NoBestError, RequestError, UnknownFormatError
from autotune.explain.explain import explain
from autotune.reports.report import report_text
from search_spaces.outcome import JobState, Outcome
from storage.leases import current_owner
from storage.records import ANY_JOB, Ask, JobFilter
from storage.store import Store
from tests.api.conftest import measure

UNKNOWN = "20300101-000000-aaaa"
FIELDS: dict[str, Any] = {
    "model": "llama-tiny", "ranks": 2, "trials": 3, "global_batch_size": 8, "sequence_length": 64, "max_seconds": 60.0,
    "pins": {"zero_stage": "1,2"}, "baseline": {"zero_stage": 1},
}  # fmt: skip


@pytest.fixture(params=["database", "service"])
def desk(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[JobBackend]:
    database = str(tmp_path / "jobs.db")
    on_service = request.param == "service"
    with (
        served.service(database) if on_service else nullcontext() as url,
        open_backend(url, None if on_service else database) as desk,
    ):
        yield desk


def test_a_link_is_a_services(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator shares a job of the command line, which has no owner; the link opens it and nothing else."""
    database = str(tmp_path / "jobs.db")
    job = store.jobs.create({"model": "llama-tiny"})
    monkeypatch.setenv("AUTOTUNE_API_KEY", store.keys.create("me", {"operate"})[1])
    with served.service(database, require_keys=True, share_days=7) as url:
        with open_backend(url, None) as backend:
            address, token = backend.share("latest", 7).split("?link=")
        assert address == f"{url}/#/jobs/{job.id}"
        with Client(url, token) as guest:
            assert guest.job(job.id).id == job.id
            with pytest.raises(ServiceError, match="is a link to job"):
                list(guest.jobs())
    with open_backend(None, database) as backend, pytest.raises(RequestError, match="links are those of a service"):
        backend.share("latest", 7)


@pytest.mark.prove
def test_submit(desk: JobBackend, store: Store) -> None:
    job = desk.submit(FIELDS, 7)
    assert (job.state, job.priority, job.submitter) == (JobState.QUEUED, 7, "")
    kept = store.jobs.get(job.id)
    assert (kept.queued is not None, kept.request["trials"], kept.request["max_seconds"]) == (True, 3, 60.0)
    assert kept.request["resolved_domains"]["zero_stage"] == [1, 2]
    assert kept.request["baseline"] == {"zero_stage": 1}
    assert (job.request["model"], job.request["trials"], job.created) == ("llama-tiny", 3, kept.created)


@pytest.mark.prove
def test_a_models_file_is_not_needed_afterwards(desk: JobBackend, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(table.MODEL_CONFIG)
    for model in (folder, folder / "config.json"):
        job = desk.submit({"model": str(model), "trials": 1}, 0)
        assert store.jobs.get(job.id).request["resolved_model"]["name"] == "mine"
        assert store.queue.claim(current_owner()) is not None


REFUSED: dict[str, dict[str, Any]] = {
    "strategy: 'genetic' is not known; use one of guided": {"strategy": "genetic"},
    "zero_stage: 7.*; give 0, 1, 2 or 3": {"pins": {"zero_stage": "7"}},
    "llama-9b: no model preset has this name; did you mean": {"model": "llama-9b"},
    "config.json.*; give": {"model": "none/config.json"},
    "nowhere: no space.* has this name; use one of": {"space": "nowhere"},
    "trials: ": {"trials": 0},
}


@pytest.mark.prove
def test_a_field_that_is_refused(desk: JobBackend, store: Store) -> None:
    """In one test, as below: each start of a service takes longer than all that it is asked."""
    for says, changes in REFUSED.items():
        with pytest.raises((ValueError, LookupError), match=says) as found:
            desk.submit(FIELDS | changes, 0)
        assert "\n" not in str(found.value)
        assert store.jobs.newest() == []


def test_without_a_model(desk: JobBackend) -> None:
    with pytest.raises(RequestError, match="model: is missing; give a preset"):
        desk.submit({"trials": 3}, 0)


def test_a_job_by_its_id_by_a_beginning_and_the_latest(desk: JobBackend) -> None:
    first, second = (desk.submit(FIELDS, 0) for _ in range(2))
    assert desk.job(first.id) == first
    assert desk.job(first.id[:-1]) == first
    assert desk.job(None) == second
    with pytest.raises(LookupError, match=f"is a prefix of several job ids .*{first.id[:8]}.*; give a longer prefix"):
        desk.job(first.id[:8])


@pytest.mark.prove
def test_an_unknown_job(desk: JobBackend) -> None:
    desk.submit(FIELDS, 0)
    calls = (
        desk.job, desk.clone, desk.best, lambda job: desk.ask(job, Ask.CANCEL), lambda job: list(desk.trials(job)),
        lambda job: list(desk.events(job)), lambda job: desk.export(job, "json"), lambda job: desk.extend(job, 3, None),
    )  # fmt: skip
    for job, call in itertools.product((UNKNOWN, "2030", "nobody", "", "../x", "99999999-999999-zzzz"), calls):
        with pytest.raises(LookupError, match="there is no job"):
            call(job)


def test_there_is_no_job_yet(desk: JobBackend) -> None:
    with pytest.raises(LookupError, match=r"there is no job yet.*; .*`autotune s"):
        desk.job(None)


def test_jobs(desk: JobBackend) -> None:
    jobs = [desk.submit(FIELDS, 0) for _ in range(3)][::-1]
    paused = desk.ask(jobs[1].id, Ask.PAUSE)
    ids = lambda found: [job.id for job in found]  # noqa: E731  of a service, lists have summaries
    assert ids(desk.jobs(ANY_JOB, 50)) == ids([jobs[0], paused, jobs[2]])
    assert ids(desk.jobs(ANY_JOB, 2)) == ids([jobs[0], paused])
    assert ids(desk.jobs(JobFilter(states=(JobState.PAUSED, JobState.FAILED)), 50)) == [paused.id]
    assert list(desk.jobs(JobFilter(submitter="nobody"), 50)) == []
    assert ids(desk.jobs(JobFilter(text=f"{paused.id} PAUSED"), 50)) == [paused.id]


@pytest.mark.prove
def test_asking(desk: JobBackend) -> None:
    job = desk.submit(FIELDS, 0)
    states = [desk.ask(job.id[:-1], wanted).state for wanted in (Ask.PAUSE, Ask.PAUSE, Ask.RESUME, Ask.STOP, Ask.STOP)]
    assert states == [JobState.PAUSED, JobState.PAUSED, JobState.QUEUED, JobState.SUCCEEDED, JobState.SUCCEEDED]
    desk.ask(job.id, Ask.RESUME)
    desk.ask(job.id, Ask.CANCEL)
    with pytest.raises(ValueError, match="is CANCELLED, so that it cannot resume; only a paused, failed or succeeded job"):
        desk.ask(job.id, Ask.RESUME)
    assert desk.ask(desk.clone(job.id).id, Ask.CANCEL).state is JobState.CANCELLED


def test_a_clone_is_the_same_request(desk: JobBackend, store: Store) -> None:
    job = desk.submit(FIELDS, 7)
    clone = desk.clone(job.id[:-1])
    assert clone.id != job.id
    assert (clone.request, clone.priority) == (job.request, 7)
    assert store.jobs.get(clone.id).queued is not None


def test_a_budget_is_extended(desk: JobBackend) -> None:
    job = desk.submit(FIELDS, 0)
    changed = desk.extend(job.id, 9, None)
    assert (changed.request["trials"], changed.request["max_seconds"]) == (9, 60.0)
    assert desk.extend(job.id[:-1], 9, 90.5).request["max_seconds"] == 90.5
    desk.ask(job.id, Ask.CANCEL)
    with pytest.raises(ValueError, match=r"has ended.*; resume it with a larger budget, or clone it"):
        desk.extend(job.id, 10, None)


@pytest.mark.prove
def test_trials_and_the_best(desk: JobBackend, store: Store) -> None:
    job = desk.submit(FIELDS, 0)
    assert list(desk.trials(job.id)) == []
    for call in (desk.best, lambda job: desk.export(job, "json")):
        with pytest.raises(NoBestError, match="has no configuration that may win; raise the memory limit"):
            call(job.id)
    with pytest.raises(UnknownFormatError, match="format: 'nemo' is not known; use one of json, deepspeed"):
        measure(store, job.id, trials=3)
        desk.export(job.id, "nemo")
    trials = list(desk.trials(job.id))
    kept = store.trials.of(job.id)
    assert [trial.number for trial in trials] == [0, 1, 2]
    assert [trial.config for trial in trials] == [trial.config for trial in kept]
    assert {trial.outcome for trial in trials} == {Outcome.OK}
    assert trials[2].result is not None
    assert kept[2].result is not None
    assert trials[2].result.samples_per_second == kept[2].result.samples_per_second
    assert (trials[2].started, trials[2].counted) == (kept[2].started, True)
    assert [(trial.number, trial.config) for trial in desk.trials(job.id[:-1], 2)] == [(2, trials[2].config)]
    best = desk.best(None)
    assert best["best"]["trial"] == best["decision"]["trial"]
    exported = json.loads(desk.export(job.id, "json").text)
    assert (exported["best"], exported["job"]) == (best["best"], best["job"])  # the provenance tells the time of each
    deepspeed = desk.export(job.id[:-1], "deepspeed")
    assert json.loads(deepspeed.text)["zero_optimization"]["stage"] == best["best"]["config"]["zero_stage"]


@pytest.mark.nightly
def test_the_explanation_and_the_report(desk: JobBackend, store: Store) -> None:
    """Of the job that is named, not of the latest of a database that happens to be here."""
    job = desk.submit(FIELDS, 0)
    with pytest.raises(NoBestError, match=f"{job.id} has no winner to explain"):
        desk.explain(job.id)
    assert job.id in desk.report(job.id, "md")
    measure(store, job.id, trials=3)
    desk.submit(FIELDS, 0)
    told = desk.explain(job.id[:-1])
    assert told == explain(store, job.id)
    assert (told.job, told.measured) == (job.id, 3)
    assert desk.report(job.id, "md") == report_text(store, job.id, "md")
    with pytest.raises((UnknownFormatError, LookupError), match="'pdf' is not known; use html or md"):
        desk.report(job.id, "pdf")
    for call in (desk.explain, lambda unknown: desk.report(unknown, "md")):
        with pytest.raises(LookupError, match="there is no job"):
            call(UNKNOWN)


@pytest.mark.prove
def test_events_to_the_end(desk: JobBackend, store: Store) -> None:
    job = desk.submit(FIELDS, 0)
    lease = store.queue.claim(current_owner())
    assert lease is not None

    def work() -> None:
        for number in range(20):
            store.events.add(lease, "note", {"number": number})
            time.sleep(0.01)
        store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "done")

    worker = threading.Thread(target=work)
    events = desk.events(job.id[:-1])
    found = [*itertools.islice(events, 2)]
    worker.start()
    found += events
    worker.join()
    assert found == store.events.of(job.id)
    assert [event.sequence for event in found] == list(range(1, 24))
    assert list(desk.events(None, 20)) == found[20:]


def test_what_only_a_database_takes(desk: JobBackend, store: Store, tmp_path: Path) -> None:
    fields = FIELDS | {"data_path": str(tmp_path)}
    if not desk.words:
        pytest.skip("looked at below")
    if desk.words[0] == "--url":
        with pytest.raises(
            RequestError, match="data_path: is determined by the service; leave it out, or submit to a database"
        ):
            desk.submit(fields, 0)
    else:
        assert store.jobs.get(desk.submit(fields, 0).id).request["data_path"] == str(tmp_path)


class TestWhichOne:
    """An option wins, then AUTOTUNE_URL, then AUTOTUNE_DB, then the file in the data folder."""

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "jobs.db"))
        monkeypatch.setenv("AUTOTUNE_URL", "http://127.0.0.1:1")

    def kind(self, url: str | None = None, database: str | None = None) -> tuple[str, tuple[str, ...]]:
        with open_backend(url, database) as desk:
            return type(desk).__name__, desk.words

    def test_an_option_wins(self, tmp_path: Path) -> None:
        other = str(tmp_path / "other.db")
        assert self.kind(database=other) == ("DatabaseBackend", ("--db", other))
        assert self.kind(url="http://127.0.0.1:2") == ("ServiceBackend", ("--url", "http://127.0.0.1:2"))

    def test_the_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert self.kind() == ("ServiceBackend", ())
        monkeypatch.setenv("AUTOTUNE_URL", "")
        assert self.kind() == ("DatabaseBackend", ())
        assert (tmp_path / "jobs.db").exists()

    def test_both_options(self) -> None:
        with pytest.raises(RequestError, match="url: and --db are both given; give the one that has the job"):
            self.kind(url="http://127.0.0.1:2", database="x")

    def test_no_address(self) -> None:
        with pytest.raises(RequestError, match="url: '' is no address of a service; give one such as"):
            self.kind(url="")
