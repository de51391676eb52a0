"""A job, its progress, what it reports, and its answer: which trial wins, and how certain that is.

Intervals have a probability of 95 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from autotune.wire.predictions import AssumedValue, Interval, PlanGoodput
from search_spaces.outcome import JobState
from search_spaces.shared_records import AttemptProgress, JobEvent, LogPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The gain of the answer over the baseline: a ratio with its 95 % interval."""

    of: str
    """samples_per_second, peak_memory_bytes if memory is the objective, or goodput if that is."""
    mean: float
    low: float
    """Lower bound. If the interval includes 1, the gain is unproven."""
    high: float
    """Upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A configuration that may be the answer, or the baseline."""

    trial: int
    """Number of its trial."""
    rate: Interval
    """Samples/s from all measurements of the configuration, shrunk towards the other configurations' rates: the highest of
    many single measurements are partly luck, so they overstate."""
    repeats: int
    """Number of measurements from which the rate is computed; the more, the less it is shrunk."""
    over_baseline: Interval | None
    """The rate divided by the baseline's. None: the baseline was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGoodput:
    """What the answer keeps on nodes that fail, by the closed form on its measured samples/s."""

    ways: tuple[PlanGoodput, ...]
    """The best way to run it, then the best with each other recovery."""
    baseline: PlanGoodput | None
    """The best way to run the baseline. None: it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnresolvedTrial:
    """A trial whose script ended before its steps could be timed, or which failed when it was measured again."""

    trial: int
    rate: Interval | None
    """Samples/s as first measured. None: it was not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a job so far. Configurations are given as trial numbers."""

    keeps_baseline: bool
    """Whether the answer is to keep the baseline, because no tried configuration is known to be better."""
    trial: int
    """The answer."""
    rate: Interval
    """Samples/s of the answer, from all measurements of its configuration."""
    baseline: int | None
    """The baseline. None: it was not measured."""
    baseline_rate: Interval | None
    """Samples/s of the baseline. None: it was not measured."""
    gain: Gain | None
    """The gain of the answer over the baseline. None: the baseline was not measured."""
    runner_up: int | None
    """The second best. None: there is only one contender."""
    runner_up_ratio: Interval | None
    """Samples/s of the runner-up divided by that of the answer. None: there is no runner-up."""
    tie: bool
    """Whether the measurements do not separate the answer and the runner-up."""
    probability_best: float | None
    """Probability that no tried configuration is better than the answer. None: no other was measured, or one is unresolved."""
    expected_loss: float
    """Expected shortfall of the answer's rate, as a share of the rate of the best tried configuration."""
    unresolved: tuple[UnresolvedTrial, ...]
    """Trials whose configurations may be better."""
    not_compared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Outcome -> trials that ran and have no rate to compare (PRUNED: below a bound), which no probability includes."""
    goodput: AnswerGoodput | None = None
    """How to run the answer on nodes that fail. None: the objective is not goodput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Answer):
    """The answer with all configurations that may be the answer."""

    standings: tuple[Standing, ...]
    """Every contender: the answer first, then by rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events in order."""

    items: tuple[JobEvent, ...]
    next: int
    """`after` of the next page, which may still be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressList:
    """The running attempts of a job, by trial."""

    items: tuple[AttemptProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Parts in order."""

    items: tuple[LogPart, ...]
    next: int
    """`after` of the next page, which may still be empty."""


