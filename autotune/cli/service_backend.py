"""Access to jobs of a service."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.cli.backend import JobBackend, JobProgress, standing_of
from autotune.client import Client, Job, JobSummary, NotFoundError, ServiceError, Trial
from autotune.client.fields import SUBMISSION
from autotune.errors import NoBestError, RequestError, UnknownFormatError
from autotune.explain.findings import Explanation
from autotune.frameworks.export import Export
from search_spaces.models.huggingface import is_factory_reference
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.plain import from_plain, to_plain
from search_spaces.preset_files import preset_tables
from search_spaces.shared_records import AttemptProgress, JobEvent, LogPart
from search_spaces.trial import TrialResult
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import LATEST, Ask, JobFilter, JobRecord, TrialRecord

NEWER = "use the `autotune` of the service's version"


class ServiceBackend(JobBackend):
    """See `JobBackend`."""

    _WHOLE_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[a-z0-9]{4}")

    def __init__(self, url: str, words: tuple[str, ...] = ()) -> None:
        self.words = words
        self._client = Client(url)

    def submit(self, fields: Mapping[str, Any], priority: int) -> JobRecord:
        """The model's config file is sent along; other files cannot be sent."""
        further = dict(fields)
        model = further.pop("model", None)
        if model is None and "command" not in further:
            raise RequestError("model", "is missing", "give a preset, a config.json or module:factory")
        for name in further:
            if name not in SUBMISSION:
                raise RequestError(name, "is determined by the service", "leave it out, or submit to a database (--db)")
        return _job(self._client.submit(None if model is None else _named(model), **further, priority=priority))

    def job(self, job: str | None) -> JobRecord:
        return _job(self._found(job))

    def jobs(self, having: JobFilter, limit: int) -> Iterator[JobRecord]:
        summaries = self._client.jobs(
            state=[*having.states], submitter=having.submitter, limit=limit, tag=[*having.tags], text=having.text or None
        )
        return map(_job, summaries)

    def standings(self, jobs: Sequence[JobRecord]) -> list[JobProgress]:
        # Maximum jobs per overview request.
        overviews = 200
        pages = [jobs[first : first + overviews] for first in range(0, len(jobs), overviews)]
        overviews_of = [overview for page in pages for overview in self._client.overviews([job.id for job in page])]
        return [standing_of(job, item.searched, item.waiting) for job, item in zip(jobs, overviews_of, strict=True)]

    def ask(self, job: str, request: Ask, budget: Mapping[str, Any] | None = None) -> JobRecord:
        client = self._client
        if request is Ask.RESUME:
            return _job(client.resume(self._id(job), **(budget or {})))
        calls = {Ask.PAUSE: client.pause, Ask.STOP: client.stop, Ask.CANCEL: client.cancel}
        return _job(calls[request](self._id(job)))

    def label(self, job: str, labels: Mapping[str, Any]) -> JobRecord:
        return _job(self._client.label(self._id(job), **labels))

    def share(self, job: str, days: int) -> str:
        job_id = self._id(job)
        return f"{self._client.url}/#/jobs/{job_id}?link={self._client.share(job_id, days=days).token}"

    def clone(self, job: str) -> JobRecord:
        return _job(self._client.clone(self._id(job)))

    def extend(self, job: str, trials: int | None, max_seconds: float | None) -> JobRecord:
        return _job(self._client.extend(self._id(job), trials=trials, max_seconds=max_seconds))

    def trials(self, job: str | None, first: int = 0) -> Iterator[TrialRecord]:
        job_id = self._id(job)
        return (_trial(job_id, trial) for trial in self._client.trials(job_id, first=first))

    def events(self, job: str | None, after: int = 0) -> Iterator[JobEvent]:
        return self._client.events(self._id(job), after)

    def live(self, job: str | None) -> Iterator[JobEvent | AttemptProgress]:
        return self._client.live(self._id(job))

    def progress(self, job: str | None) -> list[AttemptProgress]:
        return [*self._client.progress(self._id(job))]

    def logs(self, job: str | None, trial: int, attempt: int | None = None, rank: int | None = None) -> Iterator[LogPart]:
        return self._client.logs(self._id(job), trial, attempt=attempt, rank=rank)

    def follow_logs(
        self, job: str | None, trial: int, after: int, attempt: int | None = None, rank: int | None = None
    ) -> Iterator[LogPart]:
        return self._client.logs(self._id(job), trial, attempt=attempt, rank=rank, after=after, follow=True)

    def best(self, job: str | None) -> dict[str, Any]:
        try:
            return self._client.best(self._id(job))
        except NotFoundError as error:
            raise _translated(error) from error

    def export(self, job: str | None, format_name: str) -> Export:
        try:
            exported = self._client.export(self._id(job), format_name)
        except NotFoundError as error:
            raise _translated(error) from error
        return Export(text=exported.text, notes=(exported.note,) if exported.note else ())

    def explain(self, job: str | None) -> Explanation:
        job_id = self._id(job)
        try:
            return from_plain(Explanation, self._client.explanation(job_id))
        except NotFoundError as error:
            raise _translated(error) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ServiceError(f"explanation: of job {job_id} cannot be read ({error}); {NEWER}") from error

    def report(self, job: str | None, format_name: str) -> str:
        return self._client.report(self._id(job), format_name)

    def close(self) -> None:
        self._client.close()

    def _id(self, job: str | None) -> str:
        return job if job is not None and self._WHOLE_ID.fullmatch(job) else self._found(job).id

    def _found(self, job: str | None) -> Job:
        """The job. A service accepts only whole ids, so a prefix is searched in the list of jobs."""
        if job in (None, LATEST):
            newest = next(self._client.jobs(limit=1), None)
            if newest is None:
                raise NotFoundError(f"there is no job yet at {self._client.url}; submit one with `autotune submit`")
            return self._client.job(newest.id)
        if self._WHOLE_ID.fullmatch(job):
            return self._client.job(job)
        fitting = self._fitting(job) if job else []
        if len(fitting) > 1:
            raise NotFoundError(
                f"{job!r} is a prefix of several job ids ({fitting[0].id}, {fitting[1].id}, …); give a longer prefix"
            )
        if not fitting:
            raise NotFoundError(f"there is no job {job!r} at {self._client.url}; list them with `autotune jobs`")
        return self._client.job(fitting[0].id)

    def _fitting(self, prefix: str) -> list[JobSummary]:
        """Up to two jobs whose ids have this prefix. Ids begin with the opening time, so older jobs need not be searched."""
        matches: list[JobSummary] = []
        timed = min(len(prefix), 15)  # characters of an id that encode the opening time
        for job in self._client.jobs():
            if job.id.startswith(prefix):
                matches.append(job)
            if len(matches) == 2 or job.id[:timed] < prefix[:timed]:
                break
        return matches


