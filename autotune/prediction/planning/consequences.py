"""What follows for a prediction from each value that nobody stated: it is computed again at the other plausible values."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from autotune.errors import AutotuneError
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.question import Question
from autotune.question.assumption import LINK, VOCABULARY, Assumption
from search_spaces.errors import SearchSpaceError
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig


class Verdict(StrEnum):
    """Whether a configuration fits into memory."""

    FITS = "fits"
    MAY_FIT = "may fit"
    DOES_NOT_FIT = "does not fit"


def verdict_of(estimate: StepEstimate) -> Verdict:
    """The verdict of a prediction: fits and does not fit have a probability of `PROBABILITY`."""
    if estimate.fit_probability >= PROBABILITY:
        return Verdict.FITS
    return Verdict.MAY_FIT if estimate.fit_probability > 1 - PROBABILITY else Verdict.DOES_NOT_FIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """The prediction at another value of what is assumed."""

    assumption: Assumption
    value: Value
    estimate: StepEstimate
    changes_verdict: bool
    """Whether the verdict is another one."""
    changes_rate: bool
    """Whether the tokens/s are outside the band of the answer."""
    weight: float
    """By how much the answer changes: of two consequences the greater is listed first."""


EstimateAt = Callable[[Mapping[str, Value]], StepEstimate | None]
"""The prediction with other values of what is assumed, computed as the answer itself was (`estimate_with` for a question);
None: a rule refuses them."""


def consequences(assumed: Sequence[Assumption], answer: StepEstimate, estimate_at: EstimateAt) -> list[Consequence]:
    """The prediction at every alternative of every assumption, one at a time; most consequential first.

    Alternatives that the rules refuse with the rest of the configuration are left out.
    """
    results = [
        _consequence(assumption, value, estimate, answer)
        for assumption in assumed
        for value in assumption.alternatives
        if (estimate := estimate_at({assumption.name: value})) is not None
    ]
    return sorted(results, key=lambda item: -item.weight)


def most_favourable(
    results: Sequence[Consequence], answer: StepEstimate, estimate_at: EstimateAt
) -> tuple[Mapping[str, Value], StepEstimate]:
    """The values with the least memory that the assumptions allow, and the prediction with them: what does not fit with it
    certainly does not fit. No values: the answer's own are those.

    `results`: those of `consequences`.
    """
    values: dict[str, Value] = {}
    for item in sorted(results, key=lambda item: -item.estimate.fullest.needed):
        if item.estimate.fullest.needed < answer.fullest.needed:
            values[item.assumption.name] = item.value
    while values:
        if (best := estimate_at(values)) is not None:
            return values, best
        values.popitem()
    return values, answer


def estimate_with(question: Question, config: TrialConfig, values: Mapping[str, Value]) -> StepEstimate | None:
    """The prediction with other values of what is assumed; None: a rule refuses them."""
    try:
        changed = _changed(question, values)
        changed_config = config.replace({name: value for name, value in values.items() if name in KNOBS})
        micro_batches = changed_config.micro_batch_size * changed.cluster.world_size // changed_config.model_parallel_size
        if changed.global_batch_size < micro_batches:
            return None
        return estimates(changed, [changed_config])[0]
    except (AutotuneError, SearchSpaceError):
        return None


def _changed(question: Question, values: Mapping[str, Value]) -> Question:
    fields = {name: value for name, value in values.items() if name in ("sequence_length", "global_batch_size")}
    if VOCABULARY in values and isinstance(question.model, ModelSpec):
        fields["model"] = dataclasses.replace(question.model, vocab_size=values[VOCABULARY])  # type: ignore[assignment,arg-type]
    if LINK in values:
        fields["cluster"] = dataclasses.replace(question.cluster, intra_node_bandwidth=values[LINK])  # type: ignore[assignment,arg-type]
    return dataclasses.replace(question, **fields) if fields else question  # type: ignore[arg-type]


def _consequence(assumption: Assumption, value: Value, estimate: StepEstimate, answer: StepEstimate) -> Consequence:
    rate, low, high = (
        estimate.tokens_per_second,
        answer.tokens_per_second * answer.step_seconds.mean / answer.step_seconds.high,
        answer.tokens_per_second * answer.step_seconds.mean / answer.step_seconds.low,
    )
    changes_verdict, changes_rate = verdict_of(estimate) is not verdict_of(answer), not low <= rate <= high
    faster = abs(math.log(rate / answer.tokens_per_second))
    larger = abs(math.log(estimate.fullest.needed / answer.fullest.needed))
    return Consequence(
        assumption=assumption, value=value, estimate=estimate, changes_verdict=changes_verdict, changes_rate=changes_rate,
        weight=100.0 * changes_verdict + 10.0 * changes_rate + faster + larger,
    )  # fmt: skip


def conditions(results: Sequence[Consequence]) -> Iterator[str]:
    """For each assumption on which the verdict or the rate hangs, one clause: `with NAME=VALUE: VERDICT (34 GiB)`."""
    for item in results:
        if item.changes_verdict or item.changes_rate:
            gib = item.estimate.peak_memory_bytes.mean / 2**30
            alternative = dataclasses.replace(item.assumption, value=item.value, text="", stated_by="")
            rate = f", {item.estimate.tokens_per_second:,.0f} tokens/s" if item.changes_rate else ""
            yield f"with {alternative}: {verdict_of(item.estimate)} ({gib:.0f} GiB{rate})"
