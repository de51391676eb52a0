"""All rows of a job at one moment, and what can be read from them."""

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.intervals import Repeat, Spread, pooled_spread
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import JobRecord, TrialRecord
from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """A job and its trials by number."""

    job: JobRecord
    trials: tuple[TrialRecord, ...]

    @property
    def searched(self) -> list[TrialRecord]:
        """Search trials that have an outcome, refused ones included: the history of a strategy."""
        return [trial for trial in self._search() if trial.outcome is not None]

    @property
    def open(self) -> list[TrialRecord]:
        """Trials that are wanted or running."""
        return [trial for trial in self.trials if trial.outcome is None]

    @property
    def spent(self) -> int:
        """Search trials that were counted, or will be as soon as they start."""
        return sum(trial.counted or trial.outcome is None for trial in self._search())

    def trial(self, number: int) -> TrialRecord:
        """The trial of that number."""
        return self.trials[number]

    def search_trial(self, config: TrialConfig) -> TrialRecord | None:
        """The search trial of a configuration, where there is one."""
        return next((trial for trial in self._search() if trial.config.hash == config.hash), None)

    def confirmations(self, config: TrialConfig) -> dict[int, TrialRecord]:
        """Confirmations of a configuration by repeat number, with and without outcome."""
        return {
            trial.repeat: trial
            for trial in self.trials
            if trial.purpose is Purpose.CONFIRM and trial.config.hash == config.hash
        }

    def confirmed(self, config: TrialConfig) -> dict[int, Repeat]:
        """Measured confirmations of a configuration by repeat number."""
        found = self.confirmations(config).items()
        return {number: repeat for number, trial in found if (repeat := repeat_of(trial.result)) is not None}

    def repeats(self, config: TrialConfig) -> list[Repeat]:
        """What the estimate of a configuration rests on: its confirmations, and the search's own trial where there are none.

        Finalists are chosen because their search trial came out high. That trial is left out once there are others, for the
        estimate would be too high with it.
        """
        confirmed = list(self.confirmed(config).values())
        searched = self.search_trial(config)
        alone = repeat_of(searched.result) if searched else None
        return confirmed or ([alone] if alone else [])

    def spread(self, prior: Spread) -> Spread:
        """The spread between repeats that this job's own trials show."""
        groups: dict[str, list[Repeat]] = {}
        for trial in self.trials:
            if (repeat := repeat_of(trial.result)) is not None:
                groups.setdefault(trial.config.hash, []).append(repeat)
        return pooled_spread(groups.values(), prior)

    def _search(self) -> Iterable[TrialRecord]:
        return (trial for trial in self.trials if trial.purpose is Purpose.SEARCH)


def read_book(store: Store, job_id: str) -> Book:
    """All rows of the job.

    Raises:
        UnknownJobError: there is no such job.
    """
    job = store.job(job_id)
    return Book(job=job, trials=tuple(store.trials(job.id)))


def repeat_of(result: TrialResult | None) -> Repeat | None:
    """What a result says of its configuration's rate; None where nothing was measured."""
    if result is None or result.outcome is not Outcome.OK or result.samples_per_second is None:
        return None
    return Repeat(rate=result.samples_per_second.mean, within=result.within_relative_error)
