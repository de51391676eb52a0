"""The content of an explanation as values, from which tables, markdown and JSON are made.

Measured intervals are 95 % confidence intervals; predicted bands hold 90 % of the time.
"""

from dataclasses import dataclass
from enum import StrEnum

from search_spaces.knob import Value
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
    rests_on: str
    """In words, the source of the equations' coefficients; empty: nothing is predicted."""
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
