"""Times the steps that a script reports: drops the warm-up, then times steps until the interval is narrow."""

from executor.engines.command.readings import ReportedStep
from executor.measurement.timing import has_trend
from executor.measurement.trial_state import Trial, is_enough

FEWEST_TIMED = 2
"""Minimum number of steps for an interval."""


class ReportedSteps:
    """Takes steps in order. The rules are those for steps of the other engines (`executor.trial.run`)."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._warm: list[ReportedStep] = []
        self._timed: list[ReportedStep] = []
        self.settled = False
        self.measuring = False
        self.enough = False
        self.hopeless = False
        """Whether the warm-up already showed that the trial cannot win."""

    @property
    def warm_seconds(self) -> list[float]:
        """Duration of every warm-up step."""
        return [step.seconds for step in self._warm]

    @property
    def latest_rate(self) -> float:
        """Samples/s of the last step; 0: no step yet."""
        last = (self._timed or self._warm)[-1:]
        return self._trial.request.workload.global_batch_size / last[0].seconds if last else 0.0

    def add(self, step: ReportedStep) -> None:
        """Add one step. Steps are ignored once there are enough."""
        if self.enough:
            return
        if self.measuring:
            self._timed.append(step)
            self.enough = self._is_enough()
            return
        self._warm.append(step)
        fidelity, race = self._trial.request.fidelity, self._trial.race
        self.settled = not has_trend(self.warm_seconds[fidelity.warmup_updates :])
        self.measuring = self.settled or len(self._warm) >= fidelity.max_warmup_steps
        self.enough = self.hopeless = race is not None and race.is_hopeless(self.warm_seconds)

    def timed(self) -> list[ReportedStep]:
        """The timed steps. If the script ended before there were enough: the later half of all steps, marked as not settled."""
        if len(self._timed) >= FEWEST_TIMED:
            return self._timed
        every = [*self._warm, *self._timed]
        self.settled = False
        return every[len(every) // 2 :]

    def _is_enough(self) -> bool:
        seconds = [step.seconds for step in self._timed]
        return len(seconds) >= self._trial.request.fidelity.max_steps or is_enough(self._trial, seconds, sum(seconds))
