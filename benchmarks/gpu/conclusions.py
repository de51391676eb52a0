"""Claims over all lines of grid and sweep: predictions against measurements of all measured points."""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.design import DOMAINS, Pair, pairs_of, space_of
from benchmarks.gpu.grid import DRY, MEASURED, PART, PREDICTED, REFERENCE
from benchmarks.gpu.intervals import FEWEST, median_of, rank_correlation, share
from benchmarks.gpu.lines import Claim, Line, State
from benchmarks.gpu.proof import at_least, at_most, written
from benchmarks.gpu.sweep import PART as SWEEP_PART
from benchmarks.gpu.sweep import PREDICTIONS
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

Known = Mapping[tuple[str, str], Line]
DRY_BOUND = 0.02
CORRELATION, COVERAGE, VERDICTS = 0.7, 0.8, 0.9
"""Lower bounds: rank correlation of predicted and measured times; coverage of 90 % bands; share of right memory verdicts."""


def points_of(known: Known) -> dict[str, dict[str, Any]]:
    """Label -> values of its dry run, prediction and measurement; None where there is no line."""
    labels = dict.fromkeys(
        item.removeprefix(prefix) for part, item in known if part == PART for prefix in (PREDICTED, MEASURED) if
        item.startswith(prefix)
    )  # fmt: skip
    kinds = {"dry": DRY, "predicted": PREDICTED, "measured": MEASURED}
    found: dict[str, dict[str, Any]] = {}
    for label in labels:
        lines = {kind: known.get((PART, prefix + label)) for kind, prefix in kinds.items()}
        found[label] = {kind: None if line is None else line.values for kind, line in lines.items()}
    return found


def of_grid(known: Known, size: str, on_gpu: bool) -> list[Claim]:
    """Claims about the grid; on a CPU none about times."""
    points = [point for point in points_of(known).values() if point["measured"] and point["measured"].get("outcome")]
    ran = [point for point in points if "peak" in point["measured"]]
    claims = [_pairs(ran, size)] if ran else []
    dry = [
        abs(point["dry"]["peak"] / point["measured"]["peak"] - 1) for point in ran if point["dry"] and "peak" in point["dry"]
    ]
    claims.append(_few("errors of dry runs", len(dry)) or _dry(dry))
    both = [(point["predicted"], point["measured"]) for point in ran if point["predicted"]]
    claims += _times([(one["seconds"], other["seconds"]) for one, other in both], "with shipped coefficients", on_gpu)
    claims.append(_coverage([(one["peak"], _in_use(other)) for one, other in both], "peaks of memory in use", True))
    verdicts = [
        (point["predicted"]["fit_probability"] >= 0.5) == (point["measured"]["outcome"] == Outcome.OK)
        for point in points
        if point["predicted"]
    ]
    if verdicts:
        right = share(sum(verdicts), len(verdicts))
        text = f"share of {len(verdicts)} points whose fit was predicted correctly, at least {VERDICTS:g} is claimed"
        claims.append(_claim(at_least(right, VERDICTS), f"{text}: {written(right)}"))
    again = [line.values["seconds"] for (part, item), line in known.items() if part == PART and item.startswith(REFERENCE)
             and "seconds" in line.values]  # fmt: skip
    if len(again) > 1:
        text = f"one point, measured {len(again)} times over the run: slowest over fastest {max(again) / min(again):.3f}"
        claims.append(_claim(State.MEASURED, text))
    return claims


def _in_use(measured: Mapping[str, Any]) -> int:
    """Bytes of the device in use, which predictions are of: reserved by the allocator, and outside. On a CPU, the peak."""
    reserved, outside = measured.get("reserved"), measured.get("outside")
    return int(measured["peak"]) if reserved is None or outside is None else int(reserved) + int(outside)


def of_sweep(known: Known, on_gpu: bool) -> list[Claim]:
    """Claims about predictions with calibrated coefficients."""
    line, points = known.get((SWEEP_PART, PREDICTIONS)), points_of(known)
    predicted = line.values.get("predicted", {}) if line else {}
    both = [
        (prediction["seconds"], points[label]["measured"]["seconds"])
        for label, prediction in predicted.items()
        if points.get(label, {}).get("measured") and "seconds" in points[label]["measured"]
    ]
    return _times(both, "after `autotune calibrate`", on_gpu)


def _dry(errors: list[float]) -> Claim:
    median = median_of(errors)
    text = f"median error of the dry run's peak over {len(errors)} points, at most {DRY_BOUND:g} is claimed: {written(median)}"
    return _claim(at_most(median, DRY_BOUND), f"{text}; the largest is {max(errors):.3f}")


def _times(both: list[tuple[dict[str, float], float]], how: str, on_gpu: bool) -> list[Claim]:
    few = _few(f"step times {how}", len(both))
    if few is not None:
        return [few]
    ranks = rank_correlation([one["mean"] for one, _ in both], [other for _, other in both])
    error = median_of([abs(one["mean"] / other - 1) for one, other in both])
    state = at_least(ranks, CORRELATION) if on_gpu else State.MEASURED
    claimed = f"at least {CORRELATION:g} is claimed{'' if on_gpu else ' on a GPU'}"
    text = f"rank correlation of predicted and measured step times {how}, {len(both)} points, {claimed}"
    return [
        _claim(state, f"{text}: {written(ranks)}"),
        _claim(State.MEASURED, f"median error of step times {how}: {written(error)}"),
        _coverage(both, f"step times {how}", on_gpu),
    ]


def _coverage(both: list[tuple[dict[str, float], float]], what: str, claimed: bool) -> Claim:
    few = _few(f"bands of {what}", len(both))
    if few is not None:
        return few
    held = share(sum(one["low"] <= other <= one["high"] for one, other in both), len(both))
    state = at_least(held, COVERAGE) if claimed else State.MEASURED
    where = "" if claimed else " on a GPU"
    return _claim(
        state, f"share of {len(both)} {what} in their 90 % bands, at least {COVERAGE:g} is claimed{where}: {written(held)}"
    )


def _pairs(ran: list[dict[str, Any]], size: str) -> Claim:
    """How much of the space the points that ran cover."""
    knobs = tuple(DOMAINS[size])
    legal = set[Pair]().union(*(pairs_of(config, knobs) for config in space_of(size).enumerate()))
    configs = [TrialConfig().replace(point["measured"]["config"]) for point in ran]
    seen = set[Pair]().union(*(pairs_of(config, knobs) for config in configs))
    of = f"{len(legal)} legal pairs of values of two of {len(knobs)} knobs"
    return _claim(State.MEASURED, f"{len(ran)} points ran; they cover {len(seen & legal)} of {of}")


def _few(what: str, count: int) -> Claim | None:
    return _claim(State.NOT_RUN, f"{what}: {count} points are fewer than {FEWEST}") if count < FEWEST else None


def _claim(state: State, text: str) -> Claim:
    return Claim(state=state, text=text)
