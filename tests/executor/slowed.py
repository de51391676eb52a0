"""A trial whose rank 1 is slow, as on a throttled device: each of its steps begins with a nap."""

import time
from unittest.mock import patch

from executor.engines.session import ParallelSession
from executor.trial.run import run_trial as run_real_trial

NAP_SECONDS = 0.3


def run_trial(context, request, progress):
    run_step = ParallelSession.run_step

    def slowly(session):
        time.sleep(NAP_SECONDS)
        return run_step(session)

    if context.rank != 1:
        return run_real_trial(context, request, progress)
    with patch.object(ParallelSession, "run_step", slowly):
        return run_real_trial(context, request, progress)
