"""Which configurations the equations cannot tell apart, and which of these an expert would try first."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.prediction.equations.step import Z90
from autotune.prediction.planning.buckets import Tuned
from autotune.prediction.planning.scan import APART
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig, Value

RESOLUTION = 0.3
"""Of the spread of step times, what two good configurations are off against each other. At the shipped spread of 0.22 that is
6.6 %: the median over 1,018 pairs of measured configurations of one sweep, both predicted to be within 25 % of the best
[Hagemann et al. 2023: 6.3 %; BigScience BLOOM: 6.7 %]. An error that all predictions of a model share orders nothing."""
PLAIN: Mapping[str, tuple[Value, ...]] = {
    "offload_optimizer": ("none",), "offload_param": ("none",), "offload_activations": (False,),
    "pipeline_schedule": ("1f1b", "interleaved_1f1b"), "pipeline_layout": ("",), "reduce_dtype": ("fp32", "bf16"),
    "gather_dtype": ("same",), "secondary_shard_size": (0,), "context_parallel_method": ("gather",),
    "optimizer": ("adamw",), "precision": ("fp32", "bf16"), "async_tensor_parallel": (False,), "cuda_graphs": (False,),
    "fused_kernels": ("none",), "attention_backend": ("best",),
}  # fmt: skip
"""Knob -> the values that published recipes use as a matter of course; others are chosen for a gain that is certain."""
DIMENSIONS = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
_COUNTED_APART = frozenset({*PLAIN, *DIMENSIONS, *APART, "zero_stage", "micro_batch_size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Configurations between which the equations cannot tell the faster one."""

    first: Tuned
    """The simplest."""
    ties: tuple[Tuned, ...]
    """The others, the fastest first."""


def resolution(time_spread: float) -> float:
    """Relative difference of step times up to which two configurations are a tie."""
    return math.exp(RESOLUTION * time_spread) - 1


def unusual(config: TrialConfig, space: SearchSpace) -> list[str]:
    """Knobs at values that are not plain, of those that the space gives a choice of."""
    return [name for name, plain in PLAIN.items() if _is_choice(name, space) and getattr(config, name) not in plain]


def effort(config: TrialConfig, space: SearchSpace) -> tuple[int, ...]:
    """What is to be least: unusual values, dimensions of parallelism, ranks of a copy, stages a rank, settings off the base's.

    Division of the states and the micro-batch cost nobody anything, and buckets are found by themselves.
    """
    degrees = [getattr(config, name) for name in DIMENSIONS]
    rest = [name for name in space.domains if name not in _COUNTED_APART]
    return (
        len(unusual(config, space)),
        sum(degree > 1 for degree in degrees),
        math.prod(degrees),
        config.virtual_stages,
        sum(getattr(config, name) != getattr(space.base, name) for name in rest),
    )


def plain_parts(space: SearchSpace) -> Iterator[SearchSpace]:
    """The plain part of a space, cut by which dimensions of parallelism are used: together they hold it once."""
    plain = {
        name: tuple(value for value in values if value in PLAIN[name]) or values if name in PLAIN else values
        for name, values in space.domains.items()
    }
    cut = [_sides(name, plain[name]) for name in DIMENSIONS if name in plain]
    for sides in itertools.product(*cut):
        part = dataclasses.replace(space, domains=plain | dict(sides))
        if not part.is_empty():
            yield part


def grouped(found: Sequence[Tuned], space: SearchSpace, time_spread: float, most: int) -> list[Group]:
    """The configurations as groups of ties, each with its simplest first; `found`: the fastest first.

    1. The first group is led by the fastest plain configuration. Unusual values come first only where they gain more than the
       stated uncertainty over every plain one, for only then is the gain certain.
    2. It holds all that are no more than the resolution slower than its leader, and faster ones as far as they tie with it.
    3. The fastest of the rest leads the next group, and so on.
    """
    if not found:
        return []
    tie, certain = 1 + resolution(time_spread), math.exp(Z90 * time_spread)
    plain = next((item for item in found if not unusual(item.config, space)), found[0])
    leader = plain if plain.seconds <= found[0].seconds * certain else found[0]
    groups: list[Group] = []
    rest = list(found)
    while rest and len(groups) < most:
        own = [item for item in rest if leader.seconds / tie <= item.seconds <= leader.seconds * tie]
        first = min(own, key=lambda item: (*effort(item.config, space), item.seconds))
        groups.append(Group(first=first, ties=tuple(item for item in own if item is not first)))
        taken = {id(item) for item in own}
        rest = [item for item in rest if id(item) not in taken]
        leader = rest[0] if rest else leader
    return groups


def _is_choice(name: str, space: SearchSpace) -> bool:
    return any(value in PLAIN[name] for value in space.domains.get(name, ()))


def _sides(name: str, values: Sequence[Value]) -> list[tuple[str, tuple[Value, ...]]]:
    alone, several = tuple(value for value in values if value == 1), tuple(value for value in values if value != 1)
    return [(name, side) for side in (alone, several) if side]
