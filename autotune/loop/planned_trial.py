"""A trial that a job plans to run."""

from dataclasses import dataclass

from search_spaces.outcome import Purpose
from search_spaces.trial_config import TrialConfig
from storage.records import FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """A trial to run, before it has a row in the store."""

    config: TrialConfig
    purpose: Purpose = Purpose.SEARCH
    repeat: int = 0
    fidelity: str = FULL
