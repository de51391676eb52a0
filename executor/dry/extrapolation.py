"""Extrapolates a step of many micro-batches from two shorter steps."""

import dataclasses

from executor.dry.result import DryRank
from executor.measurement.fewer import Line


def extrapolate(fewer: DryRank, more: DryRank, micro_batches: int) -> DryRank:
    """Return the step of `micro_batches`, assuming that each further one adds the difference between `fewer` and `more`.

    Counts and FLOPs are sums over micro-batches, so this is exact for them. It is exact for memory too, as long as the peak
    stays at the same point of the step: a further micro-batch only adds its tokens and its loss to the live memory.
    """
    line = Line(first=fewer.micro_batches, second=more.micro_batches, full=micro_batches)
    flops = None
    if fewer.flops_per_step is not None and more.flops_per_step is not None:
        flops = line.whole_at_full(fewer.flops_per_step, more.flops_per_step)
    by_tag = line.tags_at_full(fewer.memory_by_tag, more.memory_by_tag)
    return dataclasses.replace(
        more,
        micro_batches=micro_batches,
        peak_memory_bytes=sum(by_tag.values()),
        memory_by_tag=by_tag,
        tag_peak_bytes=line.tags_at_full(fewer.tag_peak_bytes, more.tag_peak_bytes),
        flops_per_step=flops,
        collectives=line.collectives_at_full(fewer.collectives, more.collectives),
    )
