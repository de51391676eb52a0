"""What a knob is: one declaration holds everything about it but the engine code.

A knob is declared once, as a field of one of the classes in `search_spaces.knobs`, by a call of `knob`. Everything else is
derived from it: the fields and the stored form of `TrialConfig`, the search order, the domains of the space presets, which
engines honour it, how plans, predictions and guided search treat it, what exports remark, the pages of the documentation, the
form and the help.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Value = bool | int | float | str
Config = Any
"""A `TrialConfig`. Modules that `TrialConfig` is made of cannot name its type."""
EVERY_ENGINE = ("native", "ddp", "fsdp2", "deepspeed")
"""For knobs that the trial's loop or the rank's process acts on, or that all four engines honour in their whole domain."""
TORCH_ENGINES = ("native", "ddp", "fsdp2")


class Kind(StrEnum):
    """The type of a knob's values."""

    INT = "int"
    BOOL = "bool"
    FLOAT = "float"
    CHOICE = "choice"


class Numerics(StrEnum):
    """What a move does to the results of training. The values are exported: never rename one."""

    EXACT = "exact"
    """The same sums in the same order."""
    REORDERS = "reorders"
    """The same sums in another order or by another kernel: equal but for rounding."""
    CHANGES = "changes"
    """Other numbers: only searched where the user names the knob."""


class Applies(StrEnum):
    """What a move costs, the cheapest first. The values are exported: never rename one."""

    STEP = "step"
    """Takes effect at the next step."""
    REBUILD = "rebuild"
    """The engine builds the model anew."""
    PROCESS_GROUP = "process_group"
    """New process groups too."""
    PROCESS = "process"
    """New processes."""


class Planning(StrEnum):
    """How the equations treat a knob when they rank a space."""

    RANKED = "ranked"
    """Every value is predicted."""
    TUNED_LAST = "tuned last"
    """Set for the best configurations only, in the order of `Knob.tuned`: it hardly changes their order."""
    NOT_MODELLED = "not modelled"
    """No equation reads it: it stands near the device's default."""
    FIXED = "fixed"
    """One value for a whole scan: what is computed follows from it."""


class Distance(StrEnum):
    """How far apart two values are, for the residuals of predictions (`autotune.prediction.fitting.knob_features`)."""

    DETAIL = "detail"
    """A detail is on or off."""
    CHOICE = "choice"
    """By the places among the choices."""
    DOUBLINGS = "doublings"
    """By the logarithms of 1 + value."""


@dataclass(frozen=True, slots=True)
class Condition:
    """When a knob matters. Where it does not hold, the knob stands at its default in every canonical configuration."""

    name: str
    reads: tuple[str, ...]
    """The knobs that `holds` looks at."""
    holds: Callable[[Any, Any], bool]
    """Of a `TrialConfig` and a `SpaceContext`."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """Values that behave alike, and the one that stands for them."""

    reads: tuple[str, ...]
    """The other knobs that `value` looks at, which come before this one in the search order."""
    value: Callable[[Any, Any, Any], Value]
    """Of a value, a `TrialConfig` and a `SpaceContext`: the value that stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be turned."""

    name: str
    number: int
    """Its place wherever knobs are listed. Never reused and never changed; a new knob has the next number."""
    default: Value
    description: str
    """One sentence."""
    kind: Kind
    numerics: Numerics
    applies: Applies
    unit: str = ""
    choices: tuple[Value, ...] = ()
    """The values that there are; empty for numbers, which have a range, and for text."""
    minimum: float = 0
    maximum: float | None = None
    """None: no bound."""
    normalise: Callable[[str], str] | None = None
    """Of text: one spelling for one meaning. Raises KnobValueError. None: as it is."""
    on_cuda: Value | None = None
    """The default on CUDA devices; None: the same as elsewhere."""
    condition: Condition | None = None
    """None: the knob always matters."""
    canonical: Canonical | None = None
    """None: two values always behave differently, but for what `search_spaces.canonical` does with every knob."""
    searched_after: str | None = None
    """The knob after which it comes in the search order; None: after the one that is declared before it."""
    counts_to: Callable[[Any, int], int] | None = None
    """The largest value that could be legal, for `powers_of_two` and `divisors`: of a `SpaceContext` and the fewest
    data-parallel ranks. None: these expressions are refused."""
    zero: bool = False
    """Whether 0 means something of its own and stands before the values of an expression."""
    spaces: Mapping[str, str | tuple[Value, ...]] = field(default_factory=dict)
    """Space preset -> the domain there, as a user's file writes it."""
    engines: tuple[str, ...] = ("native",)
    """Engines that honour its whole domain. An engine that honours some of its values lists them in its capability."""
    planning: Planning = Planning.RANKED
    tuned: int = 0
    """Planning.TUNED_LAST: its turn."""
    acts_on: tuple[str, ...] = ()
    """Parts of a step (`autotune.prediction.equations.step.PARTS`) that it changes, for knobs that planning tunes last or does
    not model."""
    plain: tuple[Value, ...] = ()
    """Values that published recipes use as a matter of course. Others are only chosen where their gain is certain. Empty: all
    are plain."""
    distance: Distance | None = None
    """None: `knob_features` has columns of its own for it, or needs none."""
    remedy: str = ""
    """What to do in a framework that has no place for it."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Export -> the words that state it there; `{value}` stands for the value. For exports that are command lines."""

    def holds(self, number: float) -> bool:
        """Whether a number is in the range."""
        return self.minimum <= number and (self.maximum is None or number <= self.maximum)

    @property
    def is_element_size(self) -> bool:
        """Whether values beyond the parameter count all act as the parameter count does."""
        return self.unit == "elements"


_KINDS = {bool: Kind.BOOL, int: Kind.INT, float: Kind.FLOAT, str: Kind.CHOICE}


def knob(default: Value, description: str, *, number: int, **declared: Any) -> Any:
    """A field of a configuration that is a knob. Arguments: those of `Knob`; its `name` and `kind` follow from the field."""
    kind = _KINDS[type(default)]
    if kind is Kind.BOOL:
        declared.setdefault("choices", (False, True))
    made = Knob(name="", default=default, description=description, number=number, kind=kind, **declared)
    return dataclasses.field(default=default, metadata={"knob": made})


def knobs_of(config: type[Any]) -> dict[str, Knob]:
    """The knobs that a dataclass declares, by number."""
    found = [dataclasses.replace(item.metadata["knob"], name=item.name) for item in dataclasses.fields(config)]
    return {item.name: item for item in sorted(found, key=lambda item: item.number)}
