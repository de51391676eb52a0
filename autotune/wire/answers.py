"""The answer of a job: which trial wins, and how certain that is. Intervals have a probability of 95 %."""

from dataclasses import dataclass

from autotune.wire.plans import PlanGoodput
from autotune.wire.predictions import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The gain of the answer over the baseline: a ratio with its 95 % interval."""

    of: str
    """samples_per_second, peak_memory_bytes if memory is the objective, or goodput if that is."""
    mean: float
    low: float
    """Lower bound. If the interval includes 1, the gain is unproven."""
    high: float
    """Upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A configuration that may be the answer, or the baseline."""

    trial: int
    """Number of its trial."""
    rate: Interval
    """Samples/s from all measurements of the configuration."""
    repeats: int
    """Number of measurements from which the rate is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGoodput:
    """What the answer keeps on nodes that fail, by the closed form on its measured samples/s."""

    ways: tuple[PlanGoodput, ...]
    """The best way to run it, then the best with each other recovery."""
    baseline: PlanGoodput | None
    """The best way to run the baseline. None: it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnresolvedTrial:
    """A trial whose script ended before its steps could be timed, or which failed when it was measured again."""

    trial: int
    rate: Interval | None
    """Samples/s as first measured. None: it was not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a job so far. Configurations are given as trial numbers."""

    keeps_baseline: bool
    """Whether the answer is to keep the baseline, because no tried configuration is known to be better."""
    trial: int
    """The answer."""
    rate: Interval
    """Samples/s of the answer, from all measurements of its configuration."""
    baseline: int | None
    """The baseline. None: it was not measured."""
    baseline_rate: Interval | None
    """Samples/s of the baseline. None: it was not measured."""
    gain: Gain | None
    """The gain of the answer over the baseline. None: the baseline was not measured."""
    runner_up: int | None
    """The second best. None: there is only one contender."""
    runner_up_ratio: Interval | None
    """Samples/s of the runner-up divided by that of the answer. None: there is no runner-up."""
    tie: bool
    """Whether the measurements do not separate the answer and the runner-up."""
    probability_best: float | None
    """Probability that no tried configuration is better than the answer. None: no other was measured, or one is unresolved."""
    expected_loss: float
    """Expected shortfall of the answer's rate, as a share of the rate of the best tried configuration."""
    unresolved: tuple[UnresolvedTrial, ...]
    """Trials whose configurations may be better."""
    goodput: AnswerGoodput | None = None
    """How to run the answer on nodes that fail. None: the objective is not goodput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Answer):
    """The answer with all configurations that may be the answer."""

    standings: tuple[Standing, ...]
    """Every contender: the answer first, then by rate."""
