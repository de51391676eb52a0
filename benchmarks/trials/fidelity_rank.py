"""Times steps with three counts of micro-batches in turn, in one build; returns the seconds as JSON in `environment`.

`wall` is the slowest rank's, `cpu` the sum over the ranks, which a busy machine changes less.

Rank processes import this module by name in place of `executor.trial.run`.
"""

import json
import time
from collections.abc import Callable

from executor.engine import RankContext
from executor.measurement.meter import line_of
from executor.measurement.trial_report import gather_numbers
from executor.trial.run import ENGINES
from search_spaces.outcome import Outcome
from search_spaces.trial import Progress, TrialRequest, TrialResult


def run_trial(context: RankContext, request: TrialRequest, _: Callable[[Progress], None]) -> TrialResult:
    """Time `fidelity.max_steps` cycles, after two that are discarded."""
    line = line_of(request)
    assert line is not None
    counts = {"first": line.first, "second": line.second, "full": line.full}
    wall: dict[str, list[float]] = {name: [] for name in counts}
    work: dict[str, list[float]] = {name: [] for name in counts}
    session = ENGINES[request.engine].build(context, request.model, request.config, request.workload)
    for cycle in range(request.fidelity.max_steps + 2):
        for name, count in counts.items():
            session.prepare(cycle, count)
            gather_numbers(context, [0.0])
            began, worked = time.perf_counter(), time.process_time()
            session.train_step()
            rows = gather_numbers(context, [time.perf_counter() - began, time.process_time() - worked])
            if cycle > 1:
                wall[name].append(max(row[0] for row in rows))
                work[name].append(sum(row[1] for row in rows))
    session.close()
    return TrialResult(
        attempt=request.attempt, outcome=Outcome.OK, environment={"wall": json.dumps(wall), "cpu": json.dumps(work)}
    )
