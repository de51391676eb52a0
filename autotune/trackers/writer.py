"""Trackers by name, and the thread in which one writes a job's records, so that the sweep never waits for it."""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from typing import Any

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.request.component_names import require_installed
from autotune.session.session import Session
from autotune.trackers.tracker import TrackedJob, TrackedSummary, TrackedTrial, Tracker
from search_spaces.knob import Value
from search_spaces.plugins import PluginGroup, load_plugin
from search_spaces.trial import RankMeasurement, TrialResult
from storage.records import JobRecord, TrialRecord

BUILT_IN = {
    "wandb": "autotune.trackers.wandb_tracker:WandbTracker",
    "mlflow": "autotune.trackers.mlflow_tracker:MlflowTracker",
    "tensorboard": "autotune.trackers.tensorboard_tracker:TensorboardTracker",
}
"""Name -> module:attribute of the factory."""


def open_tracker(name: str, job: TrackedJob) -> Tracker:
    """Make the tracker of that name. Raises what `require_installed` and the tracker's library raise."""
    require_installed((name,))
    make: Callable[[TrackedJob], Tracker]
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        make = getattr(import_module(module), attribute)
    else:
        make = load_plugin(PluginGroup.TRACKERS, name)
    return make(job)


MOST_WAITING = 1_000
"""Trials that may wait for a slow tracker; it is left out when there are more."""
SILENT_SECONDS = 30.0
"""At the end of a job, how long a tracker may take for one write before it is left out."""

log = logging.getLogger(__name__)


class TrackerWriter:
    """Writes a job to one tracker, in a thread of its own.

    1. The thread makes the tracker, asks it which trials it has, and writes the others that ended before this process.
    2. It writes the trials that `add` receives, and the summary that `end` receives, in order.
    3. An exception or a tracker that is too slow ends the thread's work. The user gets one warning, and no further one.
    """

    def __init__(self, name: str, session: Session, snapshot: JobSnapshot) -> None:
        """
        Args:
            name: the tracker.
            session: of the job.
            snapshot: the job as it begins in this process.
        """
        self._name, self._session, self._snapshot = name, session, snapshot
        self._waiting: queue.Queue[TrialRecord | JobSnapshot | None] = queue.Queue(MOST_WAITING)
        self._left_out = threading.Event()
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def add(self, trial: TrialRecord) -> None:
        """Write a trial that has its outcome. Returns at once."""
        self._put(trial)

    def end(self, snapshot: JobSnapshot) -> None:
        """Write the summary. Returns at once."""
        self._put(snapshot)

    def close(self) -> None:
        """Wait until everything is written, but no longer than the limits of this module."""
        self._put(None)
        began = self._moved = time.monotonic()
        while self._thread.is_alive() and not self._left_out.is_set():
            self._thread.join(0.05)
            now = time.monotonic()
            if now - self._moved > SILENT_SECONDS or now - began > 120.0:
                self._leave_out("it does not answer")

    def _put(self, item: TrialRecord | JobSnapshot | None) -> None:
        if self._left_out.is_set():
            return
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._leave_out(f"{MOST_WAITING:,} trials wait for it")

    def _leave_out(self, reason: str, error: BaseException | None = None) -> None:
        if not self._left_out.is_set():
            self._left_out.set()
            log.warning("tracker %s: %s; it is left out, and the sweep is not affected", self._name, reason)
            log.debug("tracker %s", self._name, exc_info=error)

    def _run(self) -> None:
        try:
            tracker = open_tracker(self._name, tracked_job(self._session, self._snapshot.job))
            with contextlib.closing(tracker):
                written = set(tracker.recorded_trials())
                before = [trial for trial in self._snapshot.trials if trial.outcome is not None]
                waiting: TrialRecord | JobSnapshot | None
                for trial in before:
                    if trial.number not in written and not self._left_out.is_set():
                        tracker.log_trial(tracked_trial(self._snapshot.whole(trial)))
                        written.add(trial.number)
                        self._moved = time.monotonic()
                while not self._left_out.is_set() and (waiting := self._waiting.get()) is not None:
                    if isinstance(waiting, JobSnapshot):
                        tracker.log_summary(job_summary(waiting))
                    elif waiting.number not in written:
                        tracker.log_trial(tracked_trial(waiting))
                        written.add(waiting.number)
                    self._moved = time.monotonic()
        except Exception as error:
            self._leave_out(_line(error), error)


