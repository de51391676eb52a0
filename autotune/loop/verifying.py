"""Trials whose last failure may not have been their own: measured again in fresh processes, with nothing beside them."""

from collections.abc import Collection

from search_spaces.failure import FailureTable
from storage.records import AttemptState, TrialRecord
from storage.store import Store


class Verifying:
    """Knows which wanted trials are to be verified (`FailureRow.verify`), from the attempts that the store has."""

    def __init__(self, store: Store, table: FailureTable) -> None:
        self._store, self._table = store, table
        self._known: dict[tuple[int, int], bool] = {}

    def wants(self, trial: TrialRecord) -> bool:
        """Whether the next attempt at the trial verifies a failure."""
        key = (trial.number, trial.attempts)
        if trial.attempts and key not in self._known:
            attempts = self._store.attempts(trial.job_id, trial.number)
            retried = [attempt.result for attempt in attempts if attempt.state is AttemptState.RETRIED and attempt.result]
            rows = [self._table.row(result.cause) for result in retried]
            self._known[key] = any(row is not None and row.verify for row in rows)
        return self._known.get(key, False)

    def startable(self, trials: list[TrialRecord], running: Collection[TrialRecord]) -> list[TrialRecord]:
        """Those that may start now: one that verifies waits until nothing runs, and nothing starts until it has ended.

        What is left out stays wanted.
        """
        if any(map(self.wants, running)):
            return []
        alone = next(filter(self.wants, trials), None)
        if alone is None:
            return trials
        return [] if running else [alone]
