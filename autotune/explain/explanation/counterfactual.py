"""Predicts the winner's step time on other hardware, scaled to the measured step."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from autotune.explain.explanation.evidence import Evidence
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.step import Z90, predict, seconds_of
from autotune.prediction.planning.question import Question
from search_spaces.trial import Interval

FREE = 1e9
"""Speed-up factor at which a resource costs nothing."""
NEGLIGIBLE = 1e-15
"""Replaces a coefficient that is to cost nothing. It is not 0, because the equations divide by some coefficients."""


class Counterfactual:
    """Predicts the winner's step under changes."""

    def __init__(self, evidence: Evidence, question: Question) -> None:
        self._cases = cases_of(question.model, question.cluster, question.workload, [evidence.config], question.engine)
        self._rates = question.rates
        self._predicted = self.seconds()
        self.measured = evidence.step_seconds

    def seconds(self, times: Mapping[str, float] | None = None, without: tuple[str, ...] = ()) -> float:
        """Predicted seconds of a step: hardware figures multiplied by `times`, coefficients in `without` set to almost 0."""
        return float(seconds_of(*self._changed(times or {}, without))[0])

    def part(self, name: str, times: Mapping[str, float], without: tuple[str, ...]) -> float:
        """Predicted seconds of one part of the step, changed as in `seconds`."""
        return float(predict(*self._changed(times, without)).parts[name][0])

    @property
    def scale(self) -> float:
        """Factor for predicted seconds: below 1 where the prediction exceeds the measurement. All parts shrink alike."""
        return min(1.0, self.measured / self._predicted)

    def saved(self, times: Mapping[str, float], without: tuple[str, ...] = ()) -> float:
        """Seconds of the measured step that the change saves."""
        return max(self._predicted - self.seconds(times, without), 0.0) * self.scale

    def gain(self, times: Mapping[str, float]) -> Interval:
        """The rate after the change relative to the measured rate, with its band.

        The saving is as uncertain as the step: by the spread of predictions, and by the error of this one. A step cannot become
        faster by a larger factor than the factors in `times`.
        """
        saved, most = self.saved(times), self.measured * (1 - 1 / max(times.values()))
        off = math.exp(Z90 * math.hypot(self._rates.time_spread, math.log(self.measured / self._predicted)))
        mean, low, high = (self.measured / (self.measured - min(part, most)) for part in (saved, saved / off, saved * off))
        return Interval(mean=mean, low=low, high=high)

    def _changed(self, times: Mapping[str, float], without: tuple[str, ...]) -> Any:
        hardware = self._cases.hardware
        changed = {name: getattr(hardware, name) * factor for name, factor in times.items()}
        cases = dataclasses.replace(self._cases, hardware=dataclasses.replace(hardware, **changed))
        return cases, dataclasses.replace(self._rates, **dict.fromkeys(without, NEGLIGIBLE))