def job_etag(version: int, active_seconds: int) -> str:
    """Return a job's entity tag: its version, and the only field that changes without a new version."""
    return f'"{version}-{active_seconds}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A tuning job in lists, without its whole request."""

    id: str
    state: str
    """A `JobState`: QUEUED, RUNNING, PAUSING, PAUSED, STOPPING, CANCELLING, SUCCEEDED, FAILED or CANCELLED."""
    reason: str
    """Why the job ended, in a word. Empty: it has not ended."""
    message: str
    """Why the job has its state, in a sentence. Lists shorten it."""
    model: str
    """Name of the model, or of the command."""
    submitter: str
    """Owner of the job. Empty: a user of the server's machine or of its database."""
    priority: int
    """Jobs with a higher priority run first."""
    created: datetime
    updated: datetime
    active_seconds: int
    """Seconds for which workers have held the job."""
    version: int
    """Sequence of the job's last event. It grows with every change."""
    answer: Answer | None
    """The answer so far. None: no trial that may win was measured."""
    request: Mapping[str, Any]
    """Field -> value. In lists only model, name, tags, note, team, space, strategy, cluster, ranks, runner, trials and
    max_seconds. For a `Job` the given fields, and the defaults of the others."""

    @property
    def name(self) -> str:
        """The user's name for the job. Empty: it has no name."""
        return str(self.request.get("name") or "")

    @property
    def tags(self) -> tuple[str, ...]:
        """Words by which the job can be found."""
        return tuple(self.request.get("tags") or ())

    @property
    def note(self) -> str:
        """The user's note about the job."""
        return str(self.request.get("note") or "")

    @property
    def ended(self) -> bool:
        """Whether the job has ended. A job that failed or succeeded can be resumed."""
        # States of a job that only change by a user's request.
        return self.state in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def etag(self) -> str:
        """The entity tag. A change with this tag in `If-Match` only applies to this version."""
        return job_etag(self.version, self.active_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobSummary):
    """A tuning job with its whole request."""

    assumed: tuple[AssumedValue, ...]
    """What nobody stated when the job was opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Jobs, newest first."""

    items: tuple[JobSummary, ...]
    next: str | None
    """`cursor` of the next page. None: this is the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The progress of a job."""

    job: str
    """The job's id."""
    version: int
    """The job's version."""
    outcomes: Mapping[str, int]
    """Outcome -> number of trials."""
    searched: int
    """Number of search trials that started and have an outcome: the spent part of the budget."""
    running: int
    """Number of running trials."""
    seconds_left: float | None
    """Upper estimate from the job's pace, with controls and confirmations. None: the job has ended, or no trial has."""
    best_rate: float | None
    """Samples/s of the answer so far. None: no trial that may win was measured."""
    baseline_rate: float | None
    """Samples/s of the baseline. None: it was not measured."""
    gain: Gain | None
    """The gain of the answer over the baseline. None: one of them was not measured."""
    keeps_baseline: bool
    """Whether the answer so far is to keep the baseline."""
    waiting: str = ""
    """Why a queued job has not started: no worker runs, none has its devices, or all are busy. Empty: it is not queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewList:
    """Jobs in the requested order."""

    items: tuple[Overview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderboardEntry:
    """The fastest answer for a model on a cluster, among the jobs with the same ranks, batch and sequence length."""

    model: str
    cluster: str
    ranks: int
    global_batch_size: int
    """Samples per step."""
    sequence_length: int
    """Tokens per sample."""
    jobs: int
    """Jobs with an answer for these."""
    job: str
    """Id of the fastest."""
    name: str
    """Its name. Empty: it has no name."""
    submitter: str
    """Its owner."""
    created: datetime
    trial: int
    """Number of the trial that is its answer."""
    rate: Interval
    """Samples/s of the answer."""
    gain: Gain | None
    """The gain of the answer over its own baseline. None: the baseline was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that shows one job to whoever has it, without a key of theirs."""

    id: str
    owner: str
    """Who made it."""
    created: datetime
    expires: datetime | None
    last_used: datetime | None
    token: str = field(default="", repr=False)
    """Only of a new link: `/#/jobs/JOB?link=TOKEN` opens the job in the page, `Authorization: Bearer TOKEN` elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkList:
    """The links of a job that work, oldest first."""

    items: tuple[Link, ...]
    most_days: int
    """Most days that a new one works; 0: none can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderboard:
    """The fastest answers, by model and cluster."""

    items: tuple[LeaderboardEntry, ...]
    jobs: int
    """Jobs with an answer that were compared: the newest."""
