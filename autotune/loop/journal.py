"""Logs and traces of a worker, for its operators: log lines and a span for each job and each of its trials."""

import logging
from types import TracebackType

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from autotune.loop.listener import LoopListener
from autotune.outcome.job_snapshot import JobSnapshot
from search_spaces.outcome import JobState, Outcome
from storage.records import TrialRecord

log = logging.getLogger(__name__)


class Journal(LoopListener):
    """Logs and traces one run of a job. As a context manager, it ends the open spans on exit."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._tracer = trace.get_tracer("autotune")
        self._job: Span = self._tracer.start_span("job", attributes={"autotune.job.id": job_id})
        self._trials: dict[int, Span] = {}

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for span in (*self._trials.values(), self._job):
            if error is not None:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            span.end()

    def on_state(self, state: JobState, message: str, snapshot: JobSnapshot) -> None:
        log.info("job %s: %s%s", self._job_id, state, f": {message}" if message else "", extra={"job": self._job_id})
        self._job.set_attributes(
            {"autotune.job.state": state, "autotune.job.model": str(snapshot.job.request.get("model", ""))}
        )

    def on_news(self, news: str) -> None:
        log.warning("job %s: %s", self._job_id, news, extra={"job": self._job_id})

    def on_start(self, trial: TrialRecord) -> None:
        attributes: dict[str, str | int] = {
            "autotune.job.id": self._job_id,
            "autotune.trial.number": trial.number,
            "autotune.trial.purpose": trial.purpose.value,
            "autotune.trial.config": trial.config.hash,
        }
        parent = trace.set_span_in_context(self._job)
        self._trials[trial.number] = self._tracer.start_span("trial", parent, attributes=attributes)

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:  # noqa: ARG002
        about = {"job": self._job_id, "trial": trial.number}
        log.info("job %s: trial %d: %s", self._job_id, trial.number, trial.outcome, extra=about)
        span = self._trials.pop(trial.number, None)
        if span is not None:
            span.set_attribute("autotune.trial.outcome", str(trial.outcome))
            if trial.outcome in (Outcome.FAILED, Outcome.LOST, Outcome.TIMEOUT, Outcome.WRONG):
                span.set_status(Status(StatusCode.ERROR, str(trial.outcome)))
            span.end()
