"""How long guided search takes to decide, after many trials, over many candidates.

    python -m benchmarks.search.decision_time [--repeats 5] [--markdown docs/results/decision-time.md]

Candidates are synthetic: 35 features and 5 memory tags each, with rates and bytes that depend on the features. A hundred trials
are observed, a fifth of them out of memory; then the next candidate is chosen, and again after each further trial.
The first decision of a process, without trials, is reported separately.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.strategies.guided.described import Described, Observations
from autotune.strategies.guided.strategy import choose
from benchmarks.common.written_page import table

FEATURES, TAGS, TRIALS = 35, 5, 100
BOUNDS = {10_000: 0.05, 1_000_000: 1.0}
"""Candidates -> seconds that a decision may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of decisions."""

    candidates: int
    first: float
    """Without trials."""
    later: tuple[float, ...]
    """After a hundred trials, then after one more each."""
    processor: tuple[float, ...]
    """CPU seconds of the same decisions: less than wall time on a busy machine."""

    @property
    def held(self) -> bool:
        """Whether the median of the later decisions is within the bound."""
        return float(np.median(self.later)) <= BOUNDS[self.candidates]


def synthetic(count: int) -> Described:
    """Candidates whose features are exponents of 2, as for degrees and sizes."""
    random = np.random.default_rng(0)
    features = random.integers(0, 6, (count, FEATURES)).astype(np.float64)
    tags = np.exp2(32 + features[:, :TAGS] / 3 + 0.1 * random.standard_normal((count, TAGS)))
    return Described(
        log_rate=features @ random.normal(0, 0.1, FEATURES),
        learned=0.05 * random.standard_normal(count),
        penalty=0.01 * random.integers(0, 8, count),
        features=features,
        needed=tags.sum(axis=1),
        outside=np.full(count, 2e9),
        tags=tags,
        room=np.full(count, 80e9),
        memory_spread=np.full(count, 0.06),
        kind=features[:, 0].astype(np.int64) % 2,
        cost=np.ones(count),
        mesh=np.zeros(count, dtype=np.int64),
    )


def observed(pool: Described, places: np.ndarray) -> Observations:
    """Trials of these candidates: a fifth out of memory, the others with a rate near the prediction."""
    random = np.random.default_rng(1)
    failed = np.arange(len(places)) % 5 == 4
    errors = 0.2 * random.standard_normal(len(places))
    return Observations(
        described=pool.take(places),
        log_rate=np.where(failed, np.nan, pool.log_rate[places] + errors),
        noise=np.full(len(places), 0.02),
        ran=~failed,
        out_of_memory=failed,
        peak=np.where(failed, np.nan, 0.97 * pool.needed[places]),
        wins=~failed,
    )


def measure(count: int, repeats: int) -> Measured:
    """Time `repeats` decisions, each with one trial more than the one before."""
    pool = synthetic(count)
    # Among the best candidates, like the trials of a search.
    places = np.argsort(-pool.log_rate)[: 20 * (TRIALS + repeats) : 20]
    open_ = np.ones(count, dtype=bool)
    first, _ = _timed(pool, observed(pool, places[:0]), open_)
    later = []
    for trials in range(TRIALS, TRIALS + repeats):
        open_[places[:trials]] = False
        later.append(_timed(pool, observed(pool, places[:trials]), open_))
    clock, processor = zip(*later, strict=True)
    return Measured(candidates=count, first=first, later=clock, processor=processor)


def _timed(pool: Described, known: Observations, open_: np.ndarray) -> tuple[float, float]:
    began, used = time.perf_counter(), time.process_time()
    choose(pool, known, open_, 1)
    return time.perf_counter() - began, time.process_time() - used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    found = [measure(count, arguments.repeats) for count in BOUNDS]
    cells = [
        [
            f"{each.candidates:,}", f"{1e3 * each.first:.0f} ms", f"{1e3 * float(np.median(each.later)):.0f} ms",
            f"{1e3 * max(each.later):.0f} ms", f"{1e3 * float(np.median(each.processor)):.0f} ms",
            f"{1e3 * BOUNDS[each.candidates]:.0f} ms", "held" if each.held else "**missed**",
        ]
        for each in found
    ]  # fmt: skip
    later = f"after {TRIALS} trials, median"
    lines = table(["candidates", "first decision", later, "slowest", "processor time", "bound", ""], cells)
    print("\n".join(lines))
    if arguments.markdown:
        head = [
            "# How long guided search takes to decide", "",
            f"Written by `benchmarks/search/decision_time.py`: {FEATURES} features, {TAGS} memory tags for each synthetic",
            "candidate. A decision is all work between trials except describing the candidates, which is done once for a",
            "search and again at each [milestone](../strategies.md#how-it-chooses), when coefficients are fitted:",
            "0.4 to 0.8 s.",
            "",
        ]  # fmt: skip
        arguments.markdown.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    return 0 if all(each.held for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
