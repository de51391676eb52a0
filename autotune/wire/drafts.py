"""A submission that is checked or estimated without opening a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.wire.predictions import Predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The resolved form of a submission. The service would accept the submission."""

    model: str
    """Name of the model, or of the command."""
    parameter_count: int
    """Number of parameters. 0: it is not known."""
    cluster: str
    """Name of the cluster."""
    world_size: int
    """Number of ranks."""
    request: Mapping[str, Any]
    """Field -> value: the given fields, and the defaults of the others."""
    domains: Mapping[str, tuple[Any, ...]]
    """Knob -> searched values."""
    assumed: tuple[str, ...]
    """What nobody stated and was assumed, in words with the option that states it."""
    baseline: Mapping[str, Any]
    """Knob -> value, for the configuration of trial 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEstimate:
    """A configuration with its prediction."""

    config: Mapping[str, Any]
    """Knob -> value."""
    predicted: Predicted
    """The prediction for `config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The expected range. The field that holds it gives the unit."""

    low: float
    """Lower bound."""
    high: float
    """Upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The expected result and cost of a job."""

    trials: int
    """Most trials that run on a device: search trials, controls and confirmations."""
    best: ConfigEstimate | None
    """The best configuration of the space that probably fits. None: `note` says why."""
    baseline: ConfigEstimate | None
    """The configuration of trial 0. None: `note` says why."""
    gain: float | None
    """Predicted samples/s of the best divided by those of the baseline. None: one of them is not predicted."""
    trial_seconds: Range | None
    """Seconds of a trial on warm ranks. None: it is not predicted."""
    seconds: Range | None
    """Seconds of the whole job: the search within its time budget, controls, confirmations, and the start of its ranks. None:
    they are not predicted."""
    device_hours: Range | None
    """`seconds` in hours, times the ranks. None: they are not predicted."""
    rests_on: str
    """The source of the predictions, in words. Empty: there are no predictions."""
    note: str
    """Why predictions are missing. Empty: everything is predicted."""
