"""Which ranks of a trial go to which node."""

import itertools
from collections.abc import Mapping, Sequence

from executor.runners.gang import Work
from search_spaces.mesh import ABBREVIATIONS, TENSOR, make_mesh
from search_spaces.trial import TrialRequest

Layout = list[tuple[str, int]]
"""Nodes in the order of their ranks, each with how many it gets: ranks of a node are consecutive."""


def tensor_span(request: Work) -> int:
    """How many consecutive ranks a tensor-parallel group stretches over: its members and those between them.

    Blocks of so many ranks hold whole groups, whatever the order of the mesh.
    """
    if not isinstance(request, TrialRequest) or request.config.tensor_parallel_size == 1:
        return 1
    mesh = make_mesh(request.config, request.world_size)
    span = 1
    for short in mesh.order.split("-"):
        span *= mesh.size(ABBREVIATIONS[short])
        if ABBREVIATIONS[short] == TENSOR:
            break
    return span if request.world_size % span == 0 else 1  # the engine refuses what does not divide, and tells why


def lay_out(world_size: int, block: int, rooms: Mapping[str, int]) -> Layout | None:
    """Lay `world_size` ranks on nodes that have room for so many each, in whole blocks; None: there is no room.

    1. As few nodes as can be: the roomiest first.
    2. On that many nodes, equal shares where that is possible, because a gang waits for its most crowded link; of the nodes
       that hold a share the tightest, so that the roomy ones stay whole for others.
    3. Else the roomiest nodes in full, and what is left on the tightest node that holds it.

    Of nodes that are alike the first in `rooms` is taken. Ranks go to the nodes in the order of `rooms`.
    """
    usable = {name: room // block * block for name, room in rooms.items() if room >= block}
    falling = sorted(usable, key=lambda name: -usable[name])
    reached = itertools.accumulate(usable[name] for name in falling)
    count = next((number for number, total in enumerate(reached, 1) if total >= world_size), None)
    if count is None:
        return None
    share, left_over = divmod(world_size, count)
    holding = sorted((name for name in usable if usable[name] >= share), key=usable.__getitem__)
    if left_over == 0 and share % block == 0 and len(holding) >= count:
        shares = dict.fromkeys(holding[:count], share)
    else:
        shares = {name: usable[name] for name in falling[: count - 1]}
        rest = world_size - sum(shares.values())
        last = min((name for name in usable if name not in shares and usable[name] >= rest), key=usable.__getitem__)
        shares[last] = rest
    return [(name, shares[name]) for name in rooms if name in shares]


def lay_out_kinds(
    kinds: Sequence[tuple[str, int]], block: int, rooms: Mapping[str, int], resources: Mapping[str, Mapping[str, float]]
) -> Layout | None:
    """Lay ranks on nodes that differ, kind after kind, each on nodes that have its resource; None: there is no room."""
    left, layout = dict(rooms), list[tuple[str, int]]()
    for kind, ranks in kinds:
        part = lay_out(ranks, block, {name: room for name, room in left.items() if resources.get(name, {}).get(kind)})
        if part is None:
            return None
        layout += part
        left |= {name: left[name] - share for name, share in part}
    return layout


def how_often(world_size: int, rooms: Mapping[str, int], most: int) -> int:
    """How many gangs of `world_size` ranks fit side by side, counted up to `most`."""
    left, count = dict(rooms), 0
    while count < most and (layout := lay_out(world_size, 1, left)):
        for name, share in layout:
            left[name] -= share
        count += 1
    return count


def without(excluded: Sequence[str], rooms: Mapping[str, int]) -> dict[str, int]:
    """The rooms of the other nodes."""
    return {name: room for name, room in rooms.items() if name not in excluded}


def too_few_left(world_size: int, excluded: Sequence[str], rooms: Mapping[str, int]) -> str:
    """One line: the nodes that a trial may use do not suffice."""
    left = sum(without(excluded, rooms).values())
    names = ", ".join(name for name in excluded if name in rooms)
    return (
        f"{world_size} ranks are wanted, and there is room for {left} without {names}, which this trial must not use; add nodes"
    )


def why_never(world_size: int, block: int, rooms: Mapping[str, int], kinds: Sequence[tuple[str, int]] = ()) -> tuple[str, str]:
    """The rule and the line by which all nodes together cannot hold a trial."""
    if (total := sum(rooms.values())) < world_size:
        return "world_size", f"the trial wants {world_size} ranks, and the Ray cluster has room for {total}; add nodes"
    if kinds:
        wanted = ", ".join(f"{ranks} ranks on nodes with {kind}" for kind, ranks in kinds)
        return (
            "node_kinds",
            f"the trial wants {wanted}, which the Ray cluster has no room for; start nodes with these resources",
        )
    largest = max(rooms.values(), default=0)
    return "tensor_across_nodes", (
        f"the trial's tensor-parallel groups stretch over {block} ranks each, which the nodes have no room for (the largest "
        f"holds {largest}); use a smaller tensor_parallel_size, or allow such groups across nodes"
    )