def _named(model: str) -> str | Path:
    """The model in the client's form: an existing path that is not a preset becomes a Path."""
    if model in preset_tables("models") or is_factory_reference(model):
        return model
    return Path(model) if Path(model).expanduser().exists() else model


def _translated(error: NotFoundError) -> Exception:
    for problem in error.problems:
        kind = {"job": NoBestError, "format": UnknownFormatError}.get(problem.field)
        if kind is not None:
            return kind(problem.field, problem.message, problem.remedy or "")
    return error


def _job(job: JobSummary) -> JobRecord:
    request = job.request
    if isinstance(job, Job):
        assumed = [{**to_plain(item), "alternatives": ()} for item in job.assumed]
        request = {**request, "resolved_assumed": assumed}
    try:
        state = JobState(job.state)
    except ValueError:
        raise ServiceError(f"state: {job.state!r} of job {job.id} is not known here; {NEWER}") from None
    return JobRecord(
        id=job.id, created=job.created, updated=job.updated, state=state, reason=job.reason, message=job.message,
        request=request, reference_losses={}, active_seconds=job.active_seconds, owner=None, submitter=job.submitter,
        priority=job.priority, version=job.version, answer=None if job.answer is None else to_plain(job.answer),
    )  # fmt: skip


def _trial(job_id: str, trial: Trial) -> TrialRecord:
    try:
        knob_names = KNOB_NAMES
        config = TrialConfig().replace({name: value for name, value in trial.config.items() if name in knob_names})
        return TrialRecord(
            job_id=job_id,
            number=trial.number,
            config=config,
            config_hash=config.hash,
            purpose=Purpose(trial.purpose),
            fidelity=trial.fidelity,
            repeat=trial.repeat,
            counted=trial.counted,
            outcome=None if trial.outcome is None else Outcome(trial.outcome),
            result=None if trial.result is None else from_plain(TrialResult, {"attempt": "", **trial.result}),
            attempts=trial.attempts,
            created=trial.created,
            started=trial.started,
            finished=trial.finished,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ServiceError(f"trial: {trial.number} of job {job_id} cannot be read ({error}); {NEWER}") from error
