"""A step of many micro-batches from two steps of few."""

import dataclasses
from collections.abc import Mapping

from executor.dry.result import DryRank
from search_spaces.trial import CollectiveCount


def extrapolate(fewer: DryRank, more: DryRank, micro_batches: int) -> DryRank:
    """The step of `micro_batches`, where each one adds what lies between `fewer` and `more`, which has one more.

    Counts and FLOPs are sums over micro-batches, so that this is exact. So is memory, as long as the peak stays at the same
    point of the step: another micro-batch adds its tokens and its loss to what is held, nothing else.
    """

    def grown(less: int, then: int) -> int:
        return then + (micro_batches - more.micro_batches) * (then - less)

    def grown_tags(less: Mapping[str, int], then: Mapping[str, int]) -> dict[str, int]:
        return {tag: grown(less[tag], then[tag]) for tag in then}

    def grown_count(then: CollectiveCount) -> CollectiveCount:
        less = before[then.operation, then.mesh_dimension]
        return dataclasses.replace(then, count=grown(less.count, then.count), bytes=grown(less.bytes, then.bytes))

    before = {(count.operation, count.mesh_dimension): count for count in fewer.collectives}
    collectives = tuple(grown_count(count) for count in more.collectives)
    flops = None
    if fewer.flops_per_step is not None and more.flops_per_step is not None:
        flops = grown(fewer.flops_per_step, more.flops_per_step)
    by_tag = grown_tags(fewer.memory_by_tag, more.memory_by_tag)
    return dataclasses.replace(
        more,
        micro_batches=micro_batches,
        peak_memory_bytes=sum(by_tag.values()),
        memory_by_tag=by_tag,
        tag_peak_bytes=grown_tags(fewer.tag_peak_bytes, more.tag_peak_bytes),
        flops_per_step=flops,
        collectives=collectives,
    )
