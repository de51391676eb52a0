"""A real sweep killed with SIGKILL at random points and resumed: no trial lost, none twice, no rank process left."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import table
from ranks import ranks_are_gone

from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.request.rows import request_to_row
from autotune.session.resolve import session_of
from search_spaces.outcome import JobState, Purpose
from storage.records import AttemptRecord
from storage.store import open_store

pytestmark = [pytest.mark.chaos, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("AUTOTUNE_CHAOS_KILLS", "2"))
STRATEGIES = ["random", "grid"] if "AUTOTUNE_CHAOS_KILLS" in os.environ else ["random"]
"""The other one by `make chaos`; test_killed.py kills every strategy too, without ranks."""
TRIALS = max(6, 2 * KILLS)
SWEEP = (
    "sweep", "config.json", "--runner", "local", "--trials", str(TRIALS), "--confirm-repeats", "1", "--trial-seconds", "0.2",
    "--space", "zero-buckets",
    "--global-batch-size", "4", "--sequence-length", "32", "--seed", "7",
)  # fmt: skip


def start(folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """The command, once it holds its job."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from autotune.cli import main; main()", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "AUTOTUNE_DB": str(folder / "jobs.db")}, cwd=folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith(b"job ")
    return process


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_sweep_goes_on(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "config.json").write_text(table.MODEL_CONFIG)
    moments = random.Random(f"{strategy}:{KILLS}")
    words: tuple[str, ...] = (*SWEEP, "--strategy", strategy)
    for _ in range(KILLS):
        process = start(tmp_path, *words)
        # Ranks take seconds to start: half of the kills come after that, so that the job gets on between them.
        time.sleep(moments.uniform(0.5, 7.0))
        process.kill()
        process.communicate()
        assert ranks_are_gone(tmp_path)
        words = ("sweep", "--resume", "latest")
        if _has_ended(tmp_path):  # on a fast machine there is nothing left to kill
            break
    else:
        process = start(tmp_path, *words)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err.decode()
    _check(tmp_path, strategy)


def _has_ended(folder: Path) -> bool:
    with open_store(str(folder / "jobs.db")) as store:
        return store.jobs.get().state is JobState.SUCCEEDED


def _check(folder: Path, strategy: str) -> None:
    with open_store(str(folder / "jobs.db")) as store:
        snapshot = read_snapshot(store, store.jobs.get().id)
        _check_complete(snapshot, store.attempts.of(snapshot.job.id))
        session = session_of(snapshot.job)
        unbroken = store.jobs.create(request_to_row(session.request))
        run_job(session, store, unbroken.id, table.runner())
        assert _searched(snapshot) == _searched(read_snapshot(store, unbroken.id)), strategy
    assert (folder / "best-config.json").exists()
    assert ranks_are_gone(folder)


def _check_complete(snapshot: JobSnapshot, attempts: list[AttemptRecord]) -> None:
    keys = [(trial.config.hash, trial.purpose, trial.fidelity, trial.repeat) for trial in snapshot.trials]
    assert snapshot.job.state is JobState.SUCCEEDED
    assert len(set(keys)) == len(keys)
    assert [trial.number for trial in snapshot.trials] == list(range(len(keys)))
    assert snapshot.open == []
    assert sum(trial.counted for trial in snapshot.trials) == TRIALS
    accepted = [attempt for attempt in attempts if attempt.state == "accepted"]
    assert sorted(attempt.trial_number for attempt in accepted) == [trial.number for trial in snapshot.trials]


def _searched(snapshot: JobSnapshot) -> set[str]:
    return {trial.config.hash for trial in snapshot.trials if trial.purpose is Purpose.SEARCH}
