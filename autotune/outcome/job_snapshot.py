"""All rows of a job at one moment, with the queries on them."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from autotune.objective.intervals import Repeat, Spread, pooled_spread
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import JobRecord, TrialRecord

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(slots=True)
class Closed:
    """A job's leading trials that all have an outcome. Outcomes are final, so trials are read and indexed once."""

    trials: list[TrialRecord] = field(default_factory=list)
    searched: list[TrialRecord] = field(default_factory=list)
    spent: int = 0
    seconds: float = 0.0
    """Total duration of the trials that ran."""
    timed: int = 0
    by_config: dict[str, tuple[TrialRecord, ...]] = field(default_factory=dict)
    repeated: dict[str, None] = field(default_factory=dict)
    """Hashes of configurations with several trials, in the order of their second trial."""

    def add(self, trial: TrialRecord) -> None:
        """Add the next trial."""
        self.trials.append(trial)
        if trial.purpose is Purpose.SEARCH:
            self.searched.append(trial)
            self.spent += trial.counted
        if trial.started and trial.finished:
            self.seconds += (trial.finished - trial.started).total_seconds()
            self.timed += 1
        same = self.by_config.get(trial.config_hash, ())
        self.by_config[trial.config_hash] = (*same, trial)
        if same:
            self.repeated[trial.config_hash] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """A job and its trials by number, with only the figures of their results (`TrialStore.figures_of`).

    Snapshots of one reader share the closed trials, so reading the next snapshot costs only as much as its new rows.
    """

    job: JobRecord
    closed: Closed
    """May contain trials that are newer than this snapshot."""
    closed_count: int
    searched_count: int
    spent_before: int
    """Counted search trials among the closed ones."""
    later: tuple[TrialRecord, ...]
    """All trials from the first one without an outcome."""
    read_whole: Callable[[int], TrialRecord]

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials."""
        return [*islice(self.closed.trials, self.closed_count), *self.later]

    @property
    def searched(self) -> list[TrialRecord]:
        """Search trials with an outcome, including refused ones: the history that strategies receive."""
        later = (trial for trial in self.later if trial.purpose is Purpose.SEARCH and trial.outcome is not None)
        return [*islice(self.closed.searched, self.searched_count), *later]

    @property
    def open(self) -> list[TrialRecord]:
        """Trials that are planned or running."""
        return [trial for trial in self.later if trial.outcome is None]

    @property
    def spent(self) -> int:
        """Number of search trials that were counted, or will be when they start."""
        later = (trial for trial in self.later if trial.purpose is Purpose.SEARCH)
        return self.spent_before + sum(trial.counted or trial.outcome is None for trial in later)

    @property
    def mean_seconds(self) -> float:
        """Mean duration of the closed trials that ran; 0 before the first."""
        return self.closed.seconds / self.closed.timed if self.closed.timed else 0.0

    def trial(self, number: int) -> TrialRecord:
        """The trial with this number."""
        return self.closed.trials[number] if number < self.closed_count else self.later[number - self.closed_count]

    def whole(self, trial: TrialRecord) -> TrialRecord:
        """Read the trial with its full result: ranks, steps, losses."""
        return self.read_whole(trial.number)

    def search_trial(self, config: TrialConfig) -> TrialRecord | None:
        """The search trial of a configuration, if there is one."""
        return next((trial for trial in self._of(config.hash) if trial.purpose is Purpose.SEARCH), None)

    def confirmations(self, config: TrialConfig) -> dict[int, TrialRecord]:
        """Confirmations of a configuration by repeat number, with and without outcome."""
        return self.confirmations_of(config.hash)

    def confirmations_of(self, config_hash: str) -> dict[int, TrialRecord]:
        """`confirmations` by the configuration's hash: trials store it, and computing it would dominate the cost."""
        return {trial.repeat: trial for trial in self._of(config_hash) if trial.purpose is Purpose.CONFIRM}

    def controls(self, config: TrialConfig) -> dict[int, TrialRecord]:
        """Control trials of a configuration by repeat number, with and without outcome."""
        return {trial.repeat: trial for trial in self._of(config.hash) if trial.purpose is Purpose.CONTROL}

    def confirmed(self, config: TrialConfig) -> dict[int, Repeat]:
        """Measured confirmations of a configuration by repeat number."""
        confirmations = self.confirmations(config).items()
        return {number: repeat for number, trial in confirmations if (repeat := repeat_of(trial.result)) is not None}

    def spread(self, prior: Spread, cuts: Sequence[int] = ()) -> Spread:
        """Estimate the spread between repeats from this job's own trials and `prior`.

        `cuts`: trial numbers at which the machine changed; repeats on different sides of a cut are not pooled.
        """
        several = dict.fromkeys([*self.closed.repeated, *(trial.config_hash for trial in self.later)])
        groups: dict[tuple[str, int], list[Repeat]] = {}
        for name in several:
            for trial in self._of(name):
                if (repeat := repeat_of(trial.result)) is not None:
                    groups.setdefault((name, bisect_right(cuts, trial.number)), []).append(repeat)
        return pooled_spread(groups.values(), prior)

    def _of(self, config_hash: str) -> list[TrialRecord]:
        """The trials of a configuration."""
        closed = (trial for trial in self.closed.by_config.get(config_hash, ()) if trial.number < self.closed_count)
        return [*closed, *(trial for trial in self.later if trial.config_hash == config_hash)]


class SnapshotReader:
    """Reads successive snapshots of a job; closed trials are read once."""

    def __init__(self, store: "Store", job_id: str) -> None:
        self._store, self._job_id = store, job_id
        self._closed = Closed()

    def read(self) -> JobSnapshot:
        """Read all rows of the job.

        Raises:
            UnknownJobError: the job does not exist.
        """
        job = self._store.jobs.get(self._job_id)
        self._job_id = job.id
        closed = self._closed
        later: list[TrialRecord] = []
        for trial in self._store.trials.figures_of(job.id, len(closed.trials)):
            if later or trial.outcome is None:
                later.append(trial)
            else:
                closed.add(trial)
        return JobSnapshot(
            job=job,
            closed=closed,
            closed_count=len(closed.trials),
            searched_count=len(closed.searched),
            spent_before=closed.spent,
            later=tuple(later),
            read_whole=self._whole,
        )

    def _whole(self, number: int) -> TrialRecord:
        return self._store.trials.of(self._job_id, number, 1)[0]


def read_snapshot(store: "Store", job_id: str) -> JobSnapshot:
    """Read all rows of the job. Raises what `SnapshotReader.read` raises."""
    return SnapshotReader(store, job_id).read()


def repeat_of(result: TrialResult | None) -> Repeat | None:
    """The rate measurement in a result; None if nothing was measured."""
    if result is None or result.outcome is not Outcome.OK or result.samples_per_second is None:
        return None
    return Repeat(rate=result.samples_per_second.mean, within=result.within_relative_error)
