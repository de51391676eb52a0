"""The declaration of a knob: everything about it except the engine code; and conditions that several knobs share.

A knob is declared once, with `knob`, as a field of one of the classes in `search_spaces.knobs`. Everything else is derived from
the declaration: the fields and the stored form of `TrialConfig`, the search order, the domains of the space presets, the
engines that honour it, its treatment in plans, predictions and guided search, notes in exports, documentation pages, the web
form and the help.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Value = bool | int | float | str
Config = Any
"""A `TrialConfig`. Modules that `TrialConfig` imports cannot import its type."""
EVERY_ENGINE = ("native", "ddp", "fsdp2", "deepspeed")
"""For knobs that the trial loop or the rank process implements, or whose whole domain all four engines honour."""
TORCH_ENGINES = ("native", "ddp", "fsdp2")


class ValueKind(StrEnum):
    """The type of a knob's values."""

    INT = "int"
    BOOL = "bool"
    FLOAT = "float"
    CHOICE = "choice"


class Numerics(StrEnum):
    """How changing a knob affects training results. The values are exported: never rename one."""

    EXACT = "exact"
    """The same sums in the same order."""
    REORDERS = "reorders"
    """The same sums in another order or by another kernel: equal except for rounding."""
    CHANGES = "changes"
    """Different results: searched only if the user names the knob."""


class Applies(StrEnum):
    """What changing a knob requires, cheapest first. The values are exported: never rename one."""

    STEP = "step"
    """Takes effect at the next step."""
    REBUILD = "rebuild"
    """The engine rebuilds the model."""
    PROCESS_GROUP = "process_group"
    """A rebuild with new process groups."""
    PROCESS = "process"
    """New processes."""


class Planning(StrEnum):
    """How planning treats a knob when it ranks a space."""

    RANKED = "ranked"
    """Every value is predicted."""
    TUNED_LAST = "tuned last"
    """Tuned only for the best configurations, in the order of `Knob.tuned`: it hardly changes their ranking."""
    NOT_MODELLED = "not modelled"
    """No equation reads it: it keeps the device's default."""
    FIXED = "fixed"
    """One value per scan, because it determines what is computed."""


class Distance(StrEnum):
    """Distance measure of two values, for prediction residuals (`autotune.prediction.fitting.features`)."""

    DETAIL = "detail"
    """Equal or different; a minor detail."""
    CHOICE = "choice"
    """By the index among the choices."""
    DOUBLINGS = "doublings"
    """By the logarithm of 1 + value."""


@dataclass(frozen=True, slots=True)
class Condition:
    """When a knob has an effect. If it does not hold, canonical configurations have the knob at its default."""

    name: str
    reads: tuple[str, ...]
    """The knobs that `holds` reads."""
    holds: Callable[[Any, Any], bool]
    """Arguments: a `TrialConfig` and a `SpaceContext`."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """Maps values with equal behaviour to one canonical value."""

    reads: tuple[str, ...]
    """The other knobs that `value` reads. They come before this one in the search order."""
    value: Callable[[Any, Any, Any], Value]
    """Arguments: a value, a `TrialConfig` and a `SpaceContext`. Returns the canonical value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One tunable parameter."""

    name: str
    number: int
    """Position in lists of knobs. Never reused and never changed; a new knob has the next number."""
    default: Value
    description: str
    """One sentence."""
    kind: ValueKind
    numerics: Numerics
    applies: Applies
    unit: str = ""
    choices: tuple[Value, ...] = ()
    """All values; empty for numbers, which have a range, and for text."""
    minimum: float = 0
    maximum: float | None = None
    """None: no bound."""
    normalise: Callable[[str], str] | None = None
    """For text: maps spellings with the same meaning to one. Raises KnobValueError. None: unchanged."""
    on_cuda: Value | None = None
    """The default on CUDA devices; None: the same as elsewhere."""
    condition: Condition | None = None
    """None: the knob always has an effect."""
    canonical: Canonical | None = None
    """None: different values behave differently, except for the general rules in `search_spaces.canonical`."""
    searched_after: str | None = None
    """The preceding knob in the search order; None: the knob declared before it."""
    counts_to: Callable[[Any, int], int] | None = None
    """The largest value that could be legal, for `powers_of_two` and `divisors`. Arguments: a `SpaceContext` and the minimum
    number of data-parallel ranks. None: these expressions are refused."""
    zero: bool = False
    """Whether 0 has a special meaning and precedes the values of an expression."""
    spaces: Mapping[str, str | tuple[Value, ...]] = field(default_factory=dict)
    """Space preset -> the domain in it, as written in a space file."""
    engines: tuple[str, ...] = ("native",)
    """Engines that honour its whole domain. An engine that honours only some values lists them in its capability."""
    planning: Planning = Planning.RANKED
    tuned: int = 0
    """Planning.TUNED_LAST: its position in the tuning order."""
    acts_on: tuple[str, ...] = ()
    """Parts of a step (`autotune.prediction.equations.step.PARTS`) that it affects, for knobs that planning tunes last or does
    not model."""
    plain: tuple[Value, ...] = ()
    """Values that are common in published recipes. Other values are chosen only if their gain is certain. Empty: all are
    plain."""
    distance: Distance | None = None
    """None: `knob_features` has special columns for it, or needs none."""
    remedy: str = ""
    """What to do in a framework without such a setting."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Export -> command-line arguments that set it; `{value}` stands for the value. Only for command-line exports."""

    def holds(self, number: float) -> bool:
        """Whether a number is in range."""
        return self.minimum <= number and (self.maximum is None or number <= self.maximum)

    @property
    def is_element_size(self) -> bool:
        """Whether all values above the parameter count behave like the parameter count."""
        return self.unit == "elements"


