"""Predictions of the equations for the sizes of a series, with the database's calibration of the cluster."""

import dataclasses
from dataclasses import dataclass

from autotune.errors import AutotuneError
from autotune.forecast import question_of_session
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.largest import Dimension, largest
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan import Bounds
from autotune.session.session import Session
from search_spaces.errors import SearchSpaceError
from search_spaces.trial import Interval
from storage.store import open_store

MOST_PREDICTED = 2_000_000
"""Most configurations that are examined for a size; this takes some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EquationForecast:
    """Predicts if the model's shape is known and its space is small enough to scan."""

    database: str

    def rate(self, session: Session) -> Interval | None:
        """Samples/s of the best plan."""
        question = self._question(session)
        if question is None:
            return None
        try:
            plan_result = plan(question, PlanOptions(top=1), Bounds(configurations=MOST_PREDICTED))
        except (AutotuneError, SearchSpaceError):  # too many, or none is predicted to fit: trials decide instead
            return None
        return plan_result.plans[0].estimate.samples_per_second

    def longest(self, session: Session) -> int | None:
        """Tokens of the longest samples for which a configuration is predicted to fit."""
        question = self._question(session)
        if question is None:
            return None
        try:
            return largest(question, Dimension.SEQUENCE_LENGTH, PROBABILITY, Bounds(configurations=MOST_PREDICTED)).value
        except (AutotuneError, SearchSpaceError):
            return None

    def _question(self, session: Session) -> Question | None:
        question = question_of_session(session)
        if question is None:
            return None
        with open_store(self.database) as store:
            return asked_here(store, dataclasses.replace(question, pins=session.request.pins))
