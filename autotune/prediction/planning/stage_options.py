"""The possible contents of a pipeline rank with their predictions: the columns of the integer program."""

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
from autotune.prediction.equations.uneven import Paces, RankShare, on_own_device, paces_of, rank_seconds
from autotune.prediction.planning.memory_fit import Room

ALWAYS = scalar(1)
MOST = 400_000
"""Maximum number of choices in a program; 80 layers on 16 ranks have 70,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices, each for one rank. Arrays with one element per choice."""

    rank: NDArray[np.int64]
    device: NDArray[np.int64]
    """Of the rank: index in `Cases.devices`."""
    layers: NDArray[np.int64]
    policy: NDArray[np.int64]
    """Index in `RECOMPUTE`."""
    again: NDArray[np.int64]
    """Recomputed layers."""
    offloads: NDArray[np.int64]
    """1 if the optimizer state is in host memory."""
    work: Array
    """Seconds of a micro-batch in the rank's layers and its output projection."""
    pace: Array
    """Total seconds of a micro-batch on the rank."""

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, chosen: NDArray[np.int64] | Flags) -> "Options":
        """A subset of the choices."""
        return Options(**{item.name: getattr(self, item.name)[chosen] for item in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEnd:
    """Properties of a pipeline rank besides its layers."""

    first: bool
    """The input table."""
    last: bool
    """The output projection."""
    device: int
    """Index of its device in `Cases.devices`; 0 if all devices are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Menu:
    """Choices for a rank besides its number of layers."""

    policies: tuple[str, ...] = RECOMPUTE
    offloads: bool = False
    """Whether each rank's optimizer state may be offloaded individually."""


def too_many(layers: int, ranks: int, virtual: int, menu: Menu) -> bool:
    """Whether a pipeline has more choices than `MOST`: they grow with the square of the layers."""
    most = layers - virtual * (ranks - 1)
    again = sum(1 for policy in menu.policies if policy != "none")
    return ranks * (most * (most + 1) // 2 * again + most) * (2 if menu.offloads else 1) > MOST


def options_of(cases: Cases, rates: Coefficients, ends: Sequence[PipelineEnd], least: int, menu: Menu, room: Room) -> Options:
    """All choices of every rank that fit its memory; of those with equal layers and offloading, the fastest.

    Args:
        cases: one configuration.
        rates: coefficients.
        ends: of each rank.
        least: minimum layers of a rank: one for each of its stages.
        menu: the possible choices.
        room: memory limits of a rank.
    """
    most = int(cases.shapes.layers[0]) - least * (len(ends) - 1)
    columns = _columns(least, most, menu)
    paces = paces_of(cases, rates)
    parts = [_of_rank(cases, rates, paces, rank, end, columns, room) for rank, end in enumerate(ends)]
    return _fastest(
        Options(
            **{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in dataclasses.fields(Options)}
        )
    )


def seconds_after(cases: Cases, rates: Coefficients, options: Options, pace: float) -> Array:
    """For each choice, the seconds from the end of the micro-batches to the end of the step; `pace`: of the slowest rank."""
    nothing = scalar(0)
    share = RankShare(
        pipeline_rank=options.rank.astype(np.float64), layers=options.layers.astype(np.float64), selective=nothing,
        full=nothing, offloaded=options.offloads.astype(np.float64), first=nothing, last=nothing,
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
    """Layers, policy, recomputed layers, offloaded: one row per choice."""
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
    cases: Cases,
    rates: Coefficients,
    paces: Sequence[Paces],
    rank: int,
    end: PipelineEnd,
    columns: NDArray[np.int64],
    room: Room,
) -> Options:
    layers, policy, again, offloads = columns.T
    share = RankShare(
        pipeline_rank=scalar(rank), layers=layers.astype(np.float64), selective=1.0 * again * (policy == 1),
        full=1.0 * again * (policy == 2), offloaded=offloads.astype(np.float64), first=scalar(end.first), last=scalar(end.last),
        device=scalar(end.device),
    )  # fmt: skip
    usage = share_memory(cases, rates, share, (ALWAYS, ALWAYS))
    fits = np.broadcast_to(room.holds(usage.needed, usage.host), layers.shape)
    compute, tensor = rank_seconds(paces, share, ALWAYS)
    work = compute + tensor
    pace = work + on_own_device(share, [device_paces.knobs.embedding for device_paces in paces])
    return Options(
        rank=np.full(layers.shape, rank), device=np.full(layers.shape, end.device), layers=layers, policy=policy,
        again=again, offloads=offloads, work=np.broadcast_to(work, layers.shape), pace=np.broadcast_to(pace, layers.shape),
    ).take(fits)  # fmt: skip
