"""Check the network between pairs of nodes by all-reduces, compared with a calibration or with the other pairs."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.cli.finding import Finding
from autotune.prediction.cases.bench_cases import link_volume
from executor.runners.ray.checkup import LARGE_BYTES, Checkup, Pair
from search_spaces.clusters.microbenchmark import Measured, Operation
from storage.records import CalibrationRecord

SLOWER = 2.0
"""Slowdown above which a fault is assumed; smaller ones cannot be distinguished from other traffic."""
FEWEST = 3
"""Minimum number of pairs whose median is the expectation without a calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected duration of an all-reduce over a pair."""

    small_seconds: float
    large_seconds: float
    source: str
    """Description of the source."""


def pair_findings(checkup: Checkup, calibration: CalibrationRecord | None) -> list[Finding]:
    """One finding per pair; none with a single node."""
    measured = [pair for pair in checkup.pairs if not pair.problem]
    expected = expected_by(calibration.rows, calibration.id) if calibration is not None else None
    if expected is None and len(measured) >= FEWEST:
        expected = _middle(measured)
    return [_finding(pair, expected, checkup.backend) for pair in checkup.pairs]


def expected_by(rows: Sequence[Measured], calibration: str) -> Expected | None:
    """The expectation for a pair from a calibration's all-reduces across nodes; None: it has none.

    The time of the smallest message is latency, which grows with the number of ranks and so is an upper bound. For larger
    messages the best bandwidth counts; a pair's volume is the message itself.
    """
    across = [row for row in rows if row.operation is Operation.ALL_REDUCE and row.group.in_node == 1 and row.group.ranks > 1]
    if not across:
        return None
    smallest = min(across, key=lambda row: row.shape[0])
    bandwidth = max(link_volume(row) * row.group.sharing / row.seconds for row in across)
    large = LARGE_BYTES / bandwidth
    return Expected(small_seconds=smallest.seconds, large_seconds=large, source=f"calibration {calibration}")


def _middle(pairs: Sequence[Pair]) -> Expected:
    return Expected(
        small_seconds=statistics.median(pair.small_seconds for pair in pairs),
        large_seconds=statistics.median(pair.large_seconds for pair in pairs),
        source="the median of all pairs",
    )


def _finding(pair: Pair, expected: Expected | None, backend: str) -> Finding:
    name = f"all-reduce {pair.nodes[0]} - {pair.nodes[1]}"
    if pair.problem:
        remedy = "repair interface and ports first, and free a device on each node; then check the ranks' logs"
        return Finding(name=name, good=False, text=f"{backend} fails: {pair.problem}", remedy=remedy)
    rate = LARGE_BYTES / pair.large_seconds / 1e9
    text = f"{pair.small_seconds * 1e6:.0f} us for 4 KiB, {rate:.3g} GB/s for 16 MiB ({backend})"
    slow = list(_slower(pair, expected)) if expected is not None else []
    against = f", {' and '.join(slow)} of {expected.source}" if slow and expected is not None else ""
    remedy = "check link speed, cable and switch port (`ethtool`) of the node that is in every slow pair"
    return Finding(name=name, good=not slow, text=text + against, remedy=remedy)


def _slower(pair: Pair, expected: Expected) -> Iterator[str]:
    if pair.small_seconds > SLOWER * expected.small_seconds:
        yield f"{pair.small_seconds / expected.small_seconds:.1f} times the latency"
    if pair.large_seconds > SLOWER * expected.large_seconds:
        yield f"{expected.large_seconds / pair.large_seconds:.0%} of the bandwidth"
