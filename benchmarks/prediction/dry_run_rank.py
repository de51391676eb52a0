"""A trial inside a rank whose result also holds the FLOPs that each rank counted (`flops`)."""

import dataclasses
from collections.abc import Callable
from typing import Any

from executor.engine import RankContext
from executor.measurement.flop_counter import FlopCounter
from executor.measurement.trial_report import gather_plain
from executor.trial import run as trial
from search_spaces.trial import Progress, TrialRequest, TrialResult

TOTALS: list[int | None] = []


class KeptCounter(FlopCounter):
    """Stores its total in `TOTALS`."""

    def __exit__(self, *error: Any) -> Any:
        TOTALS[:] = [self.total]
        return super().__exit__(*error)


trial.FlopCounter = KeptCounter  # type: ignore[misc]


def run_trial(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    """`executor.trial.run.run_trial`, with the FLOPs in `environment`."""
    result = trial.run_trial(context, request, progress)
    counted = gather_plain(context, TOTALS.pop())
    return dataclasses.replace(result, environment={"flops": " ".join(map(str, counted))})