def knob(default: Value, description: str, *, number: int, **declared: Any) -> Any:
    """A dataclass field that declares a knob. Arguments as for `Knob`; `name` and `kind` follow from the field."""
    kinds = {bool: ValueKind.BOOL, int: ValueKind.INT, float: ValueKind.FLOAT, str: ValueKind.CHOICE}
    kind = kinds[type(default)]
    if kind is ValueKind.BOOL:
        declared.setdefault("choices", (False, True))
    declaration = Knob(name="", default=default, description=description, number=number, kind=kind, **declared)
    return dataclasses.field(default=default, metadata={"knob": declaration})


def knobs_of(config: type[Any]) -> dict[str, Knob]:
    """The knobs that a dataclass declares, by number."""
    knobs = [dataclasses.replace(item.metadata["knob"], name=item.name) for item in dataclasses.fields(config)]
    return {item.name: item for item in sorted(knobs, key=lambda item: item.number)}


METHODS = ("lora_rank", "adapter_size", "prefix_length", "prompt_length")
"""Knobs that freeze the model and train additional parameters: low-rank adapters [Hu et al. 2021, LoRA], bottlenecks
[Houlsby et al. 2019], prefixes [Li and Liang 2021] and prompts [Lester et al. 2021]."""
VIRTUAL_TOKENS = ("prefix_length", "prompt_length")
"""The methods that add virtual tokens."""


def _accumulates(config: Any, context: Any) -> bool:
    return int(config.gradient_accumulation_steps(context.workload.global_batch_size, context.world_size)) > 1


def segments_may_grow(config: Any) -> bool:
    """Not with CUDA graphs: torch versions differ in whether segments of their private memory may grow."""
    return not config.cuda_graphs


PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
STAGE_3 = Condition("zero_stage is 3", ("zero_stage",), lambda config, _: config.zero_stage == 3)
DEFERS = Condition(
    "zero_stage is 2 and gradient_accumulation_steps > 1",
    ("zero_stage", "micro_batch_size", *PARALLEL_SIZES),
    lambda config, context: config.zero_stage == 2 and _accumulates(config, context),
)
OFFLOADS = Condition(
    "offload_optimizer is not none", ("offload_optimizer",), lambda config, _: config.offload_optimizer != "none"
)
TENSOR_PARALLEL = Condition(
    "tensor_parallel_size > 1", ("tensor_parallel_size",), lambda config, _: config.tensor_parallel_size > 1
)
PIPELINED = Condition(
    "pipeline_parallel_size > 1", ("pipeline_parallel_size",), lambda config, _: config.pipeline_parallel_size > 1
)
CHECKPOINTS = Condition(
    "activation_checkpointing is not none",
    ("activation_checkpointing",),
    lambda config, _: config.activation_checkpointing != "none",
)
ADAPTED = Condition(
    f"{', '.join(METHODS[:-1])} or {METHODS[-1]} > 0",
    METHODS,
    lambda config, _: any(getattr(config, name) > 0 for name in METHODS),
)
BIASED_ROUTERS = Condition(
    f"the model has a bias of the choice of experts, and {', '.join(METHODS)} are 0",
    METHODS,
    lambda config, context: (
        getattr(context.model, "router_correction", False) and not any(getattr(config, name) > 0 for name in METHODS)
    ),
)
CONTEXT_PARALLEL = Condition(
    "context_parallel_size > 1", ("context_parallel_size",), lambda config, _: config.context_parallel_size > 1
)
ACCUMULATES = Condition("gradient_accumulation_steps > 1", ("micro_batch_size", *PARALLEL_SIZES), _accumulates)
ON_CUDA = Condition("on CUDA devices", (), lambda _, context: context.cluster.device.kind == "cuda")
GROWS_SEGMENTS = Condition(
    "on CUDA devices, cuda_graphs is false",
    ("cuda_graphs",),
    lambda config, context: ON_CUDA.holds(config, context) and segments_may_grow(config),
)
