"""What can change between two optimizer steps: the knobs of a run, and the settings that they make."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from search_spaces.knob import Value

Setting = tuple[Value, ...]
"""A value for each knob, in the order of the knobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKnob:
    """A knob of a running program."""

    name: str
    """As in `search_spaces.trial_config`, where the knob exists there."""
    values: tuple[Value, ...]
    ordered: bool = False
    """Whether neighbouring values have similar times, so that the search may go from one to the next."""
    effect: float = 0.1
    """Standard deviation of the logarithm of the ratio of the times of two neighbouring values, before any was measured."""
    trend: float = 0.0
    """Expected logarithm of that ratio, of a value to the one before it."""
    change_seconds: float = 0.0
    """Expected seconds of one change, beside the first step after it."""
    saving_value: Value | None = None
    """The value that takes the least memory; None: memory does not depend on the knob."""
    grows: bool = False
    """Whether a larger value takes more memory."""


@dataclass(frozen=True, slots=True)
class Move:
    """A setting that differs from another by one knob, or by one and the knob that makes room for it."""

    setting: Setting
    knob: int
    step: int
    """Distance and direction in the knob's values; 0: the knob is not ordered."""


@dataclass(frozen=True, slots=True)
class RunSpace:
    """The settings of a run."""

    knobs: tuple[RunKnob, ...]
    too_large: set[Setting] = field(default_factory=set)
    """Settings that ran out of memory, or that are predicted to."""

    def named(self, setting: Setting) -> dict[str, Value]:
        """Knob -> value."""
        return {knob.name: value for knob, value in zip(self.knobs, setting, strict=True)}

    def setting(self, values: Mapping[str, Value]) -> Setting | None:
        """The setting with these values; None: one of them is not a value of this run."""
        if any(values.get(knob.name) not in knob.values for knob in self.knobs):
            return None
        return tuple(values[knob.name] for knob in self.knobs)

    def fits(self, setting: Setting) -> bool:
        """Whether no setting is known to be too large that takes at most as much memory."""
        return not any(self._takes_as_much(setting, other) for other in self.too_large)

    def _takes_as_much(self, setting: Setting, other: Setting) -> bool:
        for knob, value, limit in zip(self.knobs, setting, other, strict=True):
            if knob.grows:
                if knob.values.index(value) < knob.values.index(limit):
                    return False
            elif knob.saving_value is not None and value == knob.saving_value != limit:
                return False
        return True

    def moves(self, setting: Setting, index: int, step: int | None = None) -> Iterator[Move]:
        """The neighbours of a setting by one knob, the larger first; `step`: only those in this direction.

        A larger value that does not fit is combined with the saving value of another knob.
        """
        knob, position = self.knobs[index], self.knobs[index].values.index(setting[index])
        steps = ((1, -1) if step is None else (step,)) if knob.ordered else (0,)
        for each in steps:
            targets = range(position + each, position + each + 1) if each else range(len(knob.values))
            for target in targets:
                if 0 <= target < len(knob.values) and target != position:
                    changed = (*setting[:index], knob.values[target], *setting[index + 1 :])
                    yield from (Move(other, index, each) for other in self._with_room(changed, index))

    def _with_room(self, setting: Setting, changed: int) -> Iterator[Setting]:
        """The setting if it fits, else those with one other knob that makes room for it."""
        if self.fits(setting):
            yield setting
            return
        for index, knob in enumerate(self.knobs):
            if index == changed:
                continue
            smaller = knob.values[: knob.values.index(setting[index])][::-1] if knob.grows else (knob.saving_value,)
            settings = ((*setting[:index], value, *setting[index + 1 :]) for value in smaller if value is not None)
            roomier = next((other for other in settings if other != setting and self.fits(other)), None)
            if roomier is not None:
                yield roomier
