"""The steps that a script tells, as a trial times them: warm-up dropped, then timed until the interval is narrow."""

from executor.engines.command.readings import StepTold
from executor.measurement.timing import has_trend
from executor.measurement.trial_state import Trial, is_enough

FEWEST_TIMED = 2
"""Steps that an interval needs."""


class ReportedSteps:
    """Takes steps in their order. The rules are those of the engines' own steps (`executor.trial.run`)."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._warm: list[StepTold] = []
        self._timed: list[StepTold] = []
        self.settled = False
        self.measuring = False
        self.enough = False
        self.hopeless = False
        """Whether warm-up alone showed that the trial cannot win."""

    @property
    def warm_seconds(self) -> list[float]:
        """Of every step of warm-up."""
        return [step.seconds for step in self._warm]

    @property
    def latest_rate(self) -> float:
        """Samples/s of the last step; 0: there is none."""
        last = (self._timed or self._warm)[-1:]
        return self._trial.request.workload.global_batch_size / last[0].seconds if last else 0.0

    def add(self, step: StepTold) -> None:
        """Take one step; those after the last that is needed are passed over."""
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

    def timed(self) -> list[StepTold]:
        """The timed steps. Of a script that ended before there were enough, the later half of all: then nothing has settled."""
        if len(self._timed) >= FEWEST_TIMED:
            return self._timed
        every = [*self._warm, *self._timed]
        self.settled = False
        return every[len(every) // 2 :]

    def _is_enough(self) -> bool:
        seconds = [step.seconds for step in self._timed]
        return len(seconds) >= self._trial.request.fidelity.max_steps or is_enough(self._trial, seconds, sum(seconds))
