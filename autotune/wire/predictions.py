"""Predictions without a job: of a configuration, of the best ones of a space, and of a submission that is checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its interval. The field that holds it gives the unit and the probability."""

    mean: float
    low: float
    """Lower bound."""
    high: float
    """Upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A 90 % interval. The field that holds it gives the unit."""

    low: float
    """Lower bound."""
    high: float
    """Upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativeAnswer:
    """The prediction at another plausible value of what was assumed."""

    value: Any
    verdict: str
    """fits, may fit or does not fit."""
    peak_memory_bytes: float
    """Bytes that the fullest rank needs, without what its allocator only keeps."""
    tokens_per_second: float | None
    """Tokens/s of all ranks together; null: only its factory knows the length of a module's samples."""
    samples_per_second: float
    """Samples/s of all ranks together."""
    changes_verdict: bool
    """Whether the answer has another verdict."""
    changes_rate: bool
    """Whether its tokens/s (a module's samples/s) are outside the answer's interval."""
    choice: str
    """Of plans: the knobs of the configuration that is best there, as KNOB=VALUE. Empty: the first plan remains the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedValue:
    """A value that nobody stated."""

    name: str
    """A field, a knob, or another property of the model or the cluster."""
    value: Any
    stated_by: str
    """The option of the command line that states it. Empty: no option does."""
    text: str
    """The value in words."""
    alternatives: tuple[AlternativeAnswer, ...]
    """What the answer would be. Empty: no other value is plausible, or nothing is predicted here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrigin:
    """Where a value of the question comes from."""

    source: str
    """stated, derived, measured, framework (a default) or assumed."""
    by: str
    """What states it, by the option of the command line; what it is derived from; what measured it; whose default it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of the ranks of one pipeline stage."""

    pipeline_rank: int
    """0, 1, … along the pipeline."""
    layers: int
    """Number of layers of the stage."""
    total: float
    """Bytes."""
    by_tag: Mapping[str, float]
    """Tag -> bytes. The sum is `total`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePoint:
    """A point of the data schedule."""

    length: int
    """Tokens per sample."""
    kept: int
    """Tokens per sample that layers except the first and the last process."""
    weight: float
    """Share of the run's steps that the point represents."""
    step_seconds: float
    """Seconds per optimizer step."""
    peak_memory_bytes: float
    """Peak memory of the fullest rank, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction for a configuration. Intervals have a probability of 90 %."""

    samples_per_second: Interval
    """Samples/s of all ranks together."""
    tokens_per_second: float | None
    """Tokens/s of all ranks together; null: only its factory knows the length of a module's samples."""
    step_seconds: float
    """Seconds per optimizer step."""
    step_seconds_band: Band
    """Interval of `step_seconds`."""
    breakdown_seconds: Mapping[str, float]
    """Part of the step (compute, tensor, pipeline, data, optimizer, offload) -> seconds. The sum is `step_seconds`."""
    peak_memory_bytes: tuple[RankMemory, ...]
    """Memory of each pipeline rank. For a plan: only of the fullest one."""
    peak_memory_band: Interval
    """Peak memory of the fullest rank, in bytes."""
    doubts: tuple[str, ...]
    """What makes the interval of the time wide, in clauses."""
    is_modelled: bool
    """False: the equations do not know a part of the step."""
    host_memory_bytes: float
    """Main memory of a node, in bytes, summed over its ranks."""
    memory_limit_bytes: int
    """Bytes that a rank may allocate."""
    fit_probability: float
    """Probability that device memory and host memory suffice."""
    tflops_per_device: float | None
    """Useful TFLOP/s of the model per device, without recomputation; see `flops_convention`. None: FLOPs are unknown."""
    mfu: float | None
    """`tflops_per_device` as a share of the device's peak. None: the peak is unknown."""
    flops_convention: str
    """How floating point operations are counted."""
    schedule: tuple[SchedulePoint, ...]
    """The first, a middle and the last point of the data schedule. Empty: the data has no schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredQuestion:
    """The question of a prediction, as it was understood."""

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
    """What nobody stated, most consequential first: alternatives are for the answer's configuration, its fastest way or its
    first plan."""
    calibration_source: str
    """The source of the prediction, in words: shipped coefficients, or measurements of the cluster."""
    origins: Mapping[str, ValueOrigin] = field(default_factory=dict)
    """Field or knob -> where its value comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(AnsweredQuestion):
    """A configuration with its prediction."""

    world_size: int
    """Number of ranks."""
    config: Mapping[str, Any]
    """Knob -> value, in canonical form."""
    predicted: Predicted
    """The prediction for `config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSetup:
    """A way of training a model on some cards."""

    method: str | None
    """full, full-bf16, full-8bit, lora, lora-8bit or qlora; null: a user's module, as its factory makes it."""
    sharding: str
    """How states are divided and offloaded, in words."""
    recomputes: bool
    """Whether activations are recomputed."""
    fits: bool
    """Whether the smallest micro-batch fits with the required probability."""
    best_of_method: bool
    """Whether it is the fastest of its method that fits, or if none does the nearest."""
    lora_rank: int | None
    """Rank of adapters; 0: none; null: a user's module."""
    frozen_bits: int | None
    """Bits of a frozen parameter; null: nothing is frozen."""
    optimizer: str
    """Name of the optimizer."""
    needed_bytes: float
    """Bytes needed per card with `config`."""
    least_bytes: float
    """Bytes needed per card at the smallest micro-batch."""
    lacks_card_bytes: float
    """Additional bytes needed per card; 0: none."""
    lacks_host_bytes: float
    """Additional bytes of main memory needed per node; 0: none."""
    largest_micro_batch_size: int
    """The largest micro-batch that fits; 0: none does."""
    longest_sequence_length: int | None
    """Tokens of the longest samples that fit at the smallest micro-batch; null: not computed."""
    hours: Interval | None
    """Hours of the run; null: it does not fit, or no amount is stated."""
    config: Mapping[str, Any]
    """Knob -> value: at the fastest micro-batch that fits."""
    predicted: Predicted
    """The prediction for `config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRemedy:
    """A change that would make something fit."""

    remedy: str
    """shorter_samples, card_memory, host_memory or nodes."""
    value: float
    """Tokens, bytes, or nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFile:
    """The file of the fastest way, for a program."""

    text: str
    notes: tuple[str, ...]
    """How to start it, and what it leaves to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits(AnsweredQuestion):
    """What fits of the ways of training a model on some cards."""

    world_size: int
    """Number of cards."""
    fit_probability: float
    """The required probability that a way fits."""
    samples_of_run: float | None
    """Samples of the run whose hours are given."""
    fastest: int | None
    """Index in `setups` of the fastest that fits; null: nothing fits."""
    leanest: int | None
    """Index of the one that fits with the least memory of a card."""
    nearest: int
    """Index of the one that lacks least."""
    remedies: tuple[FitRemedy, ...]
    """If nothing fits: changes, each sufficient on its own by prediction."""
    setups: tuple[FitSetup, ...]
    file: FitFile | None = None
    """The file of the program that the request names; null: it names none."""


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
    assumed: tuple[AssumedValue, ...]
    """What nobody stated, without alternatives: those are in the estimate."""
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
    assumed: tuple[AssumedValue, ...]
    """What nobody stated, most consequential first: alternatives are for `best`, or for `baseline` if there is no best."""
    calibration_source: str
    """The source of the predictions, in words. Empty: there are no predictions."""
    note: str
    """Why predictions are missing. Empty: everything is predicted."""


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
class Plans(AnsweredQuestion):
    """The best configurations of a space."""

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
