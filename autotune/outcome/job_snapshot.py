"""All rows of a job at one moment, and what can be read from them."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from autotune.objective.intervals import Repeat, Spread, pooled_spread
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import JobRecord, TrialRecord
from storage.store import Store


@dataclass(slots=True)
class Closed:
    """A job's leading trials that have an outcome, which they keep: read once, put in order once, and only added to."""

    trials: list[TrialRecord] = field(default_factory=list)
    searched: list[TrialRecord] = field(default_factory=list)
    spent: int = 0
    seconds: float = 0.0
    """Of the trials that ran, from start to end."""
    timed: int = 0
    by_config: dict[str, tuple[TrialRecord, ...]] = field(default_factory=dict)
    repeated: dict[str, None] = field(default_factory=dict)
    """Hashes of configurations with several trials, in the order of their second."""

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
    """A job and its trials by number, with the figures of their results alone (`Store.figures_of`).

    Books of one reader share what never changes, so that the next one costs as much as is new in it.
    """

    job: JobRecord
    closed: Closed
    """May hold later trials than this book has."""
    closed_count: int
    searched_count: int
    spent_before: int
    """Search trials among the closed ones that were counted."""
    later: tuple[TrialRecord, ...]
    """From the first trial without an outcome on."""
    read_whole: Callable[[int], TrialRecord]

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials."""
        return [*islice(self.closed.trials, self.closed_count), *self.later]

    @property
    def searched(self) -> list[TrialRecord]:
        """Search trials that have an outcome, refused ones included: the history of a strategy."""
        later = (trial for trial in self.later if trial.purpose is Purpose.SEARCH and trial.outcome is not None)
        return [*islice(self.closed.searched, self.searched_count), *later]

    @property
    def open(self) -> list[TrialRecord]:
        """Trials that are wanted or running."""
        return [trial for trial in self.later if trial.outcome is None]

    @property
    def spent(self) -> int:
        """Search trials that were counted, or will be as soon as they start."""
        later = (trial for trial in self.later if trial.purpose is Purpose.SEARCH)
        return self.spent_before + sum(trial.counted or trial.outcome is None for trial in later)

    @property
    def mean_seconds(self) -> float:
        """Of a trial that ran, as far as they are closed in order; 0 before the first."""
        return self.closed.seconds / self.closed.timed if self.closed.timed else 0.0

    def trial(self, number: int) -> TrialRecord:
        """The trial of that number."""
        return self.closed.trials[number] if number < self.closed_count else self.later[number - self.closed_count]

    def whole(self, trial: TrialRecord) -> TrialRecord:
        """The trial with its whole result: ranks, steps, losses. Read anew."""
        return self.read_whole(trial.number)

    def search_trial(self, config: TrialConfig) -> TrialRecord | None:
        """The search trial of a configuration, where there is one."""
        return next((trial for trial in self._of(config.hash) if trial.purpose is Purpose.SEARCH), None)

    def confirmations(self, config: TrialConfig) -> dict[int, TrialRecord]:
        """Confirmations of a configuration by repeat number, with and without outcome."""
        return self.confirmations_of(config.hash)

    def confirmations_of(self, config_hash: str) -> dict[int, TrialRecord]:
        """The same by the configuration's hash, which a trial has and which takes longer to make than all else of this."""
        return {trial.repeat: trial for trial in self._of(config_hash) if trial.purpose is Purpose.CONFIRM}

    def controls(self, config: TrialConfig) -> dict[int, TrialRecord]:
        """Control trials of a configuration by repeat number, with and without outcome."""
        return {trial.repeat: trial for trial in self._of(config.hash) if trial.purpose is Purpose.CONTROL}

    def confirmed(self, config: TrialConfig) -> dict[int, Repeat]:
        """Measured confirmations of a configuration by repeat number."""
        found = self.confirmations(config).items()
        return {number: repeat for number, trial in found if (repeat := repeat_of(trial.result)) is not None}

    def spread(self, prior: Spread, cuts: Sequence[int] = ()) -> Spread:
        """The spread between repeats that this job's own trials show.

        `cuts`: numbers of trials from which on the machine was another, so that repeats on two sides of one differ by more
        than repeats do.
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
    """Reads a job's book again and again; what is closed is read once."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store, self._job_id = store, job_id
        self._closed = Closed()

    def read(self) -> JobSnapshot:
        """All rows of the job.

        Raises:
            UnknownJobError: there is no such job.
        """
        job = self._store.job(self._job_id)
        self._job_id = job.id
        closed = self._closed
        later: list[TrialRecord] = []
        for trial in self._store.figures_of(job.id, len(closed.trials)):
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
        return self._store.trial_page(self._job_id, number, 1)[0]


def read_book(store: Store, job_id: str) -> JobSnapshot:
    """All rows of the job. Raises what `BookReader.read` raises."""
    return SnapshotReader(store, job_id).read()


def repeat_of(result: TrialResult | None) -> Repeat | None:
    """What a result says of its configuration's rate; None where nothing was measured."""
    if result is None or result.outcome is not Outcome.OK or result.samples_per_second is None:
        return None
    return Repeat(rate=result.samples_per_second.mean, within=result.within_relative_error)
