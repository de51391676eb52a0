"""Where the winner's time and memory go, and what limits it: other hardware, more memory per rank."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.explain.evidence import ExplanationEvidence, WinnerOutlook
from autotune.explain.findings import Bound, Limits, MemoryUse, MoreMemory, StepActivity, TimeUse, Upgrade, limits_text
from autotune.explain.knob_findings import LIKELY
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.step import Z90, predict, seconds_of
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.question import Question
from autotune.strategies.guided.described import CandidatePool
from search_spaces.placeholders import waiting_text
from search_spaces.trial import CollectiveCount, Interval, RankMeasurement

UNEXPLAINED = "unexplained"


def time_use(evidence: ExplanationEvidence) -> TimeUse:
    """The measured step, divided into parts by the equations, with what the ranks counted."""
    rate, batch = evidence.rate, evidence.session.request.global_batch_size
    predicted = None if evidence.question is None else estimates(evidence.question, [evidence.config])[0]
    ranks = evidence.winner.result.ranks if evidence.winner.result else ()
    seconds = evidence.step_seconds
    # Where the rate's interval reaches down to 0, the upper end is ten times the mean.
    longest = 10.0 * batch / rate.mean
    high = min(batch / rate.low, longest) if rate.low > 0 else longest
    return TimeUse(
        step_seconds=Interval(mean=batch / rate.mean, low=batch / rate.high, high=high),
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


FREE = 1e9
"""Speed-up factor at which a resource costs nothing."""


class Counterfactual:
    """Predicts the winner's step under changes."""

    def __init__(self, evidence: ExplanationEvidence, question: Question) -> None:
        self._cases = cases_of(
            question.model, question.cluster, question.workload, [evidence.config], question.engine, question.arguments
        )
        self._rates = question.rates
        self._predicted = self.seconds()
        self.measured = evidence.step_seconds

    def seconds(self, times: Mapping[str, float] | None = None, without: tuple[str, ...] = ()) -> float:
        """Predicted seconds of a step: hardware figures multiplied by `times`, coefficients in `without` set to almost 0."""
        return float(seconds_of(*self._changed(times or {}, without))[0])

    def part(self, name: str, times: Mapping[str, float], without: tuple[str, ...]) -> float:
        """Predicted seconds of one part of the step, changed as in `seconds`."""
        return float(predict(*self._changed(times, without)).parts[name][0])

    @property
    def scale(self) -> float:
        """Factor for predicted seconds: below 1 where the prediction exceeds the measurement. All parts shrink alike."""
        return min(1.0, self.measured / self._predicted)

    def saved(self, times: Mapping[str, float], without: tuple[str, ...] = ()) -> float:
        """Seconds of the measured step that the change saves."""
        return max(self._predicted - self.seconds(times, without), 0.0) * self.scale

    def gain(self, times: Mapping[str, float]) -> Interval:
        """The rate after the change relative to the measured rate, with its band.

        The saving is as uncertain as the step: by the spread of predictions, and by the error of this one. A step cannot become
        faster by a larger factor than the factors in `times`.
        """
        saved, most = self.saved(times), self.measured * (1 - 1 / max(times.values()))
        off = math.exp(Z90 * math.hypot(self._rates.time_spread, math.log(self.measured / self._predicted)))
        mean, low, high = (self.measured / (self.measured - min(part, most)) for part in (saved, saved / off, saved * off))
        return Interval(mean=mean, low=low, high=high)

    def _changed(self, times: Mapping[str, float], without: tuple[str, ...]) -> Any:
        hardware = self._cases.hardware
        changed = {name: getattr(hardware, name) * factor for name, factor in times.items()}
        cases = dataclasses.replace(self._cases, hardware=dataclasses.replace(hardware, **changed))
        # Not 0, because the equations divide by some coefficients.
        return cases, dataclasses.replace(self._rates, **dict.fromkeys(without, 1e-15))


def more_memory(outlook: WinnerOutlook) -> tuple[MoreMemory, ...]:
    """Compare predictions: the best that would fit with the best that fits now, whether or not either was tried.

    Raises:
        SpaceTooLargeError: there are too many candidates to evaluate.
    """
    now = min(_fastest(outlook, outlook.pool(1.0))[0], 0.0)  # the winner itself is a candidate
    return tuple(_found(outlook, factor, now) for factor in (1.1, 1.25, 2.0))


