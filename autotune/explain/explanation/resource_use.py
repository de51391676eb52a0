"""Where the time of the winner's step and the memory of its fullest rank go, and what would exceed the limit first."""

from autotune.explain.explanation.evidence import ExplanationEvidence
from autotune.explain.explanation.findings import MemoryUse, StepActivity, TimeUse
from autotune.prediction.planning.estimate import StepEstimate, estimates
from search_spaces.trial import CollectiveCount, Interval, RankMeasurement
from search_spaces.waiting import waiting_text

UNEXPLAINED = "unexplained"


def time_use(evidence: ExplanationEvidence) -> TimeUse:
    """The measured step, divided into parts by the equations, with what the ranks counted."""
    rate, batch = evidence.rate, evidence.session.request.global_batch_size
    predicted = None if evidence.question is None else estimates(evidence.question, [evidence.config])[0]
    ranks = evidence.winner.result.ranks if evidence.winner.result else ()
    seconds = evidence.step_seconds
    return TimeUse(
        step_seconds=_inverse(rate, batch),
        samples_per_second=rate,
        repeats=evidence.verdict.standings.repeats_of(evidence.winner),
        parts=() if predicted is None else parts_of(predicted, seconds),
        predicted_seconds=None if predicted is None else predicted.step_seconds,
        measured_over_predicted=None if predicted is None else seconds / predicted.step_seconds.mean,
        collectives=_collectives(ranks),
        cpu_seconds=max((rank.cpu_seconds_per_step for rank in ranks), default=None),
    )


def parts_of(predicted: StepEstimate, measured: float) -> tuple[StepActivity, ...]:
    """Parts that sum to the measured step: as predicted, or all scaled down to it; the remainder is a part of its own."""
    scale = min(1.0, measured / predicted.step_seconds.mean)
    parts = {name: seconds * scale for name, seconds in predicted.breakdown_seconds.items()}
    unexplained_seconds = measured - sum(parts.values())
    # A smaller remainder is a rounding error.
    parts[UNEXPLAINED] = unexplained_seconds if unexplained_seconds > 1e-9 * measured else 0.0
    return tuple(StepActivity(name=name, seconds=seconds, share=seconds / measured) for name, seconds in parts.items())


def _inverse(rate: Interval, batch: int) -> Interval:
    """Seconds per step. Where the rate's interval reaches down to 0, the upper end is ten times the mean."""
    longest = 10.0 * batch / rate.mean
    high = min(batch / rate.low, longest) if rate.low > 0 else longest
    return Interval(mean=batch / rate.mean, low=batch / rate.high, high=high)


def _collectives(ranks: tuple[RankMeasurement, ...]) -> tuple[CollectiveCount, ...]:
    """For each operation and dimension, the count of the rank that moves most; most bytes first."""
    most: dict[tuple[str, str], CollectiveCount] = {}
    for collective_count in (collective for rank in ranks for collective in rank.collectives):
        key = (collective_count.mesh_dimension, collective_count.operation)
        if key not in most or (collective_count.bytes, collective_count.count) > (most[key].bytes, most[key].count):
            most[key] = collective_count
    return tuple(sorted(most.values(), key=lambda item: (-item.bytes, item.mesh_dimension, item.operation)))


def waiting_notes(evidence: ExplanationEvidence) -> list[str]:
    """One line if it waits, about the rank that waits longest; none if no rank reports waiting."""
    result = evidence.winner.result
    if result is None or not result.step_seconds:
        return []
    waited = max((rank.data_wait_seconds or 0.0 for rank in result.ranks), default=0.0)
    share = waited * len(result.step_seconds) / sum(result.step_seconds)
    text = waiting_text(share, evidence.session.model, "the winner ")
    return [text] if text else []


def memory_use(evidence: ExplanationEvidence) -> MemoryUse | None:
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
