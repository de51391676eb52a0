"""Schedules of the data: the cost of a step at points of a job's schedule, and its mean over the job."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Layouts
from search_spaces.training.data_schedule import UNSCHEDULED_LAYERS, SchedulePosition, points_of
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

Parts = dict[str, Array]
"""Part of a step -> seconds."""


def scheduled(layouts: Layouts, configs: Sequence[TrialConfig], workload: Workload) -> Layouts:
    """Add the points of each configuration's schedule to the layouts; unchanged if nothing is scheduled."""
    points = [points_of(config, workload) for config in configs]
    if not any(len(schedule) > 1 for schedule in points):
        return layouts
    drops = [bool(config.random_ltd_start_tokens) for config in configs]
    columns = np.array(
        [_columns(schedule, dropped) for schedule, dropped in zip(points, drops, strict=True)], dtype=np.float64
    ).T
    names = ("drops", "first_tokens", "first_weight", "middle_tokens", "middle_weight")
    return dataclasses.replace(layouts, **dict(zip(names, columns, strict=True)))


def _columns(points: Sequence[SchedulePosition], drops: bool) -> tuple[float, ...]:
    """The first and the middle point: tokens and weight; the last point has the remaining weight."""
    *earlier, _ = points
    pairs = [(point.kept if drops else point.length, point.weight) for point in earlier]
    first, middle = ([*pairs, (0, 0.0), (0, 0.0)])[:2]
    return (float(drops), *first, *middle)


def at_point(cases: Cases, tokens: Array) -> Cases:
    """`at_tokens` with a constant schedule: a step of only that point, not the mean of the run."""
    point_cases = at_tokens(cases, tokens)
    nothing = np.zeros(1)
    return dataclasses.replace(
        point_cases, layouts=dataclasses.replace(point_cases.layouts, first_weight=nothing, middle_weight=nothing)
    )


def at_tokens(cases: Cases, tokens: Array) -> Cases:
    """The cases at the point of their schedule with `tokens` tokens per sample, or per middle layer; 0: whole sequences."""
    dropped = cases.layouts.drops > 0
    length, kept_tokens = np.where(dropped, 0.0, tokens), np.where(dropped, tokens, 0.0)
    return dataclasses.replace(cases, layouts=dataclasses.replace(cases.layouts, length=length, kept_tokens=kept_tokens))


def over_schedule(cases: Cases, parts_at: Callable[[Cases], Parts]) -> Parts:
    """Mean seconds over the job per step's worth of useful tokens: the weighted seconds of the points, divided by the share of
    a whole step's tokens that their steps train on.
    """
    parts: Parts = {}
    if np.any(cases.layouts.first_weight > 0):
        for weight, point_cases in _points(cases):
            for name, seconds in parts_at(point_cases).items():
                parts[name] = parts.get(name, 0.0) + weight * seconds
    else:
        parts = parts_at(cases)
    share = useful_share(cases)
    return {name: seconds / share for name, seconds in parts.items()}


def useful_share(cases: Cases) -> Array:
    """Tokens that count toward the loss, averaged over the job, as a share of whole samples'."""
    layouts, whole = cases.layouts, cases.shapes.sequence
    missing = layouts.first_weight * (whole - layouts.first_tokens) + layouts.middle_weight * (whole - layouts.middle_tokens)
    return np.where(layouts.drops > 0, 1.0, 1.0 - missing / whole) * cases.shapes.useful


def _points(cases: Cases) -> Iterator[tuple[Array, Cases]]:
    layouts = cases.layouts
    first, middle = layouts.first_weight, layouts.middle_weight
    yield first, at_tokens(cases, layouts.first_tokens)
    if np.any(middle > 0):
        yield middle, at_tokens(cases, layouts.middle_tokens)
    yield 1.0 - first - middle, cases


def trained_tokens(cases: Cases) -> Array:
    """Tokens per sample that layers process; virtual ones are included, since they exclude a schedule."""
    return np.where(cases.layouts.length > 0, cases.layouts.length, cases.shapes.inside)


def rank_tokens(cases: Cases) -> Array:
    """Tokens of a micro-batch on a rank; a sample of preference training has two sequences."""
    samples = cases.layouts.micro_batch_size * cases.transformers.sequences
    return samples * trained_tokens(cases) / cases.layouts.context


def attended_tokens(cases: Cases) -> Array:
    """Number of tokens that attention reads from the last one."""
    length = cases.layouts.length
    return np.where(length > 0, np.minimum(cases.shapes.window, length), cases.shapes.attended)


def drops_tokens(cases: Cases) -> bool:
    """Whether some layers of some cases process only some of the tokens."""
    return bool(np.any(cases.layouts.kept_tokens > 0))


def with_kept_tokens(cases: Cases) -> Cases:
    """The cases as if samples had only as many tokens as a middle layer processes."""
    layouts = cases.layouts
    return dataclasses.replace(cases, layouts=dataclasses.replace(layouts, length=layouts.kept_tokens, kept_tokens=np.zeros(1)))


def middle_share(cases: Cases) -> Array:
    """Share of the layers that process only some of the tokens."""
    layers = cases.shapes.layers
    return np.where(cases.layouts.kept_tokens > 0, np.maximum(layers - UNSCHEDULED_LAYERS, 0.0) / layers, 0.0)
