"""The real trial, whose result also tells how many micro-batches each rank of a pipeline held (`in_flight`).

Rank processes import it by name from this folder, as they import `executor.trial.run` otherwise.
"""

import dataclasses

from executor.engines.native.engine import NativeEngine
from executor.measurement.trial_report import gather_numbers
from executor.trial import run as trial

SESSIONS = []


class WatchedEngine(NativeEngine):
    """Keeps the pipeline of the session that it built last."""

    def build(self, context, model, config, workload):
        session = super().build(context, model, config, workload)
        SESSIONS[:] = [session.pipeline]
        return session


trial.ENGINES["native"] = WatchedEngine()
trial.COUNTED_STEP = -1  # a step whose FLOPs are counted takes longer than all others, and nobody reads them here


def run_trial(context, request, progress):
    result = trial.run_trial(context, request, progress)
    pipeline = SESSIONS.pop()
    held = gather_numbers(context, [0.0 if pipeline is None else pipeline.most_in_flight])
    return dataclasses.replace(result, environment={"in_flight": " ".join(str(most) for (most,) in held)})
