"""Access to jobs in a database, without a service."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.cli.backend import JobBackend, JobProgress, standing_of
from autotune.cli.fields import with_import_folders
from autotune.errors import RequestError
from autotune.explain.explain import explain
from autotune.explain.findings import Explanation
from autotune.frameworks.exporters import Export, exporter
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.reports.report import report_text
from autotune.request.checks import checked_labels
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import resolve, session_of
from storage.address import default_database_url
from storage.log_records import LogRecord, ProgressRecord
from storage.records import ENDED, Ask, EventRecord, JobFilter, JobRecord, Submission, TrialRecord
from storage.store import open_store

POLL_SECONDS = 0.2
PAGE = 500


class DatabaseBackend(JobBackend):
    """See `JobBackend`."""

    runs_jobs = True

    def __init__(self, database: str | None, words: tuple[str, ...] = ()) -> None:
        self.words = words
        self._store = open_store(database or default_database_url())

    def submit(self, fields: Mapping[str, Any], priority: int) -> JobRecord:
        """See `JobBackend.submit`. This machine need not be able to run it: a worker does."""
        request_fields = with_import_folders({**fields})
        for name in ("data_path", "nvme_path"):
            if path := request_fields.get(name):
                request_fields[name] = str(Path(path).expanduser().absolute())
        session = resolve(request_from_fields(request_fields))
        return self._store.submit(request_to_row(session.request), Submission(priority=priority))[0]

    def job(self, job: str | None) -> JobRecord:
        """See `JobBackend.job`."""
        return self._store.job(job)

    def jobs(self, having: JobFilter, limit: int) -> Iterator[JobRecord]:
        """See `JobBackend.jobs`."""
        return iter(self._store.jobs(limit, having=having))

    def standings(self, jobs: Sequence[JobRecord]) -> list[JobProgress]:
        """See `JobBackend.standings`."""
        overviews = self._store.overviews([job.id for job in jobs])
        return [standing_of(job, overviews[job.id].searched) for job in jobs]

    def ask(self, job: str, request: Ask, budget: Mapping[str, Any] | None = None) -> JobRecord:
        """See `JobBackend.ask`."""
        return self._store.ask(self._store.job(job).id, request, budget)

    def label(self, job: str, labels: Mapping[str, Any]) -> JobRecord:
        """See `JobBackend.label`."""
        record = self._store.job(job)
        return self._store.change_request(record.id, None, checked_labels(labels))

    def clone(self, job: str) -> JobRecord:
        """See `JobBackend.clone`."""
        original = self._store.job(job)
        return self._store.submit(original.request, Submission(priority=original.priority, devices=original.devices))[0]

    def extend(self, job: str, trials: int | None, max_seconds: float | None) -> JobRecord:
        """See `JobBackend.extend`."""
        record = self._store.job(job)
        if record.state in ENDED:
            raise RequestError("job", f"{record.id} has ended ({record.state})", "resume it with a larger budget, or clone it")
        budget = {"trials": trials, "max_seconds": max_seconds}
        changes = {name: value for name, value in budget.items() if value is not None}
        return self._store.change_request(record.id, None, changes)

    def trials(self, job: str | None, first: int = 0) -> Iterator[TrialRecord]:
        """See `JobBackend.trials`."""
        job_id = self._store.job(job).id
        while page := self._store.trial_page(job_id, first, PAGE):
            yield from page
            first = page[-1].number + 1

    def events(self, job: str | None, after: int = 0) -> Iterator[EventRecord]:
        """See `JobBackend.events`."""
        return (update for update in self._updates(job, after) if isinstance(update, EventRecord))

    def live(self, job: str | None) -> Iterator[EventRecord | ProgressRecord]:
        """See `JobBackend.live`."""
        return self._updates(job, 0, progress=True)

    def progress(self, job: str | None) -> list[ProgressRecord]:
        """See `JobBackend.progress`."""
        job_id = self._store.job(job).id
        return self._store.progress([job_id])[job_id]

    def logs(self, job: str | None, trial: int, attempt: int | None = None, rank: int | None = None) -> Iterator[LogRecord]:
        """See `JobBackend.logs`."""
        job_id, after = self._store.job(job).id, 0
        while parts := self._store.logs(job_id, trial, after, PAGE, attempt, rank):
            yield from parts
            after = parts[-1].sequence

    def follow_logs(
        self, job: str | None, trial: int, after: int, attempt: int | None = None, rank: int | None = None
    ) -> Iterator[LogRecord]:
        """See `JobBackend.follow_logs`."""
        of = (self._store.job(job).id, trial)
        while (news := self._store.log_news({of: after}, PAGE).get(of)) is not None:
            yield from (part for part in news.parts if attempt in (None, part.attempt) and rank in (None, part.rank))
            if news.over:
                return
            if news.parts:
                after = news.parts[-1].sequence
            else:
                time.sleep(POLL_SECONDS)

    def best(self, job: str | None) -> dict[str, Any]:
        """See `JobBackend.best`."""
        snapshot = read_snapshot(self._store, self._store.job(job).id)
        return build_best_config(session_of(snapshot.job), snapshot)

    def export(self, job: str | None, format_name: str) -> Export:
        """See `JobBackend.export`."""
        make = exporter(format_name)
        return make(self.best(job))

    def explain(self, job: str | None) -> Explanation:
        """See `JobBackend.explain`."""
        return explain(self._store, self._store.job(job).id)

    def report(self, job: str | None, format_name: str) -> str:
        """See `JobBackend.report`."""
        return report_text(self._store, job, format_name)

    def close(self) -> None:
        """See `JobBackend.close`."""
        self._store.close()

    def _updates(self, job: str | None, after: int, progress: bool = False) -> Iterator[EventRecord | ProgressRecord]:
        job_id = self._store.job(job).id
        reported: Collection[ProgressRecord] = ()
        while True:
            events = self._store.events(job_id, after, PAGE)
            yield from events
            if events:
                after = events[-1].sequence
                continue
            now = self._store.progress([job_id])[job_id] if progress else ()
            yield from (update for update in now if update not in reported)
            reported = now
            record = self._store.job(job_id)
            if record.state in ENDED and record.version <= after:
                return
            time.sleep(POLL_SECONDS)
