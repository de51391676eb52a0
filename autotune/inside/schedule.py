"""Which setting the next step of a run trains with: racing on the times of steps, on a budget of lost time.

Pure: times go in, settings come out. `Schedule` is driven by `autotune.inside.tuner` in a run, and by simulations in tests.
"""

import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.errors import RequestError
from autotune.inside.space import RunSpace, Setting
from autotune.inside.surrogate import Block, Surrogate
from executor.measurement.timing import WINDOW, has_trend
from search_spaces.knob import Value

SHARE = 0.01
"""Part of a run's time that the search may cost, if nobody says more."""
CLOSE, MISSED = 0.03, 0.05
"""While a setting that is faster by this much is missed with more than this probability, trials need only be affordable."""
LENGTHS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Steps of the blocks between which a plan chooses."""
CANDIDATES = 40
"""Settings that a plan looks at, besides the incumbent's neighbours."""
MOST_WARM_UP = 10
"""Steps after which the run's first setting counts as warm."""
DRIFT = 0.1
"""Relative change of the time of a step from which the search starts again."""
PLANNED = 0.7
"""Part of the budget that the search plans with; the rest is for what it does not foresee."""
FIRST_PLANNED = 0.5
"""The same for the first search, after which a drift may ask for another one."""
DOUBT = 0.7
"""Standard deviations of what has been spent that are counted as spent."""
UNKNOWN_STEPS = 1_000
"""Steps that a run of unknown length is assumed to have at least. Later it is assumed to be half over."""


def require_share(share: float) -> None:
    """
    Raises:
        RequestError: it is no part of a run.
    """
    if not 0.0 < share < 1.0:
        raise RequestError("share", f"{share} is not between 0 and 1", "give 0.01 for one percent of the run")


