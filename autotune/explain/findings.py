"""The content of an explanation as values, from which tables, markdown and JSON are made, and the texts of findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from autotune.question.assumption import Assumption
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.quantities import ratio_text
from search_spaces.trial import CollectiveCount, Interval
from search_spaces.trial_config import TrialConfig

SCHEMA_VERSION = 1


class Basis(StrEnum):
    """The basis of a figure. The values are exported: never rename one."""

    MEASURED = "measured"
    BOUND = "bound"
    """A trial was ended early: its rate is at most the upper end."""
    OUT_OF_MEMORY = "out_of_memory"
    """A trial ran out of memory."""
    OVER_LIMIT = "over_limit"
    """A trial was measured, and needs more memory than a winner may use."""
    FAILED = "failed"
    """A trial ended without a rate for another reason."""
    PREDICTED = "predicted"
    DOES_NOT_FIT = "does_not_fit"
    """Predicted not to run: it needs more memory than there is, or similar trials did not run."""
    REFUSED = "refused"
    """A rule refuses the value while all other knobs are as in the winner."""
    UNKNOWN = "unknown"
    """Neither measured nor predictable."""


class KnobVerdict(StrEnum):
    """The effect of a knob's value in the winner. The values are exported: never rename one."""

    FASTER = "faster"
    """The winner's value is significantly faster than every other value that could be compared."""
    MIXED = "mixed"
    """Faster than some values; others are faster, do not differ significantly, or their trials were ended too early to say."""
    NOISE = "noise"
    """No measured or predicted value differs significantly from the winner's."""
    ALIKE = "alike"
    """No other value was measured, and the equations predict the same rate for all values."""
    FORCED = "forced"
    """No other value runs while all other knobs are as in the winner."""
    UNKNOWN = "unknown"
    """No other value was measured, and no prediction is certain enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepActivity:
    """An activity that takes a part of the step."""

    name: str
    """One of `prediction.step.PARTS`, or `unexplained`: the rest of the measured step."""
    seconds: float
    share: float
    """Of the measured step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Where the winner's step goes."""

    step_seconds: Interval
    """Measured."""
    samples_per_second: Interval
    """Measured."""
    repeats: int
    """Trials from which they are computed."""
    parts: tuple[StepActivity, ...]
    """By the equations; they sum to the measured step. Empty: the equations do not know the model."""
    predicted_seconds: Interval | None
    """The step time that the equations predict, with its band; None: the equations do not know the model."""
    measured_over_predicted: float | None
    collectives: tuple[CollectiveCount, ...]
    """Measured over one step; for each kind, the count of the rank that moves most bytes."""
    cpu_seconds: float | None
    """Per step, of the busiest rank's process; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Where the memory of the fullest rank goes."""

    rank: int
    peak_bytes: int
    by_tag: dict[str, int]
    """Sums to the peak, largest first."""
    limit_bytes: int | None
    """Per rank; None: no limit is known."""
    headroom: float
    """Share of the limit that a winner must leave free."""
    free_bytes: int | None
    """Bytes left below the limit less the headroom."""
    breaks_first: str | None
    """The tag that needs the smallest relative growth to use up `free_bytes`: the largest one."""
    breaks_at: float | None
    """The factor by which that tag has grown then."""
    reserved_bytes: int | None
    """By the caching allocator; None: it does not report it."""
    outside_bytes: int | None
    """Device memory outside torch's allocator; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobPoint:
    """A knob at one value; all other knobs are as in the winner, except those that depend on it."""

    value: Value
    source: Basis
    samples_per_second: Interval | None
    """For a BOUND point the upper end is the bound. None: there is no rate."""
    speedup: Interval | None
    """The winner's samples/s divided by this point's; None: not known, or this is the winner."""
    peak_bytes: float | None
    """Of the fullest rank."""
    trial: int | None
    """The search trial; None: no trial was run."""
    note: str
    """Why there is no rate, or what limits its meaning; empty: nothing to remark."""

    @property
    def compared(self) -> bool:
        """Whether measurements compare it with the winner: a bound does where the winner exceeds it."""
        bounded = self.source is Basis.BOUND and self.speedup is not None and self.speedup.low > 1.0
        return self.source is Basis.MEASURED or bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class FarTrial:
    """A measured trial with another value that also differs in a few other knobs."""

    trial: int
    value: Value
    also: dict[str, Value]
    """The other knobs, and the trial's values for them."""
    speedup: Interval
    """The winner's samples/s divided by this trial's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobFinding:
    """What one knob contributes."""

    knob: str
    value: Value
    """In the winner."""
    default: Value
    baseline: Value | None
    """None: no baseline was measured."""
    verdict: KnobVerdict
    source: Basis
    """The basis of the verdict: MEASURED, PREDICTED or UNKNOWN."""
    best_other: Value | None
    """The fastest other value that may win, among those that the verdict is based on."""
    gain: Interval | None
    """The winner's samples/s divided by those of `best_other`."""
    least_peak: KnobPoint | None
    """For the objective memory: of the other values that run, the one with the lowest peak. None: another objective."""
    curve: tuple[KnobPoint, ...]
    """Every value of the domain, plus the winner's, the default and the baseline's."""
    far: tuple[FarTrial, ...]
    """The most similar trials, where no other value was measured with all other knobs equal."""
    text: str
    """In words, one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A cost that limits the winner's rate."""

    name: str
    seconds: float
    """Seconds of the measured step that would be saved if it cost nothing; predicted."""
    share: float
    """Of the measured step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """What more memory per rank would allow; predicted."""

    factor: float
    """Relative to the present memory."""
    gain: Interval
    """The rate of the best candidate that would fit, relative to the best that fits now; 1: the same candidate."""
    config: TrialConfig | None
    """That candidate; None: the same as now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What limits the winner. All of it is predicted, except the measured step to which shares refer."""

    bounds: tuple[Bound, ...]
    """The largest first."""
    memory: tuple[MoreMemory, ...]
    text: str
    """In one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """A change of the hardware; predicted."""

    name: str
    gain: Interval
    """The rate after the change relative to the measured rate, with its band."""
    config: TrialConfig | None
    """The configuration that would then be the best; None: the winner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the best configuration of a job is the best."""

    schema_version: int
    job: str
    state: str
    model: str
    cluster: str
    world_size: int
    objective: str
    strategy: str
    trials: int
    """Search trials that have an outcome."""
    measured: int
    """Those of them with a rate."""
    winner: int
    """Number of its search trial."""
    config: TrialConfig
    baseline: TrialConfig | None
    gain: Interval | None
    """Best relative to the baseline, as in best-config.json."""
    tie: bool
    """Whether the measurements do not separate the winner from the runner-up."""
    calibration_source: str
    """In words, the source of the equations' coefficients; empty: nothing is predicted."""
    assumed: tuple[Assumption, ...]
    """What nobody stated when the job was opened, in words."""
    time: TimeUse
    memory: MemoryUse | None
    """None: no rank reported it."""
    knobs: tuple[KnobFinding, ...]
    """The most informative first."""
    limits: Limits | None
    """None: the equations do not know the model."""
    upgrades: tuple[Upgrade, ...]
    """The most helpful first."""
    notes: tuple[str, ...]
    """What is missing, and why."""


