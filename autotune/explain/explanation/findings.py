"""What an explanation says, as values: tables, markdown and JSON are made from them.

Measured intervals hold 95 times in a hundred, predicted bands nine times in ten.
"""

from dataclasses import dataclass
from enum import StrEnum

from search_spaces.trial import CollectiveCount, Interval
from search_spaces.trial_config import TrialConfig, Value

SCHEMA_VERSION = 1


class Source(StrEnum):
    """What a figure rests on. The values are exported: never rename one."""

    MEASURED = "measured"
    BOUND = "bound"
    """A trial was ended early: its rate is at most the upper end."""
    OUT_OF_MEMORY = "out_of_memory"
    """A trial ran out of memory."""
    OVER_LIMIT = "over_limit"
    """A trial was measured, and needs more memory than a winner may take."""
    FAILED = "failed"
    """A trial ended without a rate for another reason."""
    PREDICTED = "predicted"
    DOES_NOT_FIT = "does_not_fit"
    """Predicted not to run: to need more memory than there is, or to end as trials near it did."""
    REFUSED = "refused"
    """A rule refuses it with all else as in the winner."""
    UNKNOWN = "unknown"
    """Nothing was measured, and nothing can be predicted."""


class Verdict(StrEnum):
    """What a knob is worth in the winner. The values are exported: never rename one."""

    FASTER = "faster"
    """The winner's value is told apart from every other that could be compared, and faster."""
    MIXED = "mixed"
    """Faster than some; others are not told apart from it, or faster, or their trials were ended too early to say."""
    NOISE = "noise"
    """No value that was measured is told apart from the winner's, nor any that is predicted."""
    ALIKE = "alike"
    """Nothing else was measured, and no equation tells the values apart."""
    FORCED = "forced"
    """No other value runs with all else as in the winner."""
    UNKNOWN = "unknown"
    """Nothing was measured that differs in it, and nothing is predicted that is sure enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that a step is spent on."""

    name: str
    """One of `prediction.step.PARTS`, or `unexplained`: what they leave of the measured step."""
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
    """Trials that they rest on."""
    parts: tuple[Part, ...]
    """By the equations; they sum to the measured step. Empty: the model has none."""
    predicted_seconds: Interval | None
    """What the equations say of the step, with its band; None: the model has none."""
    measured_over_predicted: float | None
    collectives: tuple[CollectiveCount, ...]
    """Measured, of one step; of each kind that of the rank that moves most."""
    cpu_seconds: float | None
    """Of a step, of the busiest rank's process; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Where the memory of the fullest rank goes."""

    rank: int
    peak_bytes: int
    by_tag: dict[str, int]
    """Sums to the peak, largest first."""
    limit_bytes: int | None
    """Of a rank; None: no limit is known."""
    headroom: float
    """Share of it that a winner leaves free."""
    free_bytes: int | None
    """Up to the limit less the headroom."""
    breaks_first: str | None
    """The tag that has to grow least to use that up: the largest one."""
    breaks_at: float | None
    """How many times as large it is then."""
    reserved_bytes: int | None
    """By the caching allocator; None: it does not say."""
    outside_bytes: int | None
    """Of the device, outside of torch's allocator; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A knob at one value, all else as in the winner but for what depends on it."""

    value: Value
    source: Source
    samples_per_second: Interval | None
    """With a bound, its upper end is the bound. None: there is none."""
    speedup: Interval | None
    """The winner's samples/s over this one's; None: not known, or this is the winner."""
    peak_bytes: float | None
    """Of the fullest rank."""
    trial: int | None
    """The search trial; None: none was run."""
    note: str
    """Why there is no rate, or what it lacks; empty: nothing is lacking."""

    @property
    def compared(self) -> bool:
        """Whether measurements say how the winner does against it: a bound does where the winner is beyond it."""
        bounded = self.source is Source.BOUND and self.speedup is not None and self.speedup.low > 1.0
        return self.source is Source.MEASURED or bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class FarTrial:
    """A measured trial with another value that differs in a few other knobs, too."""

    trial: int
    value: Value
    also: dict[str, Value]
    """The other knobs, and what the trial has for them."""
    speedup: Interval
    """The winner's samples/s over this one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobFinding:
    """What one knob contributes."""

    knob: str
    value: Value
    """In the winner."""
    default: Value
    baseline: Value | None
    """None: no baseline was measured."""
    verdict: Verdict
    source: Source
    """What the verdict rests on: MEASURED, PREDICTED or UNKNOWN."""
    best_other: Value | None
    """The fastest other value that may win, of those that the verdict rests on."""
    gain: Interval | None
    """The winner's samples/s over that one's."""
    least_peak: Point | None
    """With the objective memory: of the other values that run, the one with the least peak. None: another objective."""
    curve: tuple[Point, ...]
    """Every value of the domain, the default and the baseline's among them; the winner's own is there, too."""
    far: tuple[FarTrial, ...]
    """Where no other value was measured with all else equal: the trials that come nearest."""
    text: str
    """In words, one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Something that holds the winner back."""

    name: str
    seconds: float
    """Of the measured step, that would be saved if it cost nothing; predicted."""
    share: float
    """Of the measured step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreMemory:
    """What more memory for each rank would allow; predicted."""

    factor: float
    """Of the present memory."""
    gain: Interval
    """The rate of the best candidate that fits then over that of the best that fits now; 1: the same one."""
    config: TrialConfig | None
    """That candidate; None: the same one as now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What limits the winner; predicted but for the step that shares are of."""

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
    """The rate with it over the measured one, with its band."""
    config: TrialConfig | None
    """The configuration that would be the best then, where it is another."""


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
    """Best over baseline, as in a best-config.json."""
    tie: bool
    """Whether the measurements do not tell the winner from the runner-up."""
    rests_on: str
    """In words, what the equations' coefficients rest on; empty: nothing is predicted."""
    time: TimeUse
    memory: MemoryUse | None
    """None: no rank said."""
    knobs: tuple[KnobFinding, ...]
    """The most telling first."""
    limits: Limits | None
    """None: the model has no equations."""
    upgrades: tuple[Upgrade, ...]
    """The most helpful first."""
    notes: tuple[str, ...]
    """What is missing, and why."""