def _line(error: Exception) -> str:
    """The error in one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}"


def tracked_job(session: Session, job: JobRecord) -> TrackedJob:
    """The job of this session."""
    request = session.request
    return TrackedJob(
        id=job.id,
        name=request.name or session.model.name,
        config={
            "model": session.model.name,
            "cluster": session.cluster.name,
            "ranks": session.world_size,
            **{
                name: _plain(getattr(request, name))
                for name in ("space", "strategy", "objective", "engine", "seed", "global_batch_size", "sequence_length")
            },
        },
        tags=request.tags,
    )


def _plain(value: Value) -> Value:
    """The text of an enumeration, which libraries may not know."""
    return value.value if isinstance(value, StrEnum) else value


def tracked_trial(trial: TrialRecord) -> TrackedTrial:
    """A trial that has its outcome, read with its full result."""
    result = trial.result
    assert trial.outcome is not None and result is not None
    finished = trial.finished or trial.created
    return TrackedTrial(
        number=trial.number,
        purpose=trial.purpose.value,
        outcome=trial.outcome,
        message=result.message,
        config=trial.config.every_value(),
        figures={name: float(value) for name, value in _figures(trial, result) if value is not None and math.isfinite(value)},
        curves={name: values for name, values in _curves(result) if values},
        started=trial.started or finished,
        finished=finished,
    )


def _figures(trial: TrialRecord, result: TrialResult) -> Iterator[tuple[str, float | None]]:
    if result.samples_per_second is not None:
        yield "samples_per_second", result.samples_per_second.mean
        yield "samples_per_second_low", result.samples_per_second.low
        yield "samples_per_second_high", result.samples_per_second.high
    if result.step_seconds:
        yield "mean_step_seconds", sum(result.step_seconds) / len(result.step_seconds)
    yield "peak_memory_bytes", result.peak_memory_bytes
    if result.ranks:
        fullest = max(result.ranks, key=lambda rank: rank.needed_memory_bytes)
        yield from ((f"memory_bytes/{tag}", bytes_) for tag, bytes_ in fullest.memory_by_tag.items())
    for name in ("tflops_per_device", "mfu", "hardware_tflops_per_device", "hfu"):
        yield name, getattr(result, name)
    yield from ((f"phase_seconds/{phase}", seconds) for phase, seconds in result.phase_seconds.items())
    if trial.started is not None and trial.finished is not None:
        yield "seconds", (trial.finished - trial.started).total_seconds()
    yield "attempts", trial.attempts


def _curves(result: TrialResult) -> Iterator[tuple[str, tuple[float, ...]]]:
    yield "step_seconds", result.step_seconds
    yield "loss", result.losses
    yield "gradient_norm", result.gradient_norms
    for name in ("peak_memory_bytes", "reserved_bytes", "compute_seconds_per_step", "wait_seconds_per_step"):
        yield f"rank_{name}", _by_rank(result.ranks, name)


def _by_rank(ranks: tuple[RankMeasurement, ...], name: str) -> tuple[float, ...]:
    values = [getattr(rank, name) for rank in sorted(ranks, key=lambda rank: rank.rank)]
    return () if None in values else tuple(float(value) for value in values)


def job_summary(snapshot: JobSnapshot) -> TrackedSummary:
    """The summary of the job as it is now."""
    ended = [trial for trial in snapshot.trials if trial.outcome is not None]
    configs = [trial.config.every_value() for trial in ended]
    varied = [name for name in (configs[0] if configs else ()) if len({config[name] for config in configs}) > 1]
    return TrackedSummary(
        state=snapshot.job.state.value,
        reason=snapshot.job.reason,
        message=snapshot.job.message,
        columns=(
            "trial",
            "purpose",
            "outcome",
            "samples_per_second",
            "low",
            "high",
            "peak_memory_bytes",
            "seconds",
            "message",
            *varied,
        ),
        rows=tuple((*_row(trial), *(config[name] for name in varied)) for trial, config in zip(ended, configs, strict=True)),
        figures=_answer(snapshot.job.answer or {}),
    )


def _row(trial: TrialRecord) -> tuple[Value | None, ...]:
    result = trial.result
    rate = result.samples_per_second if result is not None else None
    timed = trial.started is not None and trial.finished is not None
    return (
        trial.number,
        trial.purpose.value,
        str(trial.outcome),
        rate.mean if rate is not None else None,
        rate.low if rate is not None else None,
        rate.high if rate is not None else None,
        result.peak_memory_bytes if result is not None else None,
        (trial.finished - trial.started).total_seconds() if timed else None,  # type: ignore[operator]
        result.message if result is not None else "",
    )


def _answer(answer: Mapping[str, Any]) -> dict[str, float]:
    figures: dict[str, float | None] = {"best_trial": answer.get("trial"), "baseline_trial": answer.get("baseline")}
    for name, key in (("best_samples_per_second", "rate"), ("baseline_samples_per_second", "baseline_rate"), ("gain", "gain")):
        interval = answer.get(key) or {}
        figures |= {name: interval.get("mean"), f"{name}_low": interval.get("low"), f"{name}_high": interval.get("high")}
    return {name: float(value) for name, value in figures.items() if value is not None}
