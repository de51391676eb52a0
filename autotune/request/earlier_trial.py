"""A trial that was measured outside the database."""

from dataclasses import dataclass

from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTrial:
    """The measured rate of a configuration with the job's model and batch."""

    config: TrialConfig
    samples_per_second: float
    noise: float
    """Standard deviation of the logarithm of the rate."""
    peak_memory_bytes: int | None = None
    """Of the fullest rank; None: not measured."""
