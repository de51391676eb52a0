"""Which configurations the equations cannot distinguish, and which of these an expert would try first."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.prediction.equations.step import Z90
from autotune.prediction.planning.buckets import Tuned
from autotune.prediction.planning.scan import NOT_SCANNED
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

RESOLUTION = 0.3
"""Relative error between two good configurations, as a share of the spread of step times. The median over 1,018 pairs of
measured configurations of one sweep, both predicted within 25 % of the best, was 6.5 % when the spread was 0.22 [Hagemann et
al. 2023: 6.3 %; BigScience BLOOM: 6.7 %]. An error common to a model's predictions does not affect the order."""
PLAIN: Mapping[str, tuple[Value, ...]] = {knob.name: knob.plain for knob in KNOBS.values() if knob.plain}
"""Knob -> the values that published recipes use by default; others are chosen only for a certain gain."""
DIMENSIONS = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedConfigs:
    """Configurations whose times the equations cannot distinguish."""

    first: Tuned
    """The fastest."""
    ties: tuple[Tuned, ...] = ()
    """The others, fastest first."""
    simplest: Tuned | None = None
    """The one of `ties` that an expert would try first; None: that is the fastest itself."""


def resolution(time_spread: float) -> float:
    """Relative difference of step times up to which two configurations tie."""
    return math.exp(RESOLUTION * time_spread) - 1


def certain_gain(time_spread: float) -> float:
    """Relative gain over every plain configuration from which an unusual value leads."""
    return math.exp(Z90 * time_spread) - 1


def unusual(config: TrialConfig, space: SearchSpace) -> list[str]:
    """Knobs at values that are not plain, if the space offers plain ones."""
    changed = {name: plain for name, plain in PLAIN.items() if getattr(config, name) not in plain}
    return [name for name, plain in changed.items() if any(value in plain for value in space.domains.get(name, ()))]


def effort(config: TrialConfig, space: SearchSpace) -> tuple[int, ...]:
    """The sort key, lower is better: unusual values, dimensions of parallelism, ranks per copy, stages per rank, other changed
    settings.

    Sharding of the states and the micro-batch add no complexity, and buckets are set automatically.
    """
    degrees = [getattr(config, name) for name in DIMENSIONS]
    counted = {*PLAIN, *DIMENSIONS, *NOT_SCANNED, "zero_stage", "micro_batch_size"}
    other_names = [name for name in space.domains if name not in counted]
    return (
        len(unusual(config, space)),
        sum(degree > 1 for degree in degrees),
        math.prod(degrees),
        config.virtual_stages,
        sum(getattr(config, name) != getattr(space.base, name) for name in other_names),
    )


def plain_parts(space: SearchSpace) -> Iterator[dict[str, frozenset[Value]]]:
    """The plain part of a space, split by the dimensions of parallelism in use: the parts are disjoint and cover it.

    Of each part, the values of the knobs. A knob without effect has its default, which is a plain value.
    """
    plain = {
        name: frozenset({*allowed, KNOBS[name].default})
        for name, values in space.domains.items()
        if name in PLAIN and (allowed := [value for value in values if value in PLAIN[name]])
    }
    sides_of = [
        [(name, side) for side in (frozenset({1} & {*values}), frozenset({*values} - {1})) if side]
        for name in DIMENSIONS
        if (values := space.domains.get(name)) is not None
    ]
    for sides in itertools.product(*sides_of):
        yield plain | dict(sides)


def grouped(candidates: Sequence[Tuned], space: SearchSpace, time_spread: float, most: int) -> list[TiedConfigs]:
    """Group the configurations into ties; `candidates`: fastest first.

    The fastest leads the first group, which has all that are at most the resolution slower. The fastest of the rest leads the
    next group, and so on.
    """
    tie = 1 + resolution(time_spread)
    groups: list[TiedConfigs] = []
    remaining = list(candidates)
    while remaining and len(groups) < most:
        count = sum(item.seconds <= remaining[0].seconds * tie for item in remaining)
        (first, *ties), remaining = remaining[:count], remaining[count:]
        simplest = min([first, *ties], key=lambda item: (*effort(item.config, space), item.seconds))
        groups.append(TiedConfigs(first=first, ties=tuple(ties), simplest=None if simplest is first else simplest))
    return groups