def knob_text(
    knob: str, verdict: KnobVerdict, source: Basis, nearest: KnobPoint | None, started: KnobPoint | None,
    other_points: Sequence[KnobPoint], far_trials: Sequence[FarTrial],
) -> str:  # fmt: skip
    """What the knob's value is worth, and what is known about its other values."""
    parts = [_headline(verdict, source, nearest, other_points)]
    if started is not None and verdict not in (KnobVerdict.NOISE, KnobVerdict.ALIKE, KnobVerdict.FORCED):
        parts.append(_against(started))
    if over := [point for point in other_points if point.source in (Basis.OUT_OF_MEMORY, Basis.OVER_LIMIT)]:
        parts.append(f"{values_text(over)} {'is' if len(over) == 1 else 'are'} out of memory")
    if not_run := [point for point in other_points if point.source is Basis.DOES_NOT_FIT]:
        parts.append(f"{values_text(not_run)} would not fit (predicted)")
    if left_open := [point for point in other_points if point.source is Basis.BOUND and not point.compared]:
        several = len(left_open) > 1
        ended = f"the trial{'s' * several} of {values_text(left_open)} ended early"
        parts.append(f"{ended}, and leave{'s' * (not several)} it open")
    if far_trials and verdict is not KnobVerdict.ALIKE:
        parts.append(_far(knob, far_trials[0]))
    return "; ".join(parts)


