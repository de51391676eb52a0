"""Where the memory of the winner's fullest rank goes, and what would exceed its limit first."""

from autotune.explain.explanation.evidence import Evidence
from autotune.explain.explanation.findings import MemoryUse


def memory_use(evidence: Evidence) -> MemoryUse | None:
    """The measured memory use; None: no rank reported it."""
    ranks = evidence.winner.result.ranks if evidence.winner.result else ()
    if not ranks:
        return None
    fullest = max(ranks, key=lambda rank: rank.needed_memory_bytes)
    ranking = evidence.session.ranking
    by_tag = dict(sorted(fullest.memory_by_tag.items(), key=lambda item: -item[1]))
    limit, free, first, factor = ranking.memory_limit_bytes, None, None, None
    if limit is not None:
        free = int(ranking.capacity_bytes) - fullest.needed_memory_bytes
        first = next((tag for tag, size in by_tag.items() if size > 0), None)
        factor = None if first is None else max((by_tag[first] + free) / by_tag[first], 0.0)
    return MemoryUse(
        rank=fullest.rank,
        peak_bytes=fullest.peak_memory_bytes,
        by_tag=by_tag,
        limit_bytes=limit,
        headroom=ranking.headroom,
        free_bytes=free,
        breaks_first=first,
        breaks_at=factor,
        reserved_bytes=fullest.reserved_bytes,
        outside_bytes=fullest.non_torch_bytes,
    )
