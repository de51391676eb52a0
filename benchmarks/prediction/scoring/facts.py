"""The facts in a table, as arrays over its rows: forecasts are scored against them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autotune.knowledge.row import TableRow, peak_bytes, step_seconds
from benchmarks.prediction.scoring.configurations import configuration_of
from benchmarks.prediction.scoring.contract import Flags, Floats
from benchmarks.prediction.scoring.outcomes import Fate, Labels, fate_of

PATHOLOGICAL = 50.0
"""A row slower than its group's fastest by more than this factor has a problem that no time model covers."""

GroupKey = tuple[str, str]
"""Source and rank_group: the same name in two sources denotes two groups."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A configuration of a group: one row, or several repeats."""

    rows: tuple[int, ...]
    """Positions of its rows."""
    rate: float
    """Median throughput of its rows that ran, in tokens/s (samples/s if no row states seq_len); NaN: none ran with a time."""
    repeats: int
    """Number of rows in the median."""
    fate: Fate
    """ran if any row ran; else out_of_memory if any did."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """Arrays over `rows`; NaN: not measured."""

    rows: tuple[TableRow, ...]
    seconds: Floats
    """Seconds of an optimizer step."""
    bytes: Floats
    """Peak memory."""
    work: Floats
    """Tokens (samples) per step and device: divided by a step's seconds, a throughput in a unit common to a group's rows."""
    fates: tuple[Fate, ...]
    pathological: Flags
    """Rows with a time excluded from time errors: slower than a fiftieth of the group's fastest."""
    candidates: dict[GroupKey, tuple[Candidate, ...]]
    """For each group, with any outcome."""

    @cached_property
    def groups(self) -> dict[GroupKey, tuple[Candidate, ...]]:
        """Candidates of each group except those that failed for another reason than memory."""
        return {
            key: tuple(candidate for candidate in candidates if candidate.fate is not Fate.FAILED_OTHERWISE)
            for key, candidates in self.candidates.items()
        }

    def fate_is(self, fate: Fate) -> Flags:
        """Which rows have this fate."""
        return np.array([each is fate for each in self.fates], dtype=bool)

    def sources(self) -> dict[str, list[int]]:
        """Positions by source, in the table's order."""
        found: dict[str, list[int]] = defaultdict(list)
        for position, row in enumerate(self.rows):
            found[row.source].append(position)
        return dict(found)


def gather_facts(rows: Sequence[TableRow], labels: Labels) -> Facts:
    """Convert a table's rows to arrays and candidates."""
    seconds = _array([step_seconds(row) for row in rows])
    work = _array([_work(row) for row in rows])
    fates = tuple(fate_of(row, labels) for row in rows)
    candidates = _candidates(rows, work / seconds, fates)
    return Facts(
        rows=tuple(rows),
        seconds=seconds,
        bytes=_array([peak_bytes(row) for row in rows]),
        work=work,
        fates=fates,
        pathological=_pathological(work / seconds, candidates),
        candidates=candidates,
    )


def _array(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _work(row: TableRow) -> float:
    return (row.samples_per_step or 1) * (row.seq_len or 1) / (row.num_gpus or 1)


def _candidates(rows: Sequence[TableRow], rates: Floats, fates: Sequence[Fate]) -> dict[GroupKey, tuple[Candidate, ...]]:
    members: dict[GroupKey, dict[tuple[Any, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for position, row in enumerate(rows):
        if row.rank_group and not row.batch_problem:
            members[row.source, row.rank_group][configuration_of(row)].append(position)
    return {
        key: tuple(_candidate(positions, rates, fates) for positions in configurations.values())
        for key, configurations in members.items()
    }


def _candidate(positions: Sequence[int], rates: Floats, fates: Sequence[Fate]) -> Candidate:
    ran = [float(rates[position]) for position in positions if np.isfinite(rates[position])]
    found = {fates[position] for position in positions}
    fate = next(fate for fate in (Fate.RAN, Fate.OUT_OF_MEMORY, Fate.UNKNOWN, Fate.FAILED_OTHERWISE) if fate in found)
    return Candidate(rows=tuple(positions), rate=float(np.median(ran)) if ran else np.nan, repeats=len(ran), fate=fate)


def _pathological(rates: Floats, groups: dict[GroupKey, tuple[Candidate, ...]]) -> Flags:
    found = np.zeros(len(rates), dtype=bool)
    for candidates in groups.values():
        fastest = max((candidate.rate for candidate in candidates if candidate.repeats), default=np.nan)
        for candidate in candidates:
            for position in candidate.rows:
                found[position] = rates[position] < fastest / PATHOLOGICAL
    return found
