"""The communication cases of a micro-benchmark: collectives by payload, within a node and across nodes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.engine import RankContext
from executor.measurement.kernels import KernelCase, Run
from executor.parallel.collectives import all_gather_single, group_options, reduce_scatter_single
from search_spaces.clusters.microbenchmark import COLLECTIVES, GroupShape, Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGroup:
    """A group of this rank. All groups of the same shape communicate at the same time."""

    shape: GroupShape
    ranks: tuple[int, ...]
    handle: dist.ProcessGroup


def group_layouts(hosts: Sequence[str]) -> list[tuple[GroupShape, list[tuple[int, ...]]]]:
    """Return the group shapes with the groups of each: the ranks of a node, one rank of each node, all ranks.

    If nodes have unequal numbers of ranks, there is only the group of all ranks.
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    members = list(nodes.values())
    per_node, equal = len(members[0]), len({len(ranks) for ranks in members}) == 1
    layouts = []
    if per_node > 1 and equal:
        layouts.append((GroupShape(ranks=per_node, in_node=per_node), [tuple(ranks) for ranks in members]))
    if len(members) > 1:
        if per_node > 1 and equal:
            shape = GroupShape(ranks=len(members), in_node=1, sharing=per_node)
            layouts.append((shape, [tuple(column) for column in zip(*members, strict=True)]))
        largest = max(len(ranks) for ranks in members)
        layouts.append((GroupShape(ranks=len(hosts), in_node=min(per_node, largest)), [tuple(range(len(hosts)))]))
    return layouts


def open_groups(context: RankContext, hosts: Sequence[str]) -> list[LinkGroup]:
    """Create the groups. Every rank creates all of them in the same order, as the backends require."""
    mine = []
    for shape, groups in group_layouts(hosts):
        for ranks in groups:
            handle = dist.new_group(list(ranks), pg_options=group_options(dist.get_backend()))
            if context.rank in ranks:
                mine.append(LinkGroup(shape=shape, ranks=ranks, handle=handle))
    return mine


def close_groups(groups: Sequence[LinkGroup]) -> None:
    """Destroy the groups."""
    for group in groups:
        dist.destroy_process_group(group.handle)


def link_cases(context: RankContext, groups: Sequence[LinkGroup], largest_bytes: int) -> Iterator[KernelCase]:
    """Yield every collective over every group, small messages first."""
    size = 4096
    while size <= largest_bytes:
        for group in groups:
            for operation in COLLECTIVES:
                yield _case(context, group, operation, size)
        size *= 4


def _case(context: RankContext, group: LinkGroup, operation: Operation, size: int) -> KernelCase:
    ranks = len(group.ranks)
    elements = max(size // 4 // ranks, 1) * ranks
    make = {
        Operation.ALL_REDUCE: _all_reduce,
        Operation.ALL_GATHER: _all_gather,
        Operation.REDUCE_SCATTER: _reduce_scatter,
        Operation.ALL_TO_ALL: _all_to_all,
        Operation.SEND: _send,
    }[operation]
    return KernelCase(
        operation=operation,
        precision="fp32",
        shape=(4 * elements,),
        cost=4.0 * elements + 2.0**16,  # below about 64 kB the time of a message does not depend on its size
        memory=12.0 * elements,
        make=lambda: make(context, group, elements),
        group=group.shape,
    )


def _all_reduce(context: RankContext, group: LinkGroup, elements: int) -> Run:
    value = torch.zeros(elements, device=context.device)
    return lambda: dist.all_reduce(value, group=group.handle)


def _all_gather(context: RankContext, group: LinkGroup, elements: int) -> Run:
    return _uneven(context, group, elements, lambda whole, part: all_gather_single(whole, part, group=group.handle))


def _reduce_scatter(context: RankContext, group: LinkGroup, elements: int) -> Run:
    return _uneven(context, group, elements, lambda whole, part: reduce_scatter_single(part, whole, group=group.handle))


def _uneven(
    context: RankContext, group: LinkGroup, elements: int, start: Callable[[torch.Tensor, torch.Tensor], object]
) -> Run:
    whole = torch.zeros(elements, device=context.device)
    part = torch.zeros(elements // len(group.ranks), device=context.device)
    return lambda: start(whole, part)


def _all_to_all(context: RankContext, group: LinkGroup, elements: int) -> Run:
    sent = torch.zeros(elements, device=context.device)
    received = torch.zeros_like(sent)
    return lambda: dist.all_to_all_single(received, sent, group=group.handle)


def _send(context: RankContext, group: LinkGroup, elements: int) -> Run:
    """Ranks at even positions send to the next rank. If their number is odd, the last one is idle."""
    position, value = group.ranks.index(context.rank), torch.zeros(elements, device=context.device)
    if position % 2:
        return lambda: dist.recv(value, src=group.ranks[position - 1], group=group.handle)
    if position + 1 < len(group.ranks):
        return lambda: dist.send(value, dst=group.ranks[position + 1], group=group.handle)
    return lambda: None
