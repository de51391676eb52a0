"""The interface of trackers, and what they write."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from search_spaces.knob import Value
from search_spaces.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedJob:
    """A job, as trackers write it."""

    id: str
    name: str
    """The job's name, else its model's."""
    config: Mapping[str, Value]
    """What all its trials share: model, cluster, ranks, engine, global_batch_size, sequence_length, space, strategy, …"""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedTrial:
    """A trial with its outcome: one run."""

    number: int
    """Unique in the job."""
    purpose: str
    outcome: Outcome
    message: str
    """The reason for the outcome, in one line; may be empty."""
    config: Mapping[str, Value]
    """Every knob and its value."""
    figures: Mapping[str, float]
    """Single values: samples_per_second with low and high, peak_memory_bytes, memory by tag, tflops_per_device, mfu, seconds, …
    Only what was measured."""
    curves: Mapping[str, Sequence[float]]
    """Values by step (step_seconds, loss, gradient_norm) or, if the name begins with `rank_`, by rank."""
    started: datetime
    finished: datetime

    @property
    def name(self) -> str:
        """The name of its run."""
        return f"trial {self.number}"

    @property
    def is_error(self) -> bool:
        """Whether a tracker marks the run as failed. Other outcomes are results of a search, such as not fitting in memory."""
        return self.outcome in (Outcome.FAILED, Outcome.WRONG, Outcome.TIMEOUT, Outcome.LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedSummary:
    """The table at the end of a job."""

    state: str
    reason: str
    message: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value | None, ...], ...]
    """A row for each trial with an outcome, by number."""
    figures: Mapping[str, float]
    """best_trial, best_samples_per_second, gain and others of the answer; empty: there is none."""

    def markdown(self) -> str:
        """The table in Markdown, for trackers without tables."""
        lines = (self.columns, ("---",) * len(self.columns), *self.rows)
        return "".join(f"| {' | '.join(_cell(value) for value in line)} |\n" for line in lines)


def _cell(value: Value | None) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


class Tracker(ABC):
    """Writes one job to an experiment tracker: a run for each trial, and a summary.

    - A factory in the group `autotune.trackers` makes it: called with the `TrackedJob`, it returns the tracker.
    - Threads: it is made and called in one thread, which is not that of the loop. So methods may wait for a server, and the
      sweep does not.
    - Errors: any exception, from the factory too, ends the tracking of this job with one warning. The sweep continues.
    - Order: `recorded_trials` once; `log_trial` for each trial in the order in which they end; `log_summary` when the job has
      ended or is paused; `close` last, after an error too.
    - Resumption: a job may be run by several processes, one after the other. Runs are identified by the job's id and the
      trial's number; `log_trial` is not called for numbers that `recorded_trials` returned. `log_summary` replaces the
      summary of an earlier process. A process may be killed at any time: a run that was not completed is not recorded, and
      `log_trial` replaces it.
    - Settings come from the environment variables of the tracker's library.
    """

    @abstractmethod
    def recorded_trials(self) -> Collection[int]:
        """The numbers of the job's trials whose runs are complete."""

    @abstractmethod
    def log_trial(self, trial: TrackedTrial) -> None:
        """Write a run for the trial."""

    @abstractmethod
    def log_summary(self, summary: TrackedSummary) -> None:
        """Write the summary, as a run or as part of a run for the job."""

    def close(self) -> None:  # noqa: B027  trackers without open connections need not override it
        """Release everything."""
