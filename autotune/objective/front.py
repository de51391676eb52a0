"""The front of throughput and memory in one figure: its hypervolume over that of the baseline's point."""

from collections.abc import Sequence
from typing import Any

BEYOND = 2.0
"""Memory of the reference point, in the baseline's peak: what needs more than that counts for nothing."""


def hypervolume(points: Sequence[tuple[float, float]], most_memory: float) -> float:
    """Area that the points (samples/s, peak bytes) dominate, seen from 0 samples/s and `most_memory` [Zitzler 1999].

    1. Walk from the fastest point down; of each the strip of memory counts that no faster one had.
    """
    area, edge = 0.0, most_memory
    for fast, small in sorted(points, key=lambda point: (-point[0], point[1])):
        if small < edge:
            area += fast * (edge - small)
            edge = small
    return area


def front_points(document: dict[str, Any]) -> list[tuple[float, float]]:
    """(samples/s, peak bytes) of each of a best-config's alternatives."""
    return [_point(entry["measured"]) for entry in document["alternatives"]]


def front_over_baseline(document: dict[str, Any]) -> float | None:
    """The front's hypervolume over the baseline's alone, above 1 where the front is wider; None: no baseline was measured.

    The reference point is 0 samples/s and `BEYOND` times the baseline's peak: the baseline's own hypervolume is its rate times
    its peak, whatever else was tried.
    """
    if not document["baseline"]:
        return None
    rate, peak = _point(document["baseline"]["measured"])
    if not rate or not peak:
        return None
    most = BEYOND * peak
    return hypervolume(front_points(document), most) / hypervolume([(rate, peak)], most)


def _point(measured: dict[str, Any]) -> tuple[float, float]:
    peak = max((rank["total"] or 0 for rank in measured["peak_memory_bytes"]), default=0)
    return measured["samples_per_second"]["mean"], float(peak)
