"""The real trial, whose result also tells how many micro-batches each rank of a pipeline held (`in_flight`).

Rank processes import it by name from this folder, as they import `executor.trial.run` otherwise.
"""

import dataclasses

from executor.engines.native.engine import NativeEngine
from executor.measurement.trial_report import gather_numbers
from executor.parallel import pipeline
from executor.trial import run as trial

SESSIONS = []


class WatchedEngine(NativeEngine):
    """Keeps the pipeline of the session that it built last."""

    def build(self, context, model, config, workload):
        session = super().build(context, model, config, workload)
        SESSIONS[:] = [session.pipeline]
        return session


class CountedStage(pipeline._NotifyingStage):
    """Counts the micro-batches whose activations this rank holds at once, over all its stages, in the last step.

    They are held from forward to the weight gradients: if a schedule computes input gradients first, torch keeps the graph for
    the weight gradients.
    """

    now = most = 0

    def begin_step(self, micro_batches):
        CountedStage.now = CountedStage.most = 0
        super().begin_step(micro_batches)

    def forward_maybe_with_nosync(self, *args, **kwargs):
        CountedStage.now += 1
        CountedStage.most = max(CountedStage.most, CountedStage.now)
        return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if bwd_chunk_id not in self.backward_state:  # else its weight gradients are still to be computed
            CountedStage.now -= 1

    def backward_weight_one_chunk(self, *args, **kwargs):
        super().backward_weight_one_chunk(*args, **kwargs)
        CountedStage.now -= 1


pipeline._NotifyingStage = CountedStage
trial.ENGINES["native"] = WatchedEngine()
trial.COUNTED_STEP = -1  # a step whose FLOPs are counted takes longer than all others, and nobody reads them here


def run_trial(context, request, progress):
    result = trial.run_trial(context, request, progress)
    stages = SESSIONS.pop()
    held = gather_numbers(context, [CountedStage.most / len(stages.stages) if stages is not None else 0.0])
    return dataclasses.replace(result, environment={"in_flight": " ".join(str(most) for (most,) in held)})
