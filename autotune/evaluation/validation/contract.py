"""What is scored: a predictor of step time, peak memory and out of memory for rows of a table of measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.evaluation.validation.row import Row

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecast:
    """Arrays over the rows that were asked about, in their order. NaN: the predictor has no figure for the row."""

    step_seconds: Floats
    """Seconds of an optimizer step of `row.samples_per_step` samples."""
    step_seconds_low: Floats
    step_seconds_high: Floats
    memory_bytes: Floats
    """Peak memory of the device that needs most, or of the one whose memory the row's `mem_kind` says was read."""
    memory_bytes_low: Floats
    memory_bytes_high: Floats
    out_of_memory: Flags
    """The verdict: true where the predictor would not run the configuration."""


class Predictor(Protocol):
    """Predicts rows. What it says of one row must not depend on which others are asked about at once.

    - `refusals` and `forecast` get rows without what was measured and how the run ended; `calibrated` gets these too.
    - Names of sources, models and row ids must not change what it predicts, except to tell apart whom it was calibrated on.
    - It changes by nothing that is called: `calibrated` returns another.
    """

    def in_sample(self, rows: Sequence[Row]) -> int:
        """How many of the rows its shipped coefficients were fitted on; 0 of one that `calibrated` returned."""
        ...

    def refusals(self, rows: Sequence[Row]) -> Sequence[str | None]:
        """Why each row cannot be represented: one line; None where it can. Calibration does not change it."""
        ...

    def calibrated(self, rows: Sequence[Row]) -> "Predictor":
        """One fitted on these rows' measurements and outcomes, and on nothing else but generic priors.

        Shipped coefficients that were fitted on measurements must not enter. None of the rows is one that it refuses; they
        may hold times alone, memory alone or neither. There may be no row: then what is returned knows the priors alone.
        """
        ...

    def forecast(self, rows: Sequence[Row]) -> Forecast:
        """What it predicts of rows that it does not refuse."""
        ...