class StepRecord(NamedTuple):
    """One optimizer step of the run."""

    seconds: float | None
    """None: it ran out of memory, and its samples are trained again."""
    lost_seconds: float = 0.0
    """Seconds before the step that no step of a steady run has: a decision, a change of the setting, or a failed attempt."""
    more: Sequence[float] = ()
    """When the search is over: seconds of the steps after it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An entry of the schedule's journal."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """Steps that a plan trains with a setting."""

    setting: Setting
    steps: int
    urgency: float
    """Expected gain for expected cost."""


_Steps = Generator[Setting, StepRecord, list[float] | None]
_Search = Generator[Setting, StepRecord, None]


class Schedule:
    """The search for the fastest setting of a run.

    1. The first setting trains until its steps show no trend.
    2. `Surrogate` has the distribution of the times of all settings. Of each likely setting and length of a block, a plan
       computes how much faster the choice is expected to be after it: the knowledge gradient [Frazier, Powell and Dayanik, SIAM
       J. Control Optim. 47 (2008)]. The block with the most gain over the rest of the run for its cost is trained.
    3. A block ends early if it is hopeless. Of the settings that have trained, the one with the least expected time is the
       incumbent.
    4. No step is planned that could exceed the budget: `share` of the run, for all time lost against the setting that is the
       best so far, changes and failed steps included.
    5. When no block is expected to pay, and a setting that is 3 % faster is missed with 5 % at most, the search is over. It
       starts again, within the same budget, when the time of a step drifts; after a search without a change only for 1.5 times
       the drift.
    """

    def __init__(
        self, space: RunSpace, start: Setting, *, share: float, steps: int | None, remembered_seconds: float | None = None
    ) -> None:
        """`steps`: of the whole run; None: unknown. `remembered_seconds`: of a step with `start`, an earlier run's answer."""
        self.space, self.incumbent, self.steps = space, start, steps
        self.journal: list[Decision] = []
        self.is_over = False
        self.done = 0
        """Steps so far."""
        self.level = math.nan
        """Seconds of a step of the incumbent, from its last block."""
        self._share = share
        self._times: dict[Setting, list[float]] = {}
        """Setting -> seconds of its steps in this search."""
        self._lost_seconds = self._spent_before = self._elapsed = 0.0
        self._paid: set[tuple[int, Value]] = {*enumerate(start)}
        """Knob and value whose change has been paid for: what is compiled once stays compiled."""
        self.answers: list[tuple[int, Setting]] = []
        """Step at which each search was over, and its answer."""
        self._changes: list[float] = []
        """Seconds that each change took beyond the steps of a steady run."""
        self._noise = 0.05
        """Standard deviation of the logarithm of a step's time, as that of independent steps with the same error of a mean."""
        self._residuals: list[float] = []
        self._products: list[float] = []
        self._surrogate = Surrogate(space)
        self._has_rivals = len(self._surrogate.settings) > 1
        self._why = "there is no other setting"
        self._epoch = 0
        self._draws = np.random.default_rng(0).standard_normal((len(self._surrogate.settings), 64))
        self._last_steps: list[float] = []
        """Steps of the incumbent's last block."""
        self._machine = self._run(remembered_seconds)
        self.setting = next(self._machine)
        """The setting of the next step."""

    def record(self, step: StepRecord) -> Setting:
        """Take the time of the step with `setting`; return the setting of the next step."""
        self._lost_seconds += step.lost_seconds
        if step.seconds is not None:
            self.done += 1 + len(step.more)
            self._elapsed += step.seconds + step.lost_seconds + sum(step.more)
        self.setting = self._machine.send(step)
        return self.setting

    def visited(self) -> dict[Setting, list[float]]:
        """Every setting of the last search, the first one first, with the seconds of its steps; none: it ran out of memory."""
        return {**self._times, **{setting: [] for setting in self.space.too_large if setting not in self._times}}

    def skip(self) -> None:
        """A step without a known time has been trained."""
        self.done += 1

    def restart(self, why: str) -> None:
        """Begin anew with the incumbent, which is another one now."""
        self._note(why)
        self._machine = self._run(None)
        self.setting = next(self._machine)

    # The budget.

    @property
    def remaining_steps(self) -> int:
        """Steps until the run's end, as far as known."""
        return max((self.steps or max(UNKNOWN_STEPS, 2 * self.done)) - self.done, 0)

    @property
    def budget_seconds(self) -> float:
        """Seconds that the search may cost."""
        return 0.0 if math.isnan(self.level) else self._share * (self._elapsed + self.remaining_steps * self.level)

    @property
    def spent_seconds(self) -> float:
        """Seconds lost so far against a run with the incumbent from its start."""
        # Each search counts against its own answer: after a drift another setting may be the best.
        best = self._mean(self.incumbent)
        excess = (len(seconds) * math.expm1(max(self._mean(setting) - best, 0.0)) for setting, seconds in self._times.items())
        return self._spent_before + self._lost_seconds + self.level * sum(excess)

    def _left_seconds(self) -> float:
        """Seconds that the search may still plan to lose."""
        planned = PLANNED if self.answers else FIRST_PLANNED
        return planned * self.budget_seconds - self.spent_seconds - DOUBT * self._spent_deviation()

    def _spent_deviation(self) -> float:
        """Standard deviation of `spent_seconds`, from what is not known of the times of settings."""
        model, best = self._surrogate, self._mean(self.incumbent)
        steps = {setting: len(seconds) for setting, seconds in self._times.items() if self._mean(setting) >= best}
        rows = np.array([model.index[setting] for setting in steps])
        weights = np.array([*steps.values()], dtype=float)
        weights[[*steps].index(self.incumbent)] -= weights.sum()
        covariance = model.covariance(rows)[:-1, :-1]
        return self.level * math.sqrt(max(float(weights @ covariance @ weights), 0.0))

    # The search.

    def _run(self, remembered_seconds: float | None) -> _Search:
        yield from self._warm_up()
        if remembered_seconds and abs(math.log(self.level / remembered_seconds)) < DRIFT + self._noise:
            self._note(f"steps take {self.level:.4g} s, as in the earlier run ({remembered_seconds:.4g} s): its setting stays")
        else:
            yield from self._search()
        drift = DRIFT if self._has_rivals else math.inf
        while True:
            self.is_over = True
            change = yield from self._watch(drift)
            self.is_over = False
            before = self.incumbent
            self.answers.append((self.done, before))
            self._spent_before, self._lost_seconds = self.spent_seconds, 0.0
            self._times = {}
            self._epoch += 1
            self._note(f"steps take {100 * math.expm1(change):+.0f} % of time: the search starts again")
            yield from self._block(self.incumbent, self._reference_length())
            yield from self._search()
            drift = DRIFT if self.incumbent != before else 1.5 * drift

    def _warm_up(self) -> _Search:
        """Steps that take longer at the start are no cost of the search: every run has them."""
        seconds: list[float] = []
        while len(seconds) < MOST_WARM_UP and has_trend(seconds[1:]):
            step = yield self.incumbent
            if step.seconds is not None:
                seconds.append(step.seconds)
        self._last_steps = seconds[-WINDOW:]
        self._learn_noise(self._last_steps)
        self.level = statistics.median(self._last_steps)
        self._times[self.incumbent] = [*self._last_steps] * (len(seconds) // len(self._last_steps))
        self._note_block(self.incumbent, self._last_steps)

    def _search(self) -> _Search:
        # Of one setting alone, rounding errors of the expected gain would be trials.
        while self._has_rivals and (plan := self._plan()):
            yield from self._visit(plan)
        self._note(f"{self._why} ({self._spent_text()}): over")

    def _visit(self, plan: PlannedBlock) -> _Search:
        """Train a block, and choose the incumbent anew."""
        before, is_rival, compiling = self.incumbent, plan.setting != self.incumbent, self._first_cost(plan.setting)
        seconds = yield from self._block(plan.setting, plan.steps, compiling)
        if seconds is None:
            self._note(f"{self._name(plan.setting, before)}: out of memory")
            return
        self._paid |= {*enumerate(plan.setting)}
        self.incumbent = min(filter(self.space.fits, self._times), key=self._mean)
        is_new = self.incumbent != before
        if is_rival or is_new:
            shown = self.incumbent if is_new else plan.setting
            mean, deviation = self._surrogate.difference(shown, before)
            low, middle, high = (100 * math.expm1(-mean + sign * 2 * deviation) for sign in (-1, 0, 1))
            verdict = "is the setting now" if is_new else "is not faster"
            self._note(f"{self._name(shown, before)}: {middle:+.1f} % [{low:+.1f}, {high:+.1f}] samples/s: {verdict}")
            self.level *= math.exp(self._mean(self.incumbent) - self._mean(before))

    def _mean(self, setting: Setting) -> float:
        return float(self._surrogate.mean[self._surrogate.index[setting]])

    def _plan(self) -> PlannedBlock | None:
        """The block with the most expected gain for its cost; None: none pays, or none is affordable."""
        model = self._surrogate
        all_deviations = model.deviations(self.incumbent)
        rows = self._candidates(all_deviations)
        settings, means = [model.settings[row] for row in rows], model.mean[rows]
        covariance = model.covariance(rows)
        mine = settings.index(self.incumbent)
        samples = (
            means[:, None] + np.linalg.cholesky(covariance[:-1, :-1] + 1e-10 * np.eye(len(rows))) @ self._draws[: len(rows)]
        )
        fastest = samples.min(axis=0)
        may_miss = float(np.mean(samples[mine] - fastest > CLOSE)) > MISSED
        lags, deviations = means - means[mine], all_deviations[rows]
        changes = np.array([self._change_cost(setting) for setting in settings])
        one_time = np.array([self._first_cost(setting) for setting in settings])
        # If the rival is slow, two steps show it; if it is fast, all steps of this search so far have lost time against it.
        risks = np.maximum(
            2.0 * np.expm1(np.maximum(lags, 0.0) + deviations),
            sum(map(len, self._times.values())) * np.expm1(np.maximum(deviations - lags, 0.0)),
        )
        are_affordable = risks * self.level + changes + one_time <= self._left_seconds()
        self._why = "no other setting is expected to save more than it costs to try"
        best: PlannedBlock | None = None
        for length in LENGTHS:
            gains = (model.expected_gains(means, covariance, self._noise**2 / length) + np.maximum(-lags, 0.0)) * (
                self.remaining_steps * self.level
            )
            costs = np.maximum(np.expm1(lags), 0.0) * length * self.level + changes + one_time
            # Time costs what the fastest setting, whichever it is, would save in it. The seconds of a compilation are paid
            # whenever the rival is tried first: no reason to try it later.
            prices = np.maximum(np.expm1(means - fastest.mean()), 0.001) * length * self.level + changes + 1e-9
            for number in np.flatnonzero(gains > (0.0 if may_miss else costs)):
                if not are_affordable[number]:
                    self._why = "another trial could exceed the budget"
                elif best is None or gains[number] / prices[number] > best.urgency:
                    best = PlannedBlock(settings[number], length, float(gains[number] / prices[number]))
        return best

    def _candidates(self, deviations: NDArray[np.float64]) -> NDArray[np.intp]:
        """Settings that a plan looks at: the visited ones, the incumbent's neighbours, and those that may be the fastest."""
        model, fits = self._surrogate, self.space.fits
        chosen = {model.index[setting] for setting in (*self._times, self.incumbent) if fits(setting)}
        for index in range(len(self.space.knobs)):
            chosen |= {model.index[move.setting] for move in self.space.moves(self.incumbent, index)}
        hopeful = (int(number) for number in np.argsort(model.mean - deviations))
        chosen |= {
            *itertools.islice((number for number in hopeful if fits(model.settings[number])), max(CANDIDATES - len(chosen), 0))
        }
        return np.array(sorted(chosen | {model.index[self.incumbent]}))

    def _first_cost(self, setting: Setting) -> float:
        return sum(self.space.knobs[index].change_seconds for index, _ in {*enumerate(setting)} - self._paid)

    def _change_cost(self, setting: Setting) -> float:
        if setting == self.setting:
            return 0.0
        change = statistics.median(self._changes[-10:]) if self._changes else 0.5 * self.level
        return change * (1.0 if setting == self.incumbent else 2.0)

    # Steps.

    def _reference_length(self) -> int:
        return min(max(math.ceil((self._noise / 0.02) ** 2), 8), 64)

    def _block(self, setting: Setting, length: int, one_time: float = 0.0) -> _Steps:
        """Train steps after a change, the first of which is left out; None: it ran out of memory."""
        seconds: list[float] = []
        is_rival, is_changed = setting != self.incumbent, setting != self.setting
        lost_before = self._lost_seconds
        for number in range(length + is_changed):
            step = yield setting
            if step.seconds is None:
                if is_rival:
                    self.space.too_large.add(setting)
                    return None
                continue
            if is_changed and not number:
                self._lost_seconds += max(step.seconds - self.level, 0.0)
                self._changes.append(max(self._lost_seconds - lost_before - one_time, 0.0))
                first = step.seconds
                if is_rival and step.seconds - self.level > self._left_seconds():
                    break
                continue
            seconds.append(step.seconds)
            self._times.setdefault(setting, []).append(step.seconds)
            if is_rival:
                lag = math.log(self._typical(seconds) / self.level)
                error = self._noise * math.sqrt(1 / len(seconds) + 1 / max(len(self._last_steps), 4))
                if (len(seconds) > 1 and lag > max(2.5 * error, 0.03)) or math.expm1(
                    max(lag, 0.0)
                ) * self.level > self._left_seconds():
                    break
        if not is_rival and seconds:
            self._last_steps, self.level = seconds, self._typical(seconds)
        if seconds:
            self._learn_noise(seconds)
        else:
            # Its first step was enough to see that it is too slow: nothing more precise is known.
            self._times.setdefault(setting, [])
            self._note_block(setting, [0.8 * first], 0.3)
            return [first]
        self._note_block(setting, seconds)
        return seconds

    def _ordinary(self, seconds: Sequence[float]) -> list[float]:
        """The steps without those that are slow for another reason."""
        limit = statistics.median_low(seconds) * max(math.exp(4 * self._noise), 1.3)
        return [each for each in seconds if each <= limit]

    def _typical(self, seconds: Sequence[float]) -> float:
        return math.exp(statistics.fmean(map(math.log, self._ordinary(seconds))))

    def _note_block(self, setting: Setting, seconds: Sequence[float], doubt: float = 0.0) -> None:
        """Add a block to what the surrogate knows."""
        variance = self._noise**2 / len(self._ordinary(seconds)) + doubt**2
        self._surrogate.blocks.append(
            Block(setting, self.done - len(seconds) / 2, math.log(self._typical(seconds)), variance, self._epoch)
        )
        self._surrogate.condition()

    def _learn_noise(self, seconds: Sequence[float]) -> None:
        logs = [math.log(each) for each in self._ordinary(seconds)]
        if len(logs) > 1:
            mean, scale = statistics.fmean(logs), math.sqrt(len(logs) / (len(logs) - 1))
            residuals = [(each - mean) * scale for each in logs]
            self._residuals = [*self._residuals, *residuals][-400:]
            self._products = [*self._products, *(a * b for a, b in itertools.pairwise(residuals))][-400:]
            variance = statistics.fmean(each**2 for each in self._residuals)
            # Neighbouring steps are correlated, so that a block contains less information [`step_time` has the source].
            correlation = min(max(statistics.fmean(self._products) / max(variance, 1e-12), 0.2), 0.8)
            self._noise = max(math.sqrt(variance * (1 + correlation) / (1 - correlation)), 0.005)

    def _watch(self, drift: float) -> Generator[Setting, StepRecord, float]:
        """Train with the incumbent until the time of a step has changed; return the logarithm of the change."""
        reference: float | None = None
        away, window = 0, max(self._reference_length(), 16)
        waiting: list[float] = []
        while True:
            while len(waiting) < window:
                step = yield self.incumbent
                if step.seconds is not None:
                    waiting += (step.seconds, *step.more)
            seconds, waiting = waiting[:window], waiting[window:]
            self.level, self._last_steps = self._typical(seconds), seconds
            level = math.log(self.level)
            if reference is None:
                reference = level
            away = away + 1 if abs(level - reference) > max(drift, 5 * self._noise / math.sqrt(window)) else 0
            if away >= 3:
                return level - reference

    def _note(self, text: str) -> None:
        self.journal.append(Decision(self.done, text))

    def _spent_text(self) -> str:
        return f"spent {self.spent_seconds:.3g} of {self.budget_seconds:.3g} s"

    def _name(self, setting: Setting, present: Setting) -> str:
        values = self.space.named(setting).items()
        return " ".join(f"{name}={value}" for (name, value), other in zip(values, present, strict=True) if value != other)
