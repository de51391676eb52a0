"""The colours of figures, in light and dark mode; distinguishable with colour blindness [Okabe and Ito 2008]."""

from dataclasses import dataclass

from search_spaces.outcome import Outcome

LIGHT = {
    "surface": "#ffffff", "line": "#d5dbe3", "line-strong": "#7d8896", "text": "#16202c", "text-soft": "#4d5a69",
    "ok": "#0072b2", "infeasible": "#c04b00", "pruned": "#767f8a", "invalid": "#8a6a00", "failed": "#b0306f",
    "cancelled": "#6b7480", "running": "#00795a", "best": "#e69f00", "front": "#009e73",
    "series-1": "#0073b3", "series-2": "#e69f01", "series-3": "#009e74", "series-4": "#cc79a7", "series-5": "#56b4e9",
    "series-6": "#d55e00", "series-7": "#8a8f2a", "series-8": "#7a6bb0",
    "low-1": "#aebccb", "low-2": "#7fa9cb", "low-3": "#4089bd", "low-4": "#0a66a3", "low-5": "#053a63",
    "on-strong": "#fefefe", "on-pale": "#0b131b",
}  # fmt: skip
"""Name -> colour on a light background. Equal colours differ in the last digit, so that each maps to its own dark colour."""
DARK = {
    "surface": "#171e27", "line": "#303b49", "line-strong": "#76859a", "text": "#e6ebf2", "text-soft": "#a5b1c0",
    "ok": "#56b4e9", "infeasible": "#f08048", "pruned": "#8f9aa8", "invalid": "#d3b13f", "failed": "#ea86b8",
    "cancelled": "#8f9aa8", "running": "#3ccba0", "best": "#f5b73a", "front": "#2fc498",
    "series-1": "#3f9fdc", "series-2": "#f5b73a", "series-3": "#2fc498", "series-4": "#dd9abf", "series-5": "#8fd0f8",
    "series-6": "#f08048", "series-7": "#b9be5c", "series-8": "#a597d8",
    "low-1": "#4b596a", "low-2": "#3d6f93", "low-3": "#4a90c0", "low-4": "#7cc4f2", "low-5": "#d6eefc",
    "on-strong": "#0c141d", "on-pale": "#0c141c",
}  # fmt: skip
"""Name -> colour on a dark background."""
SERIES = tuple(f"series-{number}" for number in range(1, 9))
"""Colours for parts of a whole, in this order."""
PALE = ("series-2", "series-4", "series-5", "low-1", "best")
"""The colours on which text is dark (`on-pale`). On the others it is `on-strong`."""
STEPS = tuple(f"low-{number}" for number in range(1, 6))
"""Colours from low to high."""


@dataclass(frozen=True, slots=True)
class Look:
    """How an outcome is shown: by a word and a shape, and additionally by a colour."""

    label: str
    symbol: str
    color: str
    """Name of a colour."""


OUTCOMES = {
    Outcome.OK: Look("OK", "circle", "ok"),
    Outcome.INFEASIBLE: Look("does not fit", "x", "infeasible"),
    Outcome.PRUNED: Look("ended early", "triangle-down", "pruned"),
    Outcome.INVALID: Look("invalid", "hexagon", "invalid"),
    Outcome.WRONG: Look("wrong", "star-diamond", "failed"),
    Outcome.FAILED: Look("failed", "diamond", "failed"),
    Outcome.TIMEOUT: Look("timed out", "hourglass", "failed"),
    Outcome.LOST: Look("lost", "triangle-up", "failed"),
    Outcome.PREEMPTED: Look("preempted", "triangle-right", "cancelled"),
    Outcome.CANCELLED: Look("cancelled", "square", "cancelled"),
}
RUNNING = Look("running", "circle-open", "running")


def look_of(outcome: object) -> Look:
    """The look of a trial of this outcome; None: it has no outcome yet."""
    return RUNNING if outcome is None else OUTCOMES[Outcome(str(outcome))]
