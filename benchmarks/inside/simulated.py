"""Simulated runs that tune themselves: what the search costs, and how far its choice is from the best.

A run has six knobs, 480 settings. The time of a step is (b + a / micro-batch size) x the factors of the other knobs x an
interaction of each setting, with correlated noise, outliers, a slow drift of the machine, jumps (a neighbour comes or goes)
and, in a fifth of the runs, a change of what steps consist of, after which other settings are best.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from autotune.inside.schedule import Schedule, StepRecord
from autotune.inside.space import RunKnob, RunSpace, Setting
from search_spaces.knob import Value

KNOBS = (
    RunKnob(name="micro_batch_size", values=(1, 2, 4, 8, 16), ordered=True, effect=0.2, trend=-0.1, grows=True),
    RunKnob(name="activation_checkpointing", values=("none", "full"), effect=0.15, trend=0.25, saving_value="full"),
    RunKnob(name="attention", values=("eager", "sdpa"), effect=0.1),
    RunKnob(name="compile", values=(False, True), effect=0.15),
    RunKnob(name="forward_prefetch", values=(0, 1, 2), ordered=True, effect=0.05),
    RunKnob(name="bucket_mib", values=(5, 25, 100, 400), ordered=True, effect=0.05),
)


@dataclass
class SimulatedRun:
    """A run whose times are drawn from a seed."""

    seed: int
    share: float = 0.01
    random: Random = field(init=False)
    steps: int = field(init=False)
    noise: float = field(init=False)
    start: Setting = field(init=False)

    def __post_init__(self) -> None:
        draw = self.random = Random(self.seed)
        self.steps = round(math.exp(draw.uniform(math.log(5_000), math.log(50_000))))
        self.noise = math.exp(draw.uniform(math.log(0.02), math.log(0.2)))
        self.start = next(
            filter(
                self.fits,
                iter(
                    lambda: tuple(draw.choice(knob.values[:1] if knob.name == "compile" else knob.values) for knob in KNOBS),
                    None,
                ),
            )
        )
        self._tables = [self._table()]
        self._changes: list[tuple[int, float]] = []
        """Step and factor of each jump of the machine's speed."""
        for _ in range(draw.choice((0, 0, 1, 2))):
            self._changes.append((draw.randrange(self.steps), draw.choice((1.15, 1.3, 0.8, 0.9))))
        self.other_work_from = draw.randrange(self.steps // 4, self.steps // 2) if draw.random() < 0.2 else self.steps
        if self.other_work_from < self.steps:
            # Longer or shorter samples.
            factor = draw.choice((0.6, 0.75, 1.3, 1.8))
            self._tables.append({setting: factor * seconds for setting, seconds in self._table().items()})
        self._amplitude, self._period = draw.choice((0.0, 0.02, 0.05)), draw.uniform(500, 5_000)
        self._correlated = 0.0
        self._change_seconds = draw.uniform(0.05, 1.0)
        # Compilation takes up to a third of what the search may cost: in shorter runs it is left out, by name.
        compilation = draw.uniform(0.0, 0.3) * self.share * self.steps * min(self._tables[0].values())
        self.knobs = tuple(
            replace(knob, change_seconds=compilation if knob.name == "compile" else 0.0, values=knob.values) for knob in KNOBS
        )
        self._first_step = draw.uniform(0.05, 0.6)

    def _table(self) -> dict[Setting, float]:
        draw = self.random
        per_micro_batch = draw.uniform(0.05, 1.0)
        factors = [self._factors(knob) for knob in KNOBS[2:]]
        recomputation = draw.uniform(1.1, 1.35)
        scale = 1.0
        return {
            setting: scale
            * (1.0 + per_micro_batch / setting[0])
            * (recomputation if setting[1] == "full" else 1.0)
            * math.prod(factor[value] for factor, value in zip(factors, setting[2:], strict=True))
            * math.exp(draw.gauss(0.0, 0.005))
            for setting in itertools.product(*(knob.values for knob in KNOBS))
        }

    def _factors(self, knob: RunKnob) -> dict[Value, float]:
        """Factors of a knob's values; those of an ordered knob have one minimum."""
        draw = self.random
        if not knob.ordered:
            return {value: math.exp(draw.gauss(0.0, knob.effect * 0.8)) for value in knob.values}
        best, scale = draw.uniform(0.0, len(knob.values) - 1.0), abs(draw.gauss(0.0, knob.effect * 0.8))
        return {value: math.exp(scale * (position - best) ** 2 / 2) for position, value in enumerate(knob.values)}

    def fits(self, setting: Setting) -> bool:
        """Whether a setting has enough memory: the largest micro-batch only with recomputation."""
        return setting[0] < 16 or setting[1] == "full"

    def level(self, step: int) -> float:
        """The machine's slowness at a step."""
        jumps = math.prod(factor for at, factor in self._changes if at <= step)
        return jumps * (1.0 + self._amplitude * math.sin(2 * math.pi * step / self._period))

    def expected(self, setting: Setting, step: int) -> float:
        """Seconds of a step without noise."""
        return self._tables[-1 if step >= self.other_work_from else 0][setting] * self.level(step)

    def measured(self, setting: Setting, step: int) -> float:
        """Seconds of a step."""
        draw = self.random
        self._correlated = 0.4 * self._correlated + math.sqrt(1 - 0.4**2) * draw.gauss(0.0, self.noise)
        outlier = draw.uniform(2.0, 5.0) if draw.random() < 0.003 else 1.0
        return self.expected(setting, step) * math.exp(self._correlated) * outlier

    def play(self, report: Callable[[str], None] | None = None) -> "Outcome":
        """Train all steps under the schedule."""
        space = RunSpace(self.knobs)
        schedule = Schedule(space, self.start, share=self.share, steps=self.steps)
        used: list[tuple[Setting, float]] = []
        previous, lost, compiled = schedule.setting, 0.0, set(enumerate(self.start))
        while len(used) < self.steps:
            step, setting = len(used), schedule.setting
            expected = self.expected(setting, step)
            if not self.fits(setting):
                lost += 0.5 * expected
                schedule.record(StepRecord(None, 0.5 * expected))
                continue
            extra = change = 0.0
            if setting != previous:
                change = self._change_seconds * min(expected, 2.0)
                change += sum(self.knobs[index].change_seconds for index, value in {*enumerate(setting)} - compiled)
                compiled |= {*enumerate(setting)}
                extra = self._first_step * expected
            previous = setting
            used.append((setting, change + extra + lost))
            lost = 0.0
            schedule.record(StepRecord(self.measured(setting, step) + extra, change))
        if report:
            for decision in schedule.journal:
                report(f"{decision.step}: {decision.text}")
        cost = total = 0.0
        answers = [*schedule.answers, (self.steps, schedule.incumbent)]
        for step, (setting, extra) in enumerate(used):
            while step >= answers[0][0]:
                answers.pop(0)
            best = self.expected(answers[0][1], step)
            cost += self.expected(setting, step) - best + extra
            total += best
        fastest = min(seconds for setting, seconds in self._tables[-1].items() if self.fits(setting))
        behind = self._tables[-1][schedule.incumbent] / fastest - 1.0
        return Outcome(cost / total, behind, schedule.spent_seconds / total, self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run has shown."""

    cost: float
    """Time lost against the final choice, relative to the run."""
    behind: float
    """Relative time by which the final choice is slower than the best setting."""
    shown: float
    """The cost as the schedule itself has shown it, relative to the run."""
    run: SimulatedRun


def rows_of_page(outcomes: list[Outcome]) -> list[tuple[str, int, float, float, float, float]]:
    """For each class of runs: name, runs, share within the budget, share within 3 % of the best, mean cost, highest cost."""
    classes: list[tuple[str, Callable[[Outcome], bool]]] = [("all", lambda _: True)]
    for low, high in itertools.pairwise((0.02, 0.05, 0.1, 0.2)):
        classes.append((f"noise {low:.0%} to {high:.0%}", lambda o, low=low, high=high: low <= o.run.noise < high))  # type: ignore[misc]
    for low, high in itertools.pairwise((5_000, 10_000, 20_000, 50_000)):
        classes.append((f"{low:,} to {high:,} steps", lambda o, low=low, high=high: low <= o.run.steps < high))  # type: ignore[misc]
    classes.append(("other work in the middle", lambda o: o.run.other_work_from < o.run.steps))
    rows = []
    for name, belongs in classes:
        chosen = [outcome for outcome in outcomes if belongs(outcome)]
        if chosen:
            within, close = (
                statistics.fmean(flags)
                for flags in ([o.cost <= o.run.share for o in chosen], [o.behind <= 0.03 for o in chosen])
            )
            rows.append(
                (name, len(chosen), within, close, statistics.fmean(o.cost for o in chosen), max(o.cost for o in chosen))
            )
    return rows


if __name__ == "__main__":
    for name, count, within, close, mean, most in rows_of_page([SimulatedRun(seed).play() for seed in range(int(sys.argv[1]))]):
        print(f"{name:28} {count:4} {within:7.1%} {close:7.1%} {mean:8.2%} {most:8.2%}")
