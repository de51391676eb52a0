"""Assigns the ranks of a trial to nodes."""

import itertools
from collections.abc import Mapping, Sequence

from executor.runners.gang import Work
from search_spaces.mesh import ABBREVIATIONS, TENSOR, make_mesh
from search_spaces.trial import TrialRequest

Layout = list[tuple[str, int]]
"""Nodes in the order of their ranks, each with its number of ranks. Ranks of a node are consecutive."""


def tensor_span(request: Work) -> int:
    """Return how many consecutive ranks a tensor-parallel group spans: its members and the ranks between them.

    Blocks of this size contain whole groups, whatever the order of the mesh.
    """
    if not isinstance(request, TrialRequest) or request.config.tensor_parallel_size == 1:
        return 1
    mesh = make_mesh(request.config, request.world_size)
    span = 1
    for short in mesh.order.split("-"):
        span *= mesh.size(ABBREVIATIONS[short])
        if ABBREVIATIONS[short] == TENSOR:
            break
    return span if request.world_size % span == 0 else 1  # the engine refuses indivisible sizes, with the reason


def lay_out(world_size: int, block: int, capacities: Mapping[str, int]) -> Layout | None:
    """Place `world_size` ranks on nodes with these capacities, in whole blocks; None: they do not fit.

    1. Use as few nodes as possible, counting the largest capacities first.
    2. On that many nodes, use equal shares if possible, because a gang waits for its most crowded link. Of the nodes that can
       hold a share take those with the smallest capacity, so that larger ones stay free for others.
    3. Otherwise fill the largest nodes, and place the rest on the smallest node that can hold it.

    Of equal nodes the first in `capacities` is taken. Ranks are assigned to the nodes in the order of `capacities`.
    """
    usable = {name: capacity // block * block for name, capacity in capacities.items() if capacity >= block}
    descending = sorted(usable, key=lambda name: -usable[name])
    reached = itertools.accumulate(usable[name] for name in descending)
    count = next((number for number, total in enumerate(reached, 1) if total >= world_size), None)
    if count is None:
        return None
    share, left_over = divmod(world_size, count)
    holding = sorted((name for name in usable if usable[name] >= share), key=usable.__getitem__)
    if left_over == 0 and share % block == 0 and len(holding) >= count:
        shares = dict.fromkeys(holding[:count], share)
    else:
        shares = {name: usable[name] for name in descending[: count - 1]}
        remainder = world_size - sum(shares.values())
        last = min((name for name in usable if name not in shares and usable[name] >= remainder), key=usable.__getitem__)
        shares[last] = remainder
    return [(name, shares[name]) for name in capacities if name in shares]


def lay_out_kinds(
    kinds: Sequence[tuple[str, int]], block: int, capacities: Mapping[str, int], resources: Mapping[str, Mapping[str, float]]
) -> Layout | None:
    """Place ranks on nodes of different kinds, each kind on nodes with its resource; None: they do not fit."""
    free_slots, layout = dict(capacities), list[tuple[str, int]]()
    for kind, ranks in kinds:
        part = lay_out(ranks, block, {name: free for name, free in free_slots.items() if resources.get(name, {}).get(kind)})
        if part is None:
            return None
        layout += part
        free_slots |= {name: free_slots[name] - share for name, share in part}
    return layout


def count_gangs(world_size: int, capacities: Mapping[str, int], most: int) -> int:
    """Return how many gangs of `world_size` ranks fit side by side, at most `most`."""
    free_slots, count = dict(capacities), 0
    while count < most and (layout := lay_out(world_size, 1, free_slots)):
        for name, share in layout:
            free_slots[name] -= share
        count += 1
    return count


def without(excluded: Sequence[str], capacities: Mapping[str, int]) -> dict[str, int]:
    """Return the capacities of the nodes that are not excluded."""
    return {name: capacity for name, capacity in capacities.items() if name not in excluded}


def explain_exclusion(world_size: int, excluded: Sequence[str], capacities: Mapping[str, int]) -> str:
    """Return one line: the nodes that a trial may use do not suffice."""
    free_slots = sum(without(excluded, capacities).values())
    names = ", ".join(name for name in excluded if name in capacities)
    return (
        f"{world_size} ranks are needed, but there is room for {free_slots} without {names}, "
        "which this trial must not use; add nodes"
    )


def explain_impossible(
    world_size: int, block: int, capacities: Mapping[str, int], kinds: Sequence[tuple[str, int]] = ()
) -> tuple[str, str]:
    """Return the rule and the message for a trial that does not fit on all nodes together."""
    if (total := sum(capacities.values())) < world_size:
        return "world_size", f"the trial needs {world_size} ranks, but the Ray cluster has room for {total}; add nodes"
    if kinds:
        needed = ", ".join(f"{ranks} ranks on nodes with {kind}" for kind, ranks in kinds)
        return (
            "node_kinds",
            f"the trial needs {needed}, which the Ray cluster has no room for; start nodes with these resources",
        )
    largest = max(capacities.values(), default=0)
    return "tensor_across_nodes", (
        f"the trial's tensor-parallel groups span {block} ranks each, which the nodes have no room for (the largest "
        f"holds {largest}); use a smaller tensor_parallel_size, or allow such groups across nodes"
    )
