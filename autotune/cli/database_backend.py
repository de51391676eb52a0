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
from autotune.outcome.waiting import waiting_text
from autotune.reports.report import report_text
from autotune.request.checks import checked_labels
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import require_workload, resolve, session_of
from search_spaces.shared_records import AttemptProgress, JobEvent, LogPart
from storage.address import default_database_url
from storage.records import ENDED, Ask, JobFilter, JobRecord, Submission, TrialRecord
from storage.store import open_store


class DatabaseBackend(JobBackend):
    """See `JobBackend`."""

    _PAGE = 500

    _POLL_SECONDS = 0.2

    runs_jobs = True

    def __init__(self, database: str | None, words: tuple[str, ...] = ()) -> None:
        self.words = words
        self._store = open_store(database or default_database_url())

    def submit(self, fields: Mapping[str, Any], priority: int) -> JobRecord:
        """This machine need not be able to run it: a worker does."""
        request_fields = with_import_folders({**fields})
        for name in ("data_path", "nvme_path"):
            if path := request_fields.get(name):
                request_fields[name] = str(Path(path).expanduser().absolute())
        request = request_from_fields(request_fields)
        session = resolve(request)
        require_workload(request, session)
        return self._store.queue.submit(request_to_row(session.request), Submission(priority=priority))[0]

    def job(self, job: str | None) -> JobRecord:
        return self._store.jobs.get(job)

    def jobs(self, having: JobFilter, limit: int) -> Iterator[JobRecord]:
        return iter(self._store.jobs.newest(limit, having=having))

    def standings(self, jobs: Sequence[JobRecord]) -> list[JobProgress]:
        overviews = self._store.overviews.of([job.id for job in jobs])
        workers = self._store.workers.alive()
        return [standing_of(job, overviews[job.id].searched, waiting_text(job, workers)) for job in jobs]

    def ask(self, job: str, request: Ask, budget: Mapping[str, Any] | None = None) -> JobRecord:
        return self._store.queue.ask(self._store.jobs.get(job).id, request, budget)

    def label(self, job: str, labels: Mapping[str, Any]) -> JobRecord:
        record = self._store.jobs.get(job)
        return self._store.queue.change_request(record.id, None, checked_labels(labels))

    def clone(self, job: str) -> JobRecord:
        original = self._store.jobs.get(job)
        return self._store.queue.submit(original.request, Submission(priority=original.priority, devices=original.devices))[0]

    def extend(self, job: str, trials: int | None, max_seconds: float | None) -> JobRecord:
        record = self._store.jobs.get(job)
        if record.state in ENDED:
            raise RequestError("job", f"{record.id} has ended ({record.state})", "resume it with a larger budget, or clone it")
        budget = {"trials": trials, "max_seconds": max_seconds}
        changes = {name: value for name, value in budget.items() if value is not None}
        return self._store.queue.change_request(record.id, None, changes)

    def trials(self, job: str | None, first: int = 0) -> Iterator[TrialRecord]:
        job_id = self._store.jobs.get(job).id
        while page := self._store.trials.of(job_id, first, self._PAGE):
            yield from page
            first = page[-1].number + 1

    def events(self, job: str | None, after: int = 0) -> Iterator[JobEvent]:
        return (update for update in self._updates(job, after) if isinstance(update, JobEvent))

    def live(self, job: str | None) -> Iterator[JobEvent | AttemptProgress]:
        return self._updates(job, 0, progress=True)

    def progress(self, job: str | None) -> list[AttemptProgress]:
        job_id = self._store.jobs.get(job).id
        return self._store.logs.progress([job_id])[job_id]

    def logs(self, job: str | None, trial: int, attempt: int | None = None, rank: int | None = None) -> Iterator[LogPart]:
        job_id, after = self._store.jobs.get(job).id, 0
        while parts := self._store.logs.of(job_id, trial, after, self._PAGE, attempt, rank):
            yield from parts
            after = parts[-1].sequence

    def follow_logs(
        self, job: str | None, trial: int, after: int, attempt: int | None = None, rank: int | None = None
    ) -> Iterator[LogPart]:
        of = (self._store.jobs.get(job).id, trial)
        while (news := self._store.logs.news({of: after}, self._PAGE).get(of)) is not None:
            yield from (part for part in news.parts if attempt in (None, part.attempt) and rank in (None, part.rank))
            if news.over:
                return
            if news.parts:
                after = news.parts[-1].sequence
            else:
                time.sleep(self._POLL_SECONDS)

    def best(self, job: str | None) -> dict[str, Any]:
        snapshot = read_snapshot(self._store, self._store.jobs.get(job).id)
        return build_best_config(session_of(snapshot.job), snapshot)

    def export(self, job: str | None, format_name: str) -> Export:
        make = exporter(format_name)
        return make(self.best(job))

    def explain(self, job: str | None) -> Explanation:
        return explain(self._store, self._store.jobs.get(job).id)

    def report(self, job: str | None, format_name: str) -> str:
        return report_text(self._store, job, format_name)

    def close(self) -> None:
        self._store.close()

    def _updates(self, job: str | None, after: int, progress: bool = False) -> Iterator[JobEvent | AttemptProgress]:
        job_id = self._store.jobs.get(job).id
        reported: Collection[AttemptProgress] = ()
        while True:
            events = self._store.events.of(job_id, after, self._PAGE)
            yield from events
            if events:
                after = events[-1].sequence
                continue
            now = self._store.logs.progress([job_id])[job_id] if progress else ()
            yield from (update for update in now if update not in reported)
            reported = now
            record = self._store.jobs.get(job_id)
            if record.state in ENDED and record.version <= after:
                return
            time.sleep(self._POLL_SECONDS)
