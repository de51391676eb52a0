"""The interface that is scored: a predictor of step time, peak memory and out of memory for rows of measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.knowledge.row import TableRow

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """Arrays over the requested rows, in order. NaN: the predictor has no value for the row."""

    step_seconds: Floats
    """Seconds of an optimizer step of `row.samples_per_step` samples."""
    step_seconds_low: Floats
    step_seconds_high: Floats
    memory_bytes: Floats
    """Peak memory of the device that needs the most, or of the one named by the row's `mem_kind`."""
    memory_bytes_low: Floats
    memory_bytes_high: Floats
    fit_probability: Floats
    """The probability that memory suffices."""

    @property
    def out_of_memory(self) -> Flags:
        """The verdict: which configurations are expected to run out of memory."""
        verdict: Flags = self.fit_probability < 0.5
        return verdict


class Predictor(Protocol):
    """Predicts rows. The prediction for a row must not depend on the other rows in the call.

    - `refusals` and `forecast` get rows without measurements and outcomes; `calibrated` gets them with both.
    - Names of sources, models and row ids must not affect predictions, except to identify sources of the calibration.
    - Calls do not change the object: `calibrated` returns another.
    """

    def in_sample(self, rows: Sequence[TableRow]) -> int:
        """Number of the rows used to fit its shipped coefficients; 0 for a result of `calibrated`."""
        ...

    def refusals(self, rows: Sequence[TableRow]) -> Sequence[str | None]:
        """Why each row cannot be represented: one line; None: it can. Independent of calibration."""
        ...

    def calibrated(self, rows: Sequence[TableRow]) -> "Predictor":
        """A predictor fitted only on these rows' measurements and outcomes, and on generic priors.

        Shipped coefficients that were fitted on measurements must not be used. None of the rows is refused by the predictor;
        they may contain only times, only memory or neither. Without rows, the result uses only the priors.
        """
        ...

    def forecast(self, rows: Sequence[TableRow]) -> Forecast:
        """Predictions for rows that are not refused."""
        ...
