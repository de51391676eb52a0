"""A trial that was measured outside of the database."""

from dataclasses import dataclass

from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTrial:
    """What a configuration of the job's model and batch was measured at."""

    config: TrialConfig
    samples_per_second: float
    noise: float
    """Standard deviation of the logarithm of the rate."""
    peak_memory_bytes: int | None = None
    """Of the fullest rank; None: not measured."""
