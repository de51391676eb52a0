"""The Pareto front of throughput and memory as one number: its hypervolume relative to that of the baseline's point."""

from collections.abc import Sequence
from typing import Any

BEYOND = 2.0
"""Memory of the reference point, as a multiple of the baseline's peak. Points above it do not count."""


def hypervolume(points: Sequence[tuple[float, float]], most_memory: float) -> float:
    """Return the area that the points (samples/s, peak bytes) dominate, with the reference point 0 samples/s and `most_memory`
    [Zitzler 1999].

    1. Go through the points from the fastest; each adds the strip of memory that no faster point covers.
    """
    area, edge = 0.0, most_memory
    for fast, small in sorted(points, key=lambda point: (-point[0], point[1])):
        if small < edge:
            area += fast * (edge - small)
            edge = small
    return area


def front_points(document: dict[str, Any]) -> list[tuple[float, float]]:
    """Return (samples/s, peak bytes) of each alternative of a best-config document."""
    return [_point(entry["measured"]) for entry in document["alternatives"]]


def front_over_baseline(document: dict[str, Any]) -> float | None:
    """Return the front's hypervolume relative to that of only the baseline; above 1: the front is wider; None: no baseline.

    The reference point is 0 samples/s and `BEYOND` times the baseline's peak, so the baseline's own hypervolume is always its
    rate times its peak.
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
