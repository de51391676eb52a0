"""The reference grid's page."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.common.paired_statistics import Estimate, estimate
from benchmarks.common.written_page import table
from benchmarks.search.grid_design import DOMAINS, SMALL, TOP, WHOLE, Grid
from benchmarks.search.grid_figures import Noise, best_by_value, mean_rates, noise_of, one_changed, rates_of, remeasured_best
from benchmarks.search.grid_file import Role, Row
from executor.measurement.timing import student_t_975
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

Known = tuple[Mapping[str, str], Sequence[Row]]
INTRODUCTION = (
    "Written by `make bench` (`benchmarks/search/grid.py`) from `benchmarks/data/reference-grid-*.csv`, our own measurements.",
    "No published study varies ZeRO's bucket sizes, persistence, prefetch and overlap together; here they are crossed with",
    "stage, micro-batch and the parallel degrees. Every configuration was measured once, in an order independent of its",
    "knobs; the reference, some points and the best ten were measured again.",
)


def page(known: Mapping[int, Known]) -> list[str]:
    """Lines of markdown, a section for each number of ranks."""
    lines = ["# Reference grid of ZeRO's knobs", "", *INTRODUCTION]
    for ranks, (header, rows) in known.items():
        lines += ["", f"## {ranks} ranks", "", *(f"- {name}: {value}" for name, value in header.items())]
        lines += _whole(ranks, rows) if any(row.rate for row in rows) else ["", "Nothing ran."]
    return lines


def name_of(config: TrialConfig, knobs: Sequence[str]) -> str:
    """The knobs that differ from the defaults, abbreviated."""
    changes = {name: value for name, value in config.differences(TrialConfig()).items() if name in knobs}
    return ", ".join(f"{name} {value_text(value)}" for name, value in changes.items()) or "every knob at its default"


def value_text(value: Value) -> str:
    """A knob's value as text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= WHOLE:
        return "all"
    return f"{value:,}" if isinstance(value, int) else str(value)


def best_with_intervals(rows: Sequence[Row], noise: Noise) -> list[tuple[TrialConfig, Estimate, int]]:
    """The best ten by measurements after they were chosen: mean rate, half-width by the pooled spread, count."""
    after = rates_of(row for row in rows if row.role is Role.TOP) or rates_of(rows)
    quantile = student_t_975(max(noise.freedom, 1))
    found = []
    for config in remeasured_best(rows, TOP):
        mean = estimate(after[config]).mean
        half = quantile * noise.repeat * mean / math.sqrt(len(after[config])) if noise.freedom else math.inf
        found.append((config, Estimate(mean=mean, half=half), len(after[config])))
    return found


def _whole(ranks: int, rows: Sequence[Row]) -> list[str]:
    grid, noise, knobs = Grid(ranks), noise_of(rows), tuple(DOMAINS[ranks])
    points = [row for row in rows if row.role is Role.POINT]
    return [
        "", *_counts(grid, rows, points), "", *_noise(noise), "", *_twins(grid, rows, noise), "",
        "### Best ten", "", *_best(rows, noise, knobs), "",
        "### What each knob does", "", *_knobs(grid, rows, knobs),
    ]  # fmt: skip


def _counts(grid: Grid, rows: Sequence[Row], points: Sequence[Row]) -> list[str]:
    outcomes = ", ".join(f"{count} {outcome.value}" for outcome, count in Counter(row.outcome for row in points).most_common())
    unstable = sum(row.unstable for row in points)
    rates = [row.rate for row in points if row.rate]
    minutes = sum(row.seconds for row in rows) / 60
    text = (
        f"{len(points)} of {len(grid.points)} points ({outcomes}; {unstable} unstable), {len(rows)} measurements in "
        f"{minutes:.0f} minutes. Rates from {min(rates):.1f} to {max(rates):.1f} samples/s. The points represent all "
        f"{grid.space.count():,} configurations of the space: on one "
        "data-parallel rank ZeRO's knobs have no effect."
    )
    return [text]


def _noise(noise: Noise) -> list[str]:
    text = (
        f"The reference, measured {noise.references} times between the points, has a standard deviation of "
        f"{noise.reference:.1%} (highest over lowest {1 + noise.reference_range:.2f}); from the first to "
        f"the last it drifts by {noise.drift:+.1%} ± {noise.drift_error:.1%}. Repeats of one configuration differ by "
        f"{noise.repeat:.1%} (pooled, {noise.freedom} degrees of freedom), "
        f"of which {noise.within:.1%} is the error within a measurement; {noise.between:.1%} is added between them."
    )
    return [text]


def _twins(grid: Grid, rows: Sequence[Row], noise: Noise) -> list[str]:
    """Whether ZeRO's knobs have no effect with one data-parallel rank."""
    rates = mean_rates(rows)
    logs = [math.log(rates[twin] / rates[other]) for twin in grid.twins if twin in rates
            and (other := grid.representative(twin)) in rates]  # fmt: skip
    if not logs:
        return ["No configuration of one data-parallel rank has been measured together with its representative yet."]
    text = (
        f"{len(logs)} configurations of one data-parallel rank with ZeRO's knobs far from their defaults: rate over that "
        f"of their representative {estimate(logs).signed_percent()}; repeats differ by "
        f"{noise.repeat:.1%}."
    )
    return [text]


def _best(rows: Sequence[Row], noise: Noise, knobs: Sequence[str]) -> list[str]:
    peaks = {row.config: row.peak for row in rows}
    cells = [
        [name_of(config, knobs), f"{rate.mean:.1f} ± {rate.half:.1f}", f"{peaks[config] / 1e6:.1f}", str(count)]
        for config, rate, count in best_with_intervals(rows, noise)
    ]
    return table(["configuration (knobs that differ from the defaults)", "samples/s", "peak, MB", "measured again"], cells)


def _knobs(grid: Grid, rows: Sequence[Row], knobs: Sequence[str]) -> list[str]:
    rates = mean_rates(rows)
    best = max(rates, key=lambda config: rates[config])
    whole, single = best_by_value(rates, knobs, grid.matters), one_changed(rates, best, knobs)
    cells = []
    for knob in knobs:
        ordered = sorted(whole.get(knob, {}).items(), key=lambda item: -item[1])
        shares = ", ".join(f"{value_text(value)} {share:.1%}" for value, share in ordered) or "–"
        moved = ", ".join(f"{value_text(value)} {share - 1:+.1%}" for value, share in single.get(knob, {}).items()) or "–"
        cells.append([f"`{knob}`", value_text(getattr(best, knob)) if grid.matters(knob, best) else "–", shares, moved])
    text = (
        "For each value the best rate with it, all other knobs free, where the knob matters, as a share of the overall best; "
        "and the change of the best configuration's rate when only this knob is changed (– where it has no effect there). "
        f"Sizes: a matrix {SMALL:,}; a bucket of all parameters is `all`."
    )
    return [text, "", *table(["knob", "at the best", "best with each value", "only this knob changed"], cells)]
