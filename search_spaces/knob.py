"""What a knob is: unit, domain, default, when it matters, what it does to the numbers and what a move costs."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from search_spaces.context import SpaceContext
from search_spaces.trial_config import TrialConfig, Value

DEFAULTS = TrialConfig()


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
    """Other numbers: never searched unless the knob is named by the user."""


class Applies(StrEnum):
    """What a move costs, from cheap to dear. The values are exported: never rename one."""

    STEP = "step"
    """Takes effect at the next step."""
    REBUILD = "rebuild"
    """The engine builds the model anew."""
    PROCESS_GROUP = "process_group"
    """New process groups too."""
    PROCESS = "process"
    """New processes."""


@dataclass(frozen=True, slots=True)
class Condition:
    """When a knob matters. Where it does not hold, the knob stands at its default in every canonical configuration."""

    name: str
    reads: tuple[str, ...]
    """The knobs that `holds` looks at."""
    holds: Callable[[TrialConfig, SpaceContext], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be turned."""

    name: str
    description: str
    unit: str
    kind: Kind
    numerics: Numerics
    applies: Applies
    choices: tuple[Value, ...] = ()
    """The values there are; empty for numbers, which have a range."""
    minimum: float = 0
    maximum: float | None = None
    """None: no bound."""
    condition: Condition | None = None
    """None: the knob always matters."""

    @property
    def default(self) -> Value:
        """The value that TrialConfig has for it."""
        value: Value = getattr(DEFAULTS, self.name)
        return value

    def holds(self, number: float) -> bool:
        """Whether a number is in the range."""
        return self.minimum <= number and (self.maximum is None or number <= self.maximum)

    @property
    def is_element_size(self) -> bool:
        """Whether values beyond the parameter count all act as the parameter count does."""
        return self.unit == "elements"
