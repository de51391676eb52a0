"""A measurement that a job wants."""

from dataclasses import dataclass

from search_spaces.outcome import Purpose
from search_spaces.trial_config import TrialConfig
from storage.records import FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """A measurement that is wanted."""

    config: TrialConfig
    purpose: Purpose = Purpose.SEARCH
    repeat: int = 0
    fidelity: str = FULL
