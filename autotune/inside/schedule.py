"""Which setting the next step of a run trains with: racing on the times of steps, on a budget of lost time.

Pure: times go in, settings come out. `Schedule` is driven by `autotune.inside.tuner` in a run, and by simulations in tests.
"""

import itertools
import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from autotune.inside.comparison import Comparison, PlannedVisit, expected_excess, ordinary, typical
from autotune.inside.space import Move, RunSpace, Setting
from autotune.objective.intervals import Repeat, Spread, pooled_spread
from executor.measurement.timing import WINDOW, has_trend
from search_spaces.knob import Value

EQUAL = 0.01
"""Relative difference that is not worth a measurement, and least uncertainty of what no measurement has shown."""
INTERACTION = 0.3
"""Standard deviation of a knob's effect beside another setting of the other knobs, relative to the effect."""
MOST_BLOCKS = 8
"""Blocks of the longest visit."""
MOST_WARM_UP = 10
"""Steps after which the run's first setting counts as warm."""
LONGEST_BLOCK = 32
"""Steps of one setting after which the other one of a comparison takes over, at most."""
BLOCK_ERROR = 0.04
"""Relative standard error that a block of steps is made long enough for."""
DRIFT = 0.1
"""Relative change of the time of a step from which the search starts again."""
NEW_WORK = 0.3
"""Drift from which nothing measured before counts: a step is other work. A smaller one is more likely the machine's."""
PLANNED = 0.78
"""Part of the budget that the search plans with; the rest is for what it does not foresee."""
FIRST_PLANNED = 0.6
"""The same for the first search, after which a drift may ask for another one."""
UNKNOWN_STEPS = 1_000
"""Steps that a run of unknown length is assumed to have at least. Later it is assumed to be half over."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step of the run."""

    seconds: float | None
    """None: it ran out of memory, and its samples are trained again."""
    lost_seconds: float = 0.0
    """Seconds before the step that no step of a steady run has: a change of the setting, or a failed attempt."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An entry of the schedule's journal."""

    step: int
    text: str


_Steps = Generator[Setting, StepRecord, list[float] | None]
_Search = Generator[Setting, StepRecord, None]


