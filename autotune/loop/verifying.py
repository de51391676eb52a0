"""Verify failures that the trial itself may not have caused: repeat it in new processes, with no other trial running."""

from collections.abc import Collection

from search_spaces.failure import FailureTable
from storage.records import AttemptState, TrialRecord
from storage.store import Store


class Verifying:
    """Determines from the stored attempts which planned trials verify a failure (`FailureRow.verify`)."""

    def __init__(self, store: Store, table: FailureTable) -> None:
        self._store, self._table = store, table
        self._known: dict[tuple[int, int], bool] = {}

    def is_verification(self, trial: TrialRecord) -> bool:
        """Whether the trial's next attempt verifies a failure."""
        key = (trial.number, trial.attempts)
        if trial.attempts and key not in self._known:
            attempts = self._store.attempts(trial.job_id, trial.number)
            retried = [attempt.result for attempt in attempts if attempt.state is AttemptState.RETRIED and attempt.result]
            rows = [self._table.row(result.cause) for result in retried]
            self._known[key] = any(row is not None and row.verify for row in rows)
        return self._known.get(key, False)

    def startable(self, trials: list[TrialRecord], running: Collection[TrialRecord]) -> list[TrialRecord]:
        """Return the trials that may start now: a verification waits until nothing runs, and nothing starts until it has ended.

        The other trials stay planned.
        """
        if any(map(self.is_verification, running)):
            return []
        verification = next(filter(self.is_verification, trials), None)
        if verification is None:
            return trials
        return [] if running else [verification]
