"""When the steps of a script are steady, which of them are timed, and when there are enough."""

import dataclasses
import itertools
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from executor.engines.command.readings import ReportedStep
from executor.measurement.timing import WINDOW, has_trend
from executor.measurement.trial_report import Trial, is_measured

SLOW = 2.5
"""Factor over an ordinary step from which a step is slow: it also evaluates, saves, compiles, or its caches are cold."""
STRETCH = 10.0
"""Multiple of the trial's seconds for which steps are watched at most, until slow ones are explained."""
FEWEST_STEPS = 20
"""Steps before which nothing is concluded: all of fewer may be of a slow start (torch.compile tries eight shapes)."""
FEWEST_IRREGULAR = 4
"""Slow steps of the later half from which they are a part of ordinary steps, if there were not more in the earlier half."""
FEWEST_TIMED = 2
"""Minimum number of steps for an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSteps:
    """The slow steps of a script, and what they are."""

    start: int = 0
    """Number of first steps up to the last slow one of the start."""
    regular: tuple[int, ...] = ()
    """Indices of the steps that are slow regularly; empty: there are none."""
    ordinary: float = 0.0
    """Seconds of an ordinary step."""
    explained: bool = True
    """Whether every slow step is one of the start or regular. If not, more steps will show."""

    @property
    def period(self) -> float:
        """Steps from one regularly slow one to the next."""
        return (self.regular[-1] - self.regular[0]) / (len(self.regular) - 1)

    @property
    def first(self) -> int:
        """Index of the first step that may be timed: after the start, and after the first regularly slow step."""
        return self.regular[0] + 1 if self.regular else self.start


def slow_steps(seconds: Sequence[float]) -> SlowSteps:
    """Explain the slow steps of a script by their positions alone.

    1. An ordinary step is the median of the later half of all steps, or of the last ones if they are faster: most steps so
       far may be of a slow start.
    2. Slow steps at equal distances are regular: an evaluation or a checkpoint every so many steps. Three show it, or two if
       they are far from each other and the first is as far from the start. They must be more than the irregular ones before
       them, which count once where they follow each other: of many irregular ones, three are equally far apart by chance.
    3. Slow steps belong to the start (compilation for each new shape, cold caches, trials of kernels) once twice as many
       ordinary steps followed as there were between any two of them, and at least twice the window of warm-up.
    4. Irregular slow steps that do not become rarer belong to no start: other programs use the processor. They are timed.
    """
    count = len(seconds)
    if count < WINDOW:
        return SlowSteps(explained=False)
    ordinary = min(statistics.median(seconds[count // 2 :]), statistics.median_low(seconds[-WINDOW:]))
    slow = [index for index, value in enumerate(seconds) if value > SLOW * ordinary]
    if not slow:
        return SlowSteps()
    gaps = [slow[0] + 1, *(later - earlier for earlier, later in itertools.pairwise(slow))]
    period, since = gaps[-1], count - 1 - slow[-1]
    tolerance = period // 10
    equal = list(itertools.takewhile(lambda gap: gap > 1 and abs(gap - period) <= tolerance, reversed(gaps)))
    regular = slow[-len(equal) - 1 :]
    fewest = max(2 if period >= 2 * WINDOW else 3, 1 + sum(gap > 1 for gap in gaps[: len(slow) - len(regular)]))
    if len(equal) >= 2 and len(regular) >= fewest and since <= period + tolerance + 1:
        start = slow[-len(regular) - 1] + 1 if len(regular) < len(slow) else 0
        ordinary = statistics.fmean(seconds[index] for index in range(regular[0], count) if index not in regular)
        return SlowSteps(start=start, regular=tuple(regular), ordinary=ordinary)
    if since >= max(2 * WINDOW, 2 * max(gaps)):
        return SlowSteps(start=slow[-1] + 1)
    later = sum(index >= count // 2 for index in slow)
    if later >= max(FEWEST_IRREGULAR, len(slow) - later):
        return SlowSteps()
    return SlowSteps(explained=False)


class ReportedSteps:
    """Takes steps in order. The rules are those for steps of the other engines (`executor.trial.run`), and these:

    - Slow first steps are warm-up, also where only later steps show it.
    - The time by which regularly slow steps are longer is spread over the steps of their period.
    - No race is lost, and the trial does not end, before `FEWEST_STEPS`, before slow steps are explained, and before as many
      steps as the baseline's slow start needs here. A trial that takes too long for that (`STRETCH`) is measured as it is.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._steps: list[ReportedStep] = []
        self._warm: int | None = None
        self._is_steady = False
        self.slow = SlowSteps(explained=False)
        self.enough = False
        self.lost = False
        """Whether the race against the best is lost."""

    @property
    def measuring(self) -> bool:
        """Whether warm-up is over."""
        return self._warm is not None

    @property
    def settled(self) -> bool:
        """Whether step times had no trend, and enough steps followed."""
        return self._is_steady and len(self._steps) - self._first >= FEWEST_TIMED

    @property
    def latest_rate(self) -> float:
        """Samples/s of the last step; 0: no step yet."""
        return self._trial.request.workload.global_batch_size / self._steps[-1].seconds if self._steps else 0.0

    def add(self, step: ReportedStep) -> None:
        """Add one step. Steps are ignored once there are enough."""
        if self.enough:
            return
        self._steps.append(step)
        fidelity, race = self._trial.request.fidelity, self._trial.race
        seconds = [each.seconds for each in self._steps]
        self.slow = slow_steps(seconds)
        if self._warm is None:
            self._is_steady = not has_trend(seconds[fidelity.warmup_updates :])
            self._warm = len(seconds) if self._is_steady or len(seconds) >= fidelity.max_warmup_steps else None
            return
        is_late = sum(seconds) > STRETCH * fidelity.max_seconds or len(seconds) >= STRETCH * fidelity.max_steps
        start = 0 if race is None or race.warmup_steps is None else race.warmup_steps
        is_shown = self.slow.explained and len(seconds) >= max(start, FEWEST_STEPS)
        if not (is_shown or is_late):
            return
        timed = [each.seconds for each in self.timed()]
        self.lost = is_shown and race is not None and race.warmup_steps is not None and race.is_lost(timed)
        self.enough = self.lost or len(timed) >= fidelity.max_steps or is_measured(fidelity, timed, sum(timed))

    def timed(self) -> list[ReportedStep]:
        """The timed steps. If the script ended before there were enough: the later half of all steps."""
        first = self._first
        if len(self._steps) - first < FEWEST_TIMED:
            first = len(self._steps) // 2
        if not self.slow.regular:
            return self._steps[first:]
        # Each period's own excess, so that the steps vary as the periods do.
        ends, ordinary, period = self.slow.regular[1:], self.slow.ordinary, self.slow.period
        spread = []
        for index, step in enumerate(self._steps[first:], first):
            excess = self._steps[ends[min(bisect_left(ends, index), len(ends) - 1)]].seconds - ordinary
            seconds = (ordinary if index in ends else step.seconds) + excess / period
            spread.append(dataclasses.replace(step, seconds=seconds))
        return spread

    @property
    def _first(self) -> int:
        """Index of the first timed step."""
        return max(len(self._steps) if self._warm is None else self._warm, self.slow.first)
