"""The contract of predictors, on the tests' own small one."""

import pytest

from benchmarks.prediction.scoring.contract import Predictor
from tests.benchmarks.prediction.predictor_case import PredictorCase
from tests.benchmarks.prediction.roofline import Roofline


class TestRoofline(PredictorCase):
    @pytest.fixture
    def predictor(self) -> Predictor:
        return Roofline()