def _headline(verdict: KnobVerdict, source: Basis, nearest: KnobPoint | None, other_points: Sequence[KnobPoint]) -> str:
    match verdict:
        case KnobVerdict.NOISE:
            return f"no difference within the noise to {values_text(_compared(other_points))}"
        case KnobVerdict.ALIKE:
            return "not measured by itself, and predicted to make no difference"
        case KnobVerdict.FORCED:
            return "no other value runs with all other knobs unchanged"
        case _ if nearest is None:
            return "not measured by itself"
        case _ if verdict is KnobVerdict.UNKNOWN:
            sure = nearest.speedup is not None and nearest.speedup.low > 1.0
            return f"not measured by itself; {_against(nearest)}{'' if sure else ', which the band leaves open'}"
        case _:
            return _against(nearest) + ("" if source is Basis.MEASURED or nearest.source is Basis.PREDICTED else " (predicted)")


def _against(point: KnobPoint) -> str:
    """`2.00x [1.80, 2.22] the rate of 4`, marked as predicted or as a bound."""
    if point.speedup is None:
        return f"no rate is known for {value_text(point.value)}"
    least = "at least " if point.source is Basis.BOUND else ""
    marked = " (predicted)" if point.source in (Basis.PREDICTED, Basis.DOES_NOT_FIT) else ""
    unsure = point.source in (Basis.MEASURED, Basis.BOUND, Basis.OVER_LIMIT) and point.speedup.low <= 1.0 <= point.speedup.high
    return f"{least}{speedup_text(point.speedup)} the rate of {value_text(point.value)}{marked}" + (
        ", not significant" if unsure else ""
    )


def _far(knob: str, trial: FarTrial) -> str:
    values = {knob: trial.value, **trial.also}
    text = ", ".join(f"{name}={value_text(value)}" for name, value in values.items())
    return f"{speedup_text(trial.speedup)} the rate of trial {trial.trial}, which has {text}"


def speedup_text(ratio: Interval) -> str:
    """`2x [1.8, 2.222]`."""
    return ratio_text(ratio.mean, ratio.low, ratio.high)


def percent(share: float) -> str:
    """`12 %`, `1.2 %`."""
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share * 100:.0f} %"


def limits_text(bounds: Sequence[Bound], memory: Sequence[MoreMemory], unexplained: str) -> str:
    """What limits the winner, in one sentence with its figure."""
    first = bounds[0]
    if first.name == unexplained and len(bounds) > 1:
        text = f"{percent(first.share)} of the step is in nothing that the equations know; of what they know, "
        text += f"{bounds[1].name} limits it most ({percent(bounds[1].share)} of the step, predicted)"
    else:
        text = f"{first.name} limits it: {percent(first.share)} of the step would go if it cost nothing (predicted)"
    more = next((option for option in memory if option.gain.mean >= 1.02), None)
    if more is not None:
        text += f", and memory: {percent(more.factor - 1)} more would allow {speedup_text(more.gain)} the rate (predicted)"
    elif memory:
        text += f"; memory does not: {percent(memory[-1].factor - 1)} more would allow nothing faster (predicted)"
    return f"{text[:1].upper()}{text[1:]}."


def _compared(points: Sequence[KnobPoint]) -> list[KnobPoint]:
    return [point for point in points if point.compared]


def values_text(points: Sequence[KnobPoint]) -> str:
    """`1, 2 and 4`."""
    names = [value_text(point.value) for point in points]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
