"""Layouts of pipeline stages for the parity matrix: one stage of two layers, the others of one, with alternating marks."""

from search_spaces.models.pipeline import OFFLOADED, SEPARATOR

LONGER = ("f1", "s1", "", "f", "s")
"""Recomputation of the stage of two layers, in turn: one of them, none, both."""
OTHERS = ("s", "", "f")
"""Recomputation of the stages of one layer, in turn along the pipeline."""


def layout_in_turn(stages: int, turn: int, offloads: bool) -> str:
    """A layout with one layer more than stages; with `offloads`, one stage offloads."""
    longer, offloaded = turn % stages, (turn + 1) % stages
    parts = [
        (f"2{LONGER[turn % len(LONGER)]}" if place == longer else f"1{OTHERS[(turn + place) % len(OTHERS)]}")
        + (OFFLOADED if offloads and place == offloaded else "")
        for place in range(stages)
    ]
    return SEPARATOR.join(parts)
