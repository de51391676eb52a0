"""Layouts of pipeline stages for the parity matrix: one stage of two layers, the others of one, marked in turn."""

from search_spaces.models.stage_layout import OFFLOADED, SEPARATOR

LONGER = ("f1", "s1", "", "f", "s")
"""What the stage of two layers computes again, in turn: one of them, none, both."""
OTHERS = ("s", "", "f")
"""What the stages of one layer do, in turn along the pipeline."""


def layout_in_turn(stages: int, turn: int, offloads: bool) -> str:
    """A layout of one layer more than stages; where it `offloads`, one stage does."""
    longer, offloaded = turn % stages, (turn + 1) % stages
    parts = [
        (f"2{LONGER[turn % len(LONGER)]}" if place == longer else f"1{OTHERS[(turn + place) % len(OTHERS)]}")
        + (OFFLOADED if offloads and place == offloaded else "")
        for place in range(stages)
    ]
    return SEPARATOR.join(parts)
