"""The driver of the chaos on a Ray cluster: opens the job, or goes on with it, until it ends.

python -m tests.chaos.ray_driver DATABASE ADDRESS TRIALS GANGS CONFIRMATIONS
"""

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from autotune.loop.loop import run_job
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from autotune.session.resolve import prepare, session_of
from autotune.session.session import Session
from executor.runners.ray import RayRunner
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig
from storage.store import open_store
from tests.chaos.harm import FOLDER, Fault, fault_of

RANKS = 2
TIMEOUT_SECONDS = 10.0
"""Ends the hangs, and nothing else: a trial takes a third of a second, and on a machine that others use too as many seconds."""


class _Listed:
    """A space whose configurations are made once: of few trials, one seed in a thousand has every fault."""

    def __init__(self, space: SearchSpace) -> None:
        self.hash, self._configs = space.hash, list(space.enumerate())

    def count(self) -> int:
        return len(self._configs)

    def enumerate(self) -> Iterator[TrialConfig]:
        return iter(self._configs)


def session(trials: int, confirmations: int) -> Session:
    """The job. Its strategy walks one order, whatever ends when; of the first seed in whose trials every fault is met."""
    request = JobRequest(
        model="llama-tiny", ranks=RANKS, space="3d", strategy="random", trials=trials, trial_timeout=TIMEOUT_SECONDS,
        racing=False, confirm_repeats=confirmations, runner="ray",
    )  # fmt: skip
    prepared = prepare(request)
    space = _Listed(prepared.space)
    for seed in itertools.count():
        tried = prepared.strategy.propose(space, (), (), trials - 1, seed)
        if {fault_of(config.hash) for config in tried} == set(Fault):
            return replace(prepared, request=replace(prepared.request, seed=seed))
    raise AssertionError("unreachable")


def main() -> None:
    """Run the job to its end."""
    database, address, trials, gangs, confirmations = sys.argv[1:]
    with open_store(database) as store:
        jobs = store.jobs.newest()
        job = jobs[0] if jobs else store.jobs.create(request_to_row(session(int(trials), int(confirmations)).request))
        variables = {name: os.environ[name] for name in (FOLDER,) if name in os.environ}
        runner = RayRunner(
            RANKS, address=address, gangs=int(gangs), device="cpu", gpus_per_rank=1.0,
            environment={"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1", **variables},
            trial_function="harm:run_trial",
        )  # fmt: skip
        with runner:
            run_job(session_of(job), store, job.id, runner)


if __name__ == "__main__":
    main()
