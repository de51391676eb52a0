"""Ctrl-C: the first stops asking and prints how to go on, the second kills what runs; no rank process outlives the command."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import table
from called import Command
from ranks import a_trial_runs, ranks_are_gone

from autotune.cli import foreground
from autotune.outcome.job_snapshot import read_snapshot
from executor.runners.runner import Runner
from search_spaces.outcome import JobState
from storage.store import open_store

ROOT = Path(__file__).parents[3]
SWEEP = (
    "sweep", "config.json", "--runner", "local", "--trials", "2", "--confirm-repeats", "0", "--strategy", "random",
    "--global-batch-size", "4", "--sequence-length", "32",
)  # fmt: skip


def long_trials(folder: Path, seconds: int) -> str:
    """A file of options by which a trial takes its seconds, however soon its mean is known."""
    lines = ("[fidelity]", f"max_seconds = {seconds}", "max_steps = 1000000", "target_relative_half_width = 1e-9")
    (folder / "long.toml").write_text("\n".join(lines))
    return "long.toml"


def start(*words: str) -> "subprocess.Popen[str]":
    """The command, once it has opened its job."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from autotune.cli import main; main()", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline().startswith("job ")
    return process


@pytest.mark.usefixtures("forked_ranks")  # of what goes on in this process; those of the command are real
@pytest.mark.nightly
def test_the_first_stops_and_says_how_to_go_on(folder: Path, command: Command) -> None:
    process = start(*SWEEP, "--config", long_trials(folder, 1))  # the job is interrupted while its ranks start, for seconds
    assert a_trial_runs(folder / "jobs.db")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 130
    found = re.search(r"^  autotune sweep --resume (\S+)$", err, re.MULTILINE)
    assert found is not None, err
    assert "Traceback" not in err
    assert "written to best-config.json" in out  # the trial that ran was let end
    assert ranks_are_gone(folder)
    with open_store(str(folder / "jobs.db")) as store:
        snapshot = read_snapshot(store, found[1])
        assert (snapshot.job.state, snapshot.spent, snapshot.open) == (JobState.PAUSED, 1, [])
    resumed = command("sweep", "--resume", found[1], "--json")
    assert (resumed.status, resumed.err) == (0, "")


@pytest.mark.prove
def test_the_second_kills(folder: Path) -> None:
    process = start(*SWEEP, "--config", long_trials(folder, 600))
    assert a_trial_runs(folder / "jobs.db")
    process.send_signal(signal.SIGINT)
    heard = ""
    while "--resume" not in heard:  # two that come at once would be one
        heard += process.stderr.readline()
        assert process.poll() is None, heard
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert (process.returncode, out) == (130, "")
    assert "killing running trials" in err
    assert err.splitlines()[-1].startswith("  autotune sweep --resume ")
    assert ranks_are_gone(folder)
    with open_store(str(folder / "jobs.db")) as store:
        snapshot = read_snapshot(store, store.jobs.get().id)
        assert (snapshot.job.state, len(snapshot.open)) == (JobState.PAUSED, 1)


def test_while_ranks_are_started_no_job_is_opened(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_session: object) -> Runner:
        raise KeyboardInterrupt

    monkeypatch.setattr(foreground, "make_runner", interrupted)
    answer = command(*SWEEP)
    assert (answer.status, answer.out, answer.err) == (130, "", "autotune: interrupted\n")
    with open_store(str(folder / "jobs.db")) as store:
        assert store.jobs.newest() == []


def test_a_resumed_job_says_how_to_go_on_also_then(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.request.rows import request_to_row

    with open_store(str(folder / "jobs.db")) as store:
        job = store.jobs.create(request_to_row(table.session(folder).request))

    def interrupted(_session: object) -> Runner:
        raise KeyboardInterrupt

    monkeypatch.setattr(foreground, "make_runner", interrupted)
    answer = command("sweep", "--resume", "latest", "--out", "my best.json")
    assert answer.status == 130
    assert f"autotune sweep --resume {job.id} --out 'my best.json'" in answer.err
    answer = command("sweep", "--resume", "latest", "--db", f"sqlite:///{folder}/jobs.db?password=hunter2")
    assert f"--resume {job.id} --db 'sqlite:///{folder}/jobs.db?password=***'" in answer.err