class Schedule:
    """The search for the fastest setting of a run.

    1. The first setting trains until its steps show no trend.
    2. The incumbent's neighbours by one knob are rivals. What is known of a rival is a normal distribution of the logarithm of
       the ratio of its time to the incumbent's: `_outlook`. The next visit goes to the rival with the most expected gain over
       the rest of the run for its expected cost: the knowledge gradient [Frazier, Powell and Dayanik, SIAM J. Control Optim. 47
       (2008)].
    3. A visit is a block of the rival's steps between two of the incumbent's, longer each time; `Spread.ratio` gives the
       interval of the ratio of rates. It ends early if it is hopeless. A rival that is then expected to be faster is the
       incumbent at once, and the former one is a rival.
    4. No step is planned that could exceed the budget: `share` of the run, for all time lost against the setting that is the
       best so far, changes and failed steps included.
    5. When no visit is expected to pay, the search is over. It starts again, within the same budget, when the time of a step
       drifts; after a search without a change only for twice the drift.
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
        self._comparisons: dict[tuple[Setting, Setting], Comparison] = {}
        """Incumbent and rival -> what was measured of them."""
        self._effects: dict[tuple[int, Value, Value], tuple[float, float]] = {}
        """Knob, value and other value -> mean and error of the logarithm of the ratio of times, from the last comparison."""
        self._last_steps: list[float] = []
        """Steps of the incumbent's last block."""
        self._machine = self._run(remembered_seconds)
        self.setting = next(self._machine)
        """The setting of the next step."""

    def record(self, step: StepRecord) -> Setting:
        """Take the time of the step with `setting`; return the setting of the next step."""
        self._lost_seconds += step.lost_seconds
        if step.seconds is not None:
            self.done += 1
            self._elapsed += step.seconds + step.lost_seconds
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
        self._comparisons.clear()
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
        mine = self._times.get(self.incumbent)
        best = statistics.fmean(mine) if mine else self.level
        excess = (max(sum(seconds) - len(seconds) * best, 0.0) for seconds in self._times.values() if seconds)
        return self._spent_before + self._lost_seconds + sum(excess)

    def _affords(self, cost: float) -> bool:
        planned = PLANNED if self.answers else FIRST_PLANNED
        return self.spent_seconds + cost <= planned * self.budget_seconds

    # The search.

    def _run(self, remembered_seconds: float | None) -> _Search:
        yield from self._warm_up()
        if remembered_seconds and abs(math.log(self.level / remembered_seconds)) < DRIFT + self._noise:
            self._note(f"steps take {self.level:.4g} s, as in the earlier run ({remembered_seconds:.4g} s): its setting stays")
        else:
            yield from self._search()
        drift = DRIFT
        while True:
            self.is_over = True
            change = yield from self._watch(drift)
            self.is_over = False
            before = self.incumbent
            self.answers.append((self.done, before))
            self._spent_before, self._lost_seconds = self.spent_seconds, 0.0
            self._times = {}
            self._note(f"steps take {100 * math.expm1(change):+.0f} % of time: the search starts again")
            self._forget(change)
            yield from self._search()
            drift = DRIFT if self.incumbent != before else 2 * drift

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

    def _search(self) -> _Search:
        """PlannedVisit rivals until no visit pays."""
        while True:
            plans = [plan for move in self._moves() if (plan := self._plan(move)).gain > plan.cost]
            if not plans:
                self._note(f"no other setting is expected to save more than it costs to try ({self._spent_text()}): over")
                return
            affordable = [plan for plan in plans if self._affords(plan.risk)]
            if not affordable:
                self._note(f"another trial could exceed the budget ({self._spent_text()}): over")
                return
            yield from self._visit(max(affordable, key=lambda plan: plan.urgency))

    def _moves(self) -> list[Move]:
        moves = [move for index in range(len(self.space.knobs)) for move in self.space.moves(self.incumbent, index)]
        # Those that the incumbent was compared with by another way, such as one with room for a larger micro-batch.
        known = {move.setting for move in moves}
        moves += [
            Move(other, comparison.move.knob, 0)
            for (setting, other), comparison in self._comparisons.items()
            if setting == self.incumbent and other not in known and self.space.fits(other)
        ]
        return moves

    def _outlook(self, move: Move) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm of the ratio of the rival's time to the incumbent's."""
        if comparison := self._comparisons.get((self.incumbent, move.setting)):
            return comparison.mean, comparison.deviation
        mean = variance = 0.0
        for index, (value, other) in enumerate(zip(self.incumbent, move.setting, strict=True)):
            if value != other:
                effect, deviation = self._expected_effect(index, value, other)
                mean, variance = mean + effect, variance + deviation**2
        return mean, math.sqrt(variance)

    def _expected_effect(self, index: int, value: Value, other: Value) -> tuple[float, float]:
        knob = self.space.knobs[index]
        if effect := self._effects.get((index, value, other)):
            # Effects of knobs combine, except for a part that other knobs change.
            return effect[0], math.hypot(effect[1], INTERACTION * effect[0], EQUAL)
        if knob.ordered:
            position = knob.values.index(value)
            behind = 2 * position - knob.values.index(other)
            if 0 <= behind < len(knob.values) and (gain := self._effects.get((index, knob.values[behind], value))):
                # The time of a step is a + b / size: each doubling gains half of what the one before has gained.
                return gain[0] / 2, math.hypot(gain[0] / 2, gain[1], 2 * EQUAL)
        return 0.0, knob.effect

    def _plan(self, move: Move) -> "PlannedVisit":
        mean, deviation = self._outlook(move)
        comparison = self._comparisons.get((self.incumbent, move.setting))
        blocks = min(2 ** len(comparison.visits), MOST_BLOCKS) if comparison else 1
        length = self._block_length() * blocks
        error = self._noise * math.sqrt(2 / length)
        one_time = self._change_cost(move)
        change = one_time + 2 * (statistics.median(self._changes[-10:]) if self._changes else 0.5 * self.level)
        # The standard deviation of the mean that the visit will lead to.
        reach = deviation**2 / math.hypot(deviation, error)
        gain = expected_excess(-abs(mean) if comparison else -mean, reach) * self.remaining_steps * self.level
        # A hopeless block ends after a few steps.
        steps = min(length, 2 + (3 * self._noise / max(deviation, EQUAL)) ** 2)
        cost = expected_excess(mean, deviation) * (steps + 1) * self.level + change
        # If the rival is slow, two steps show it; if it is fast, all steps of this search so far have lost time against it.
        searched = sum(map(len, self._times.values()))
        risk = max(2.0 * math.expm1(max(mean, 0.0) + deviation), searched * math.expm1(max(deviation - mean, 0.0)))
        # The seconds of a compilation are paid whenever the rival is tried first: no reason to try it later.
        return PlannedVisit(move, blocks, gain, cost, risk * self.level + change, gain / max(cost - one_time, 1e-9))

    def _change_cost(self, move: Move) -> float:
        is_paid = (move.knob, move.setting[move.knob]) in self._paid
        return 0.0 if is_paid else self.space.knobs[move.knob].change_seconds

    def _visit(self, visit: "PlannedVisit") -> _Search:
        """Train a block with the rival, then one with the incumbent unless the rival takes its place."""
        move, length = visit.move, self._block_length() * visit.blocks
        prior = self._outlook(move)
        comparison = self._comparisons.setdefault((self.incumbent, move.setting), Comparison(move, prior, []))
        before = self._last_steps[-length:]
        self._paid.add((move.knob, move.setting[move.knob]))
        its = yield from self._block(move.setting, length)
        if its is None:
            del self._comparisons[self.incumbent, move.setting]
            if not self.space.fits(move.setting):
                self._note(f"{self._name(move.setting)}: out of memory")
                return
            # One step was enough to see that it is too slow for the budget: nothing more precise is known.
            self._comparisons[self.incumbent, move.setting] = Comparison(move, (self._first_lag, 0.02), [])
            self._set_effect(self._comparisons[self.incumbent, move.setting])
            self._note(f"{self._name(move.setting)}: {100 * math.expm1(self._first_lag):+.0f} % of time in its first step")
            return
        comparison.visits.append((self._repeat(before), self._repeat(its)))
        self._estimate(comparison)
        if comparison.mean >= 0.0 or not self._is_plausible(comparison):
            mine = yield from self._block(self.incumbent, length)
            if mine is not None:
                # The incumbent before and after, so that a steady drift cancels.
                comparison.visits[-1] = (self._repeat([*before, *mine]), comparison.visits[-1][1])
                self._estimate(comparison)
        self._set_effect(comparison)
        name, rate = self._name(move.setting), comparison.text()
        if comparison.mean < 0.0:
            self._note(f"{name}: {rate}: is the setting now")
            back = Comparison(Move(self.incumbent, move.knob, -move.step), (-comparison.mean, comparison.deviation), [])
            self._comparisons[move.setting, self.incumbent] = back
            if self.setting != move.setting:
                its = (yield from self._block(move.setting, self._block_length())) or its
            self.incumbent, self._last_steps = move.setting, its
            self.level = typical(its)
        else:
            self._note(f"{name}: {rate}: is not faster")

    def _set_effect(self, comparison: "Comparison") -> None:
        """Remember the effect of a knob, for settings that differ in other knobs."""
        changes = [
            (index, *pair)
            for index, pair in enumerate(zip(self.incumbent, comparison.move.setting, strict=True))
            if pair[0] != pair[1]
        ]
        if len(changes) == 1:
            index, value, other = changes[0]
            self._effects[index, value, other] = (comparison.mean, comparison.deviation)
            self._effects[index, other, value] = (-comparison.mean, comparison.deviation)

    def _estimate(self, comparison: "Comparison") -> None:
        """Combine what was expected of a rival with its visits."""
        groups = [
            [Repeat(rate=its.rate / mine.rate, within=math.hypot(its.within, mine.within)) for mine, its in other.visits]
            for other in self._comparisons.values()
        ]
        spread = pooled_spread(groups, Spread(relative=0.01, degrees_of_freedom=4))
        # A longer visit counts for more: as often as it has blocks.
        mine, its = (
            [visit[side] for number, visit in enumerate(comparison.visits) for _ in range(1 + number)] for side in (0, 1)
        )
        ratio = spread.ratio(its, mine, 0.68)
        lag, error = -math.log(ratio.mean), math.log(ratio.high / ratio.low) / 2
        mean, deviation = comparison.prior
        weight = deviation**2 / (deviation**2 + error**2)
        comparison.mean, comparison.deviation = mean + weight * (lag - mean), error * math.sqrt(weight)

    def _is_plausible(self, comparison: "Comparison") -> bool:
        """Whether a gain needs no second look at the incumbent: a neighbour that went away would look the same."""
        return comparison.mean > -3.0 * max(comparison.prior[1], 0.05)

    def _forget(self, change: float) -> None:
        """Measurements from before a drift are expectations, the less certain the larger the drift."""
        share = min(abs(change) / NEW_WORK, 1.0)
        for (index, value, other), (mean, deviation) in self._effects.items():
            doubt = share * max(abs(mean), self.space.knobs[index].effect)
            self._effects[index, value, other] = ((1.0 - share / 2) * mean, math.hypot(deviation, doubt))
        self._comparisons.clear()

    # Steps.

    def _block_length(self) -> int:
        return min(max(math.ceil((self._noise / BLOCK_ERROR) ** 2), 2), LONGEST_BLOCK)

    def _block(self, setting: Setting, length: int) -> _Steps:
        """Train steps after a change, the first of which is left out; None: it failed, or is too slow for a second step."""
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
                self._changes.append(self._lost_seconds - lost_before)
                self._first_lag = math.log(step.seconds / self.level)
                if is_rival and self._first_lag > 0.0 and not self._affords(math.expm1(self._first_lag) * self.level):
                    return None
                continue
            seconds.append(step.seconds)
            self._times.setdefault(setting, []).append(step.seconds)
            if is_rival:
                lag = math.log(typical(seconds) / self.level)
                error = self._noise * math.sqrt(1 / len(seconds) + 1 / len(self._last_steps))
                if lag > max(2.5 * error, 0.03) or not self._affords(math.expm1(max(lag, 0.0)) * self.level):
                    break
        if not is_rival and seconds:
            self._last_steps, self.level = seconds, typical(seconds)
        self._learn_noise(seconds)
        return seconds or None

    def _learn_noise(self, seconds: Sequence[float]) -> None:
        logs = [math.log(each) for each in ordinary(seconds)]
        if len(logs) > 1:
            mean, scale = statistics.fmean(logs), math.sqrt(len(logs) / (len(logs) - 1))
            residuals = [(each - mean) * scale for each in logs]
            self._residuals = [*self._residuals, *residuals][-400:]
            self._products = [*self._products, *(a * b for a, b in itertools.pairwise(residuals))][-400:]
            variance = statistics.fmean(each**2 for each in self._residuals)
            # Neighbouring steps are correlated, so that a block contains less information [`step_time` has the source].
            correlation = min(max(statistics.fmean(self._products) / max(variance, 1e-12), 0.2), 0.8)
            self._noise = max(math.sqrt(variance * (1 + correlation) / (1 - correlation)), 0.005)

    def _repeat(self, seconds: Sequence[float]) -> Repeat:
        return Repeat(rate=1 / typical(seconds), within=self._noise / math.sqrt(len(ordinary(seconds))))

    def _watch(self, drift: float) -> Generator[Setting, StepRecord, float]:
        """Train with the incumbent until the time of a step has changed; return the logarithm of the change."""
        reference: float | None = None
        away, window = 0, max(2 * self._block_length(), 16)
        while True:
            seconds: list[float] = []
            while len(seconds) < window:
                step = yield self.incumbent
                if step.seconds is not None:
                    seconds.append(step.seconds)
            self.level, self._last_steps = typical(seconds), seconds
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

    def _name(self, setting: Setting) -> str:
        values = self.space.named(setting).items()
        return " ".join(
            f"{name}={value}" for (name, value), other in zip(values, self.incumbent, strict=True) if value != other
        )
