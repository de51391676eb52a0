"""What a submission would be, and what there is to choose from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.client.decoding import Plain
from autotune.client.plan_views import Predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a submission means: it would be accepted."""

    model: str
    parameter_count: int
    """0: not known."""
    cluster: str
    world_size: int
    request: Plain
    """The fields that were given, and the defaults of the others."""
    domains: Mapping[str, tuple[Any, ...]]
    """Knob -> values that are searched."""
    baseline: Plain
    """The configuration of trial 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEstimate:
    """A configuration with what is predicted of it."""

    config: Plain
    predicted: Predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """From the least to the most that is expected."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a job may be expected to find, and to cost."""

    trials: int
    """That may run on a device: of the search, controls between them, and confirmations."""
    best: ConfigEstimate | None
    """The best of the space that probably fits; None: `note` says why."""
    baseline: ConfigEstimate | None
    gain: float | None
    """Predicted samples/s of the best over the baseline's."""
    trial_seconds: Range | None
    """Of a trial on warm ranks."""
    seconds: Range | None
    """Of the whole job: search within its budget of time, controls, confirmations, and the start of its ranks."""
    device_hours: Range | None
    rests_on: str
    """In words, what the predictions rest on; empty: nothing is predicted."""
    note: str
    """Why nothing is predicted, or not the best; empty: everything is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A name, and what stands behind it."""

    name: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandChoice:
    """What a command must begin with, and where it runs."""

    folder: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values that a submission's fields may have on this service, and those that they have where they are left out."""

    models: tuple[Choice, ...]
    factories: tuple[str, ...]
    """`module:factory` models that the service allows."""
    commands: tuple[CommandChoice, ...]
    """Commands that the service allows; empty without the scope `submit`."""
    clusters: tuple[Choice, ...]
    spaces: tuple[Choice, ...]
    engines: tuple[Choice, ...]
    objectives: tuple[str, ...]
    strategies: tuple[str, ...]
    foreseeing: tuple[str, ...]
    """Strategies that can stop when nothing better is expected."""
    optimizers: tuple[str, ...]
    runners: tuple[str, ...]
    exports: tuple[str, ...]
    defaults: Plain
    """Field -> value where it is left out; None: nothing."""
    may_submit: bool
