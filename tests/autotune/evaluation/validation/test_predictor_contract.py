"""The contract of predictors, on the tests' own small one."""

import pytest
from predictor_case import PredictorCase
from roofline import Roofline

from autotune.evaluation.validation.contract import Predictor


class TestRoofline(PredictorCase):
    @pytest.fixture
    def predictor(self) -> Predictor:
        return Roofline()