def _found(outlook: WinnerOutlook, factor: float, now: float) -> MoreMemory:
    pool = outlook.pool(factor)
    slower, index = _fastest(outlook, pool)
    gain = math.exp(max(now - slower, 0.0))
    if index is None or gain < 1.001:  # too little: the present configuration is kept
        return MoreMemory(factor=factor, gain=Interval(mean=1.0, low=1.0, high=1.0), config=None)
    _, spread = outlook.log_speedups(pool.described.take(np.array([index])))
    wide = math.exp(Z90 * float(spread[0]))
    # The present configuration still fits, so the gain is never below 1.
    return MoreMemory(
        factor=factor, gain=Interval(mean=gain, low=max(gain / wide, 1.0), high=gain * wide), config=pool.config(index)
    )


def _fastest(outlook: WinnerOutlook, pool: CandidatePool) -> tuple[float, int | None]:
    """Logarithm of the winner's rate over that of the fastest candidate that fits, and the candidate's index."""
    fits = outlook.feasibility.quick_probability(pool.described) >= LIKELY
    if not fits.any():
        return math.inf, None
    slower = np.where(fits, outlook.slower(pool.described), np.inf)
    index = int(np.argmin(slower))
    return float(slower[index]), index


def limits_of(evidence: ExplanationEvidence, step: Counterfactual, memory: tuple[MoreMemory, ...]) -> Limits:
    """Each cost of the step, ordered by the time that removing it would save."""
    config, cluster = evidence.config, evidence.session.cluster
    saved = {
        "compute": step.saved({"peak": FREE}),
        "memory bandwidth": step.saved({"bandwidth": FREE}),
        "launch overhead": step.saved({}, ("kernel_seconds", "collective_launch", "step_seconds")),
    }
    inside = ("link_seconds",)
    if cluster.linked_devices > 1:
        saved[f"the link inside a {cluster.link_domain_text}"] = step.saved({"intra": FREE}, inside)
    between = ("network_seconds", "half_message", "crossed_seconds")
    if cluster.world_size > cluster.linked_devices:
        saved[f"the network between {cluster.link_domain_text}s"] = step.saved({"inter": FREE}, between)
    if config.pipeline_parallel_size > 1:
        links = {"intra": FREE, "inter": FREE}
        saved["the pipeline's bubble"] = step.part("pipeline", links, (*inside, *between, "hop_seconds")) * step.scale
    if _offloads(evidence):
        saved["the host's memory and its link"] = step.saved({"host_link": FREE, "host_bandwidth": FREE})
    saved[UNEXPLAINED] = max(step.measured - step.seconds(), 0.0)
    bounds = [Bound(name=name, seconds=seconds, share=seconds / step.measured) for name, seconds in saved.items()]
    ranked = tuple(sorted(bounds, key=lambda bound: -bound.seconds))
    return Limits(bounds=ranked, memory=memory, text=limits_text(ranked, memory, UNEXPLAINED))


def upgrades_of(evidence: ExplanationEvidence, step: Counterfactual, memory: tuple[MoreMemory, ...]) -> tuple[Upgrade, ...]:
    """Each single change, the most helpful first. The configuration stays the same, except for more memory."""
    cluster = evidence.session.cluster
    changes = {"twice the peak FLOP/s": "peak", "twice the memory bandwidth": "bandwidth"}
    if cluster.linked_devices > 1:
        changes[f"twice the link inside a {cluster.link_domain_text}"] = "intra"
    if cluster.world_size > cluster.linked_devices:
        changes[f"twice the network between {cluster.link_domain_text}s"] = "inter"
    if _offloads(evidence):
        changes["twice the link to the host"] = "host_link"
    upgrades = [Upgrade(name=name, gain=step.gain({figure: 2.0}), config=None) for name, figure in changes.items()]
    for more in memory:
        if more.factor >= 1.25:
            upgrades.append(Upgrade(name=f"{more.factor:g} times the memory of a rank", gain=more.gain, config=more.config))
    return tuple(sorted(upgrades, key=lambda upgrade: -upgrade.gain.mean))


def _offloads(evidence: ExplanationEvidence) -> bool:
    return evidence.config.offload_optimizer != "none" or evidence.config.offload_param != "none"
