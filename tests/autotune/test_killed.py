"""Killed with SIGKILL at random points and resumed: no trial lost, none counted twice, the same set as an unbroken run."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import killed
import pytest
import table

from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.request.rows import request_to_row
from search_spaces.outcome import JobState, Purpose
from storage.store import open_store
from tests.sampling import sampled

pytestmark = pytest.mark.chaos

HERE = Path(__file__).parent
KILLS = int(os.environ.get("AUTOTUNE_CHAOS_KILLS", "1"))


def start(folder: Path, strategy: str) -> subprocess.Popen[str]:
    """The driver, once it has the job."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    process = subprocess.Popen(
        [sys.executable, str(HERE / "killed.py"), str(folder), strategy],
        env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


@pytest.mark.parametrize("strategy", sampled(["guided", "random", "grid", "tpe"], every=4))
def test_killed_and_resumed(tmp_path: Path, strategy: str) -> None:
    moments = random.Random(f"{strategy}:{KILLS}")
    for _ in range(KILLS):
        process = start(tmp_path, strategy)
        time.sleep(moments.uniform(0.0, 1.5 / KILLS))
        process.kill()
        process.communicate()
    process = start(tmp_path, strategy)
    assert process.wait(timeout=180) == 0
    process.communicate()

    with open_store(str(tmp_path / "jobs.db")) as store:
        snapshot = read_snapshot(store, store.jobs.get().id)
        keys = [(trial.config.hash, trial.purpose, trial.fidelity, trial.repeat) for trial in snapshot.trials]
        assert snapshot.job.state is JobState.SUCCEEDED
        assert len(set(keys)) == len(keys)
        assert [trial.number for trial in snapshot.trials] == list(range(len(keys)))
        assert snapshot.open == []
        assert sum(trial.counted for trial in snapshot.trials) == 14
        accepted = [attempt for attempt in store.attempts.of(snapshot.job.id) if attempt.state == "accepted"]
        assert sorted(attempt.trial_number for attempt in accepted) == [trial.number for trial in snapshot.trials]
        search = [trial.config.environment for trial in snapshot.trials if trial.purpose is Purpose.SEARCH]
        assert search[:12] == [""] * 12 and sorted(search[12:]) == sorted(killed.JOB["environment_settings"])
    if strategy != "tpe":
        searched, wanted = _searched(snapshot), _searched(_unbroken(tmp_path, strategy))
        assert set(searched) == set(wanted)
        # What guided search tries next follows from what was measured: nothing else may have decided.
        assert searched == wanted or strategy != "guided"


def _unbroken(folder: Path, strategy: str) -> JobSnapshot:
    """The same job in a database of its own: what another one of the same database taught would change it."""
    session = table.session(folder, strategy=strategy, **killed.JOB)
    with open_store(str(folder / "unbroken.db")) as store:
        job = store.jobs.create(request_to_row(session.request))
        run_job(session, store, job.id, table.runner())
        return read_snapshot(store, job.id)


def _searched(snapshot: JobSnapshot) -> list[str]:
    return [trial.config.hash for trial in snapshot.trials if trial.purpose is Purpose.SEARCH]
