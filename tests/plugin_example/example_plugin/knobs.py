"""A knob: how long the example's engine waits after each step."""

from dataclasses import dataclass

from search_spaces.knob import Applies, Numerics, Planning, knob


@dataclass(frozen=True, kw_only=True)
class ExampleKnobs:
    """The knobs of the example."""

    __slots__ = ()

    step_pause: int = knob(
        0,
        "Milliseconds that a rank waits after each step.",
        number=1000,
        unit="milliseconds",
        numerics=Numerics.EXACT,
        applies=Applies.STEP,
        engines=("example",),
        spaces={"zero": (0, 20)},
        planning=Planning.NOT_MODELLED,
        acts_on=("compute",),
        remedy="sleep in the training loop",
    )
