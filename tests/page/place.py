"""A service and its workers as processes, on a database of their own, for a browser to look at."""

import dataclasses
import json
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from api.settings import Settings
from api.submission import JobSubmission, session_of_submission
from autotune.client import Client
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from tests.autotune import table
from tests.autotune.served import start, until
from tests.ports import free_port

SUBMITTED = {"model": "llama-tiny", "ranks": 2, "space": "zero", "global_batch_size": 8, "sequence_length": 64}
LARGE = SUBMITTED | {
    "trials": 200, "strategy": "random", "confirm_repeats": 1, "control_every": 0,
    "pins": {"overlap_comm": [True, False], "gc_interval": [0, 1, 5, 10, 50]},
}  # fmt: skip
"""A job of 200 trials."""
BEFORE = {
    "zero_stage": 1, "micro_batch_size": 1, "activation_checkpointing": "full", "overlap_comm": False,
    "contiguous_gradients": False, "reduce_dtype": "fp32", "precision": "fp32", "loss_chunk_size": 64, "fused_optimizer": False,
    "gc_interval": 1,
}  # fmt: skip
AFTER = {
    "zero_stage": 2, "micro_batch_size": 4, "activation_checkpointing": "none", "overlap_comm": True,
    "contiguous_gradients": True, "reduce_dtype": "bf16", "precision": "bf16", "loss_chunk_size": 0, "fused_optimizer": True,
    "gc_interval": 50,
}  # fmt: skip
MANY_CHANGES = SUBMITTED | {
    "trials": 2, "pins": AFTER, "name": "pretraining-llama-tiny-on-the-shared-cluster-with-all-that-was-off-before-june",
    "tags": ["team/pretraining", "cluster=shared-a100-80gb", "owner=somebody.with.a.long.name.of.the.team", "nightly"],
    "note": "Before the upgrade every knob was at what the first script had; this is the answer for the run of the summer.",
}  # fmt: skip
"""A job with long names whose winner differs from the baseline in ten knobs; `results` of both are in a table of its own."""
NO_ROOM = "out of memory on rank 0: 21.0 MiB are wanted, 20.0 MiB are there"
BROKEN = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)"


TRACEBACK = f"""Traceback (most recent call last):
  File "train.py", line 88, in step
    loss = model(tokens).loss
  File "model.py", line 41, in forward
    return self.head(self.norm(hidden))
{BROKEN}
"""


class Place:
    """Where the page is served."""

    options: tuple[str, ...] = ()
    """Of the service, beside those that it has anyway."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.folder, self.port = folder, port or free_port()
        self._processes: dict[str, subprocess.Popen[str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def database(self) -> str:
        return str(self.folder / "jobs.db")

    def serve(self) -> None:
        """Start the service, or start it again on the same port and database."""
        self._processes["service"] = start(self.folder, "serve", "--no-worker", "--port", self.port, *self.options)
        until(self.answers, 120)

    def work(self, seconds_per_trial: float = 0.1, submitted: Sequence[Mapping[str, Any]] = (SUBMITTED,)) -> None:
        """Start a worker that answers the trials of jobs for the runner `ray` from a table."""
        table_of = {name: result for job in submitted for name, result in results(job).items()}
        (self.folder / "table.json").write_text(json.dumps(table_of | {"seconds_per_trial": seconds_per_trial}))
        self._processes["replay"] = start(self.folder, "worker", "--replay", "table.json", "--runner", "ray")
        until(self.is_worked_for)

    def work_for_real(self) -> None:
        """Start a worker that runs the trials of one job for the runner `local` on this machine."""
        self._processes["real"] = start(self.folder, "worker", "--runner", "local", "--jobs", 1)
        until(self.is_worked_for)

    def kill(self, name: str = "service") -> None:
        """End a process at once, as a crash does."""
        process = self._processes.pop(name)
        process.kill()
        process.communicate()

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
            process.kill()
            process.communicate()

    def answers(self) -> bool:
        """Whether the service is ready."""
        try:
            urllib.request.urlopen(f"{self.url}/livez", timeout=1).close()
        except OSError:
            return False
        return True

    def is_worked_for(self) -> bool:
        """Whether the service has seen a worker; to start one takes seconds."""
        with urllib.request.urlopen(f"{self.url}/readyz", timeout=60) as answer:
            return "none seen" not in answer.read().decode()

    def submit(self, api_key: str | None = None, **changes: object) -> str:
        """Open a job; its id."""
        with Client(self.url, api_key) as client:
            return client.submit(**{**SUBMITTED, **changes}).id  # type: ignore[arg-type]

    def finished(self, seconds: float = 180, **changes: object) -> str:
        """A job that has ended, after at most so many seconds."""
        job = self.submit(**changes)
        with Client(self.url) as client:
            until(lambda: client.job(job).ended, seconds)
        return job


def results(submitted: Mapping[str, Any]) -> dict[str, object]:
    """What the table says of every configuration of the space: most are measured, some do not fit, one is broken."""
    space = session_of_submission(JobSubmission(**submitted), Settings(database_url=""), 10**6).space
    told = ((config, _result(config)) for config in space.enumerate())
    return {config.hash: {k: v for k, v in to_plain(result).items() if k != "attempt"} for config, result in told}


def _result(config: TrialConfig) -> TrialResult:
    full = config.activation_checkpointing == "full"
    if config.micro_batch_size == 4 and config.zero_stage < 2 and not full:
        return table.ended(Outcome.INFEASIBLE, NO_ROOM)
    if config.zero_stage == 3 and full:
        return dataclasses.replace(table.ended(Outcome.FAILED, BROKEN), traceback=TRACEBACK, cause="bug")
    return table.measured(config)
