"""What a rank of a pipeline may hold, and what is predicted of each choice: the columns of the integer program."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import RECOMPUTE, Array, Cases, Flags, scalar
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import share_memory
from autotune.prediction.equations.step import after_backward
from autotune.prediction.equations.uneven import Paces, RankShare, paces_of, rank_seconds, where_it_runs
from autotune.prediction.planning.room import Room

ALWAYS = scalar(1)
MOST = 400_000
"""Choices that a program is made of at most; 80 layers on 16 ranks have 70,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices, each for one rank. Arrays of one element a choice."""

    rank: NDArray[np.int64]
    device: NDArray[np.int64]
    """Of the rank: place in `Cases.devices`."""
    layers: NDArray[np.int64]
    policy: NDArray[np.int64]
    """Place in `RECOMPUTE`."""
    again: NDArray[np.int64]
    """Layers that are computed again."""
    offloads: NDArray[np.int64]
    """1 where the optimizer state is in host memory."""
    work: Array
    """Seconds of a micro-batch in the rank's layers and its output projection."""
    pace: Array
    """Seconds of a micro-batch on the rank, all told."""

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, chosen: NDArray[np.int64] | Flags) -> "Options":
        """Some of them."""
        return Options(**{item.name: getattr(self, item.name)[chosen] for item in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What a rank of the pipeline has beside its layers."""

    first: bool
    """The input table."""
    last: bool
    """The output projection."""
    device: int
    """Place in `Cases.devices` of what it runs on; 0 where all devices are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """What may be chosen for a rank beside its layers."""

    policies: tuple[str, ...] = RECOMPUTE
    offloads: bool = False
    """Whether a rank's optimizer state may be in host memory, the others' on their devices."""


def too_many(layers: int, ranks: int, virtual: int, menu: Menu) -> bool:
    """Whether a pipeline has more choices than a program is made of: they grow with the square of the layers."""
    most = layers - virtual * (ranks - 1)
    again = sum(1 for policy in menu.policies if policy != "none")
    return ranks * (most * (most + 1) // 2 * again + most) * (2 if menu.offloads else 1) > MOST


def options_of(cases: Cases, rates: Coefficients, ends: Sequence[End], least: int, menu: Menu, room: Room) -> Options:
    """Every choice of every rank that its memory holds, the fastest of those that have as many layers and offload alike.

    Args:
        cases: one configuration.
        rates: what predicts it.
        ends: of each rank.
        least: layers of a rank: one for each of its stages.
        menu: what may be chosen.
        room: what a rank may come to.
    """
    most = int(cases.shapes.layers[0]) - least * (len(ends) - 1)
    columns = _columns(least, most, menu)
    paces = paces_of(cases, rates)
    found = [_of_rank(cases, rates, paces, place, end, columns, room) for place, end in enumerate(ends)]
    return _fastest(
        Options(
            **{item.name: np.concatenate([getattr(part, item.name) for part in found]) for item in dataclasses.fields(Options)}
        )
    )


def seconds_after(cases: Cases, rates: Coefficients, options: Options, pace: float) -> Array:
    """Of each choice, from the end of the micro-batches to the end of the step, where the slowest rank takes `pace` for one."""
    nothing = scalar(0)
    share = RankShare(
        place=options.rank.astype(np.float64), layers=options.layers.astype(np.float64), selective=nothing, full=nothing,
        offloaded=options.offloads.astype(np.float64), first=nothing, last=nothing,
        device=options.device.astype(np.float64),
    )  # fmt: skip
    after = reduce(np.add, after_backward(cases, rates, share, ALWAYS, scalar(pace)).values())
    return np.broadcast_to(after, len(options))


def _fastest(options: Options) -> Options:
    order = np.lexsort((options.pace, options.offloads, options.layers, options.rank))
    keys = np.column_stack([options.rank, options.layers, options.offloads])[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return options.take(order[first])


def _columns(least: int, most: int, menu: Menu) -> NDArray[np.int64]:
    """Layers, policy, layers computed again, offloaded: a row for each choice there is."""
    policies = [RECOMPUTE.index(policy) for policy in menu.policies]
    rows = [
        (layers, policy, again, offloads)
        for layers in range(least, most + 1)
        for policy in policies
        for again in (range(1, layers + 1) if policy else (0,))
        for offloads in ((0, 1) if menu.offloads else (0,))
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _of_rank(
    cases: Cases, rates: Coefficients, paces: Sequence[Paces], place: int, end: End, columns: NDArray[np.int64], room: Room
) -> Options:
    layers, policy, again, offloads = columns.T
    share = RankShare(
        place=scalar(place), layers=layers.astype(np.float64), selective=1.0 * again * (policy == 1),
        full=1.0 * again * (policy == 2), offloaded=offloads.astype(np.float64), first=scalar(end.first), last=scalar(end.last),
        device=scalar(end.device),
    )  # fmt: skip
    held = share_memory(cases, rates, share, (ALWAYS, ALWAYS))
    fits = np.broadcast_to(room.holds(held.needed, held.host), layers.shape)
    compute, tensor = rank_seconds(paces, share, ALWAYS)
    work = compute + tensor
    pace = work + where_it_runs(share, [own.knobs.embedding for own in paces])
    return Options(
        rank=np.full(layers.shape, place), device=np.full(layers.shape, end.device), layers=layers, policy=policy,
        again=again, offloads=offloads, work=np.broadcast_to(work, layers.shape), pace=np.broadcast_to(pace, layers.shape),
    ).take(fits)  # fmt: skip
