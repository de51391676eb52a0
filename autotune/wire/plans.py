"""The best configurations of a space by their predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.wire.predictions import AssumedValue, Predicted, ValueOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReason:
    """Why a knob has its value: the effect of the value, and the cost of the alternatives."""

    knob: str
    """Name of the knob."""
    text: str
    """The reason in words."""
    cause: Mapping[str, Any] | None
    """The effect of changing only this knob: extra seconds for each part of the step, and the needed bytes. None: no other
    value is possible with all else unchanged, or none is worse."""
    alternatives: tuple[Mapping[str, Any], ...]
    """The cost of each other value that is legal somewhere, nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTie:
    """A configuration that the predictions cannot distinguish from the plan."""

    config: Mapping[str, Any]
    """Knob -> value."""
    step_seconds: float
    """Predicted seconds per optimizer step."""
    peak_memory_bytes: float
    """Predicted peak memory of the fullest rank, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanGoodput:
    """The best way to run a plan on nodes that fail with one kind of recovery, and what is expected of it."""

    recovery: str
    """restart, migrate, drop or replan."""
    checkpoint: str
    """synchronous, asynchronous or peers."""
    interval_steps: int | None
    """Steps between checkpoints. None: nothing fails."""
    interval_seconds: float | None
    """Seconds of work between checkpoints. None: nothing fails."""
    spares: int
    """Number of spare nodes."""
    devices: int
    """Number of devices, spares included."""
    effective: float
    """Effective training time ratio: kept work, in seconds of failure-free training, per second."""
    tokens_kept_per_second: float
    """Tokens of kept work per second."""
    tokens_kept_per_device_hour: float
    """Likewise per device-hour, spares included: plans are ranked by it."""
    checkpoint_blocking_seconds: float
    """Seconds that a checkpoint stops training."""
    checkpoint_durable_seconds: float
    """Seconds from then until the checkpoint is safe."""
    checkpoint_load_seconds: float
    """Seconds in which a restart reads it."""
    tokens: float
    """Length of the run, in tokens."""
    hours: float
    """Mean duration of the run, in hours."""
    hours_quantiles: Mapping[str, float]
    """Probability -> hours that are not exceeded with it."""
    interruptions: float
    """Expected number of unexpected interruptions."""
    planned_interruptions: float
    """Expected number of planned interruptions."""
    cost: float | None
    """Of the run, in the currency of the request's `price`. None: the request has no price."""
    failures: str
    """Name of the failure rates."""
    failures_source: str
    """Where they were published, or the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One of the best configurations: the fastest of a group of tied ones."""

    world_size: int
    """Number of ranks."""
    nodes: int
    """Number of nodes."""
    config: Mapping[str, Any]
    """Knob -> value, in canonical form."""
    differences: Mapping[str, Any]
    """Knob -> value, for knobs that differ from the device's defaults."""
    predicted: Predicted
    """The prediction for `config`."""
    tied: int
    """Number of further configurations that tie with it."""
    ties: tuple[PlanTie, ...]
    """The fastest of the tied configurations."""
    simplest: PlanTie | None
    """The tied configuration that an expert would try first. None: that is `config` itself."""
    cost_per_million_tokens: float | None
    """In the currency of the request's `price`. None: the request has no price."""
    reasons: tuple[PlanReason, ...]
    """One for each knob that matters and has alternatives."""
    goodput: tuple[PlanGoodput, ...] = ()
    """For the objective goodput: the best way to run it, then the best with each other recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMax:
    """The largest value of a dimension that fits."""

    dimension: str
    """sequence_length, micro_batch_size or model."""
    value: int
    """Tokens, samples or parameters."""
    next: int | None
    """The smallest value that was found not to fit. None: every tried value fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The best configurations of a space."""

    model: str
    """Name of the model."""
    parameter_count: int
    """Number of parameters, frozen ones included."""
    cluster: str
    """Name of the cluster."""
    engine: str
    """Name of the engine."""
    global_batch_size: int
    """Samples per optimizer step, over all ranks."""
    sequence_length: int
    """Tokens per sample."""
    assumed: tuple[AssumedValue, ...]
    """What nobody stated, most consequential first: alternatives are for the first plan."""
    calibration_source: str
    """The source of the predictions, in words."""
    space: str
    """Name of the space."""
    objective: str
    """throughput, memory, cost, devices or goodput."""
    max: PlanMax | None
    """The largest value that fits. None: the request does not ask for it."""
    configurations: int
    """Number of configurations."""
    fitting: int
    """Number of configurations found to fit. Those that a lower bound of their time excludes are not checked."""
    bucket_settings: int
    """Number of further predictions, with other bucket sizes."""
    world_sizes: tuple[int, ...]
    """Numbers of ranks that were considered."""
    resolution: float
    """Relative difference of step times up to which configurations tie."""
    seconds: float
    """Duration of planning, in seconds."""
    plans: tuple[Plan, ...]
    """Best first."""
    origins: Mapping[str, ValueOrigin] = field(default_factory=dict)
    """Field or knob -> where its value comes from."""
