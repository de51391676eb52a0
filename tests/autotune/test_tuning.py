"""`autotune.tune`, its output file, `autotune.report`, and what an import brings with it."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import table

import autotune
from autotune import tuning
from autotune.errors import JobNotResumableError, NothingFeasibleError, OutputError, RequestError
from autotune.loop.listener import LoopListener
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.output import require_writable, write_whole
from search_spaces.outcome import JobState
from storage.records import TrialRecord
from storage.store import open_store


@pytest.fixture(autouse=True)
def table_instead_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "make_runner", lambda session: table.runner())


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"model": table.request(folder).model, "trials": 6, "strategy": "random", "database": str(folder / "db")} | changes


def test_tune_returns_and_writes_the_best(tmp_path: Path) -> None:
    out = tmp_path / "best-config.json"
    result = autotune.tune(**arguments(tmp_path, out=out))
    assert result.state is JobState.SUCCEEDED
    assert result.best is not None
    assert result.gain is not None
    assert json.loads(out.read_text())["best"]["config"] == result.best.values()
    assert list(tmp_path.glob(".best-config*")) == []


def test_tune_resumes(tmp_path: Path) -> None:
    autotune.tune(**arguments(tmp_path))
    with pytest.raises(JobNotResumableError, match="has ended"):
        autotune.tune(resume="2", database=str(tmp_path / "db"))


def test_a_job_that_has_succeeded_goes_on_with_more_trials(tmp_path: Path) -> None:
    database = str(tmp_path / "db")
    first = autotune.tune(**arguments(tmp_path, trials=3, name="nightly", tags=["smoke"]))
    with pytest.raises(JobNotResumableError, match=r"has ended \(SUCCEEDED\); give it more than its 3 trials"):
        autotune.tune(resume="latest", database=database)
    with pytest.raises(RequestError, match="trials"):
        autotune.tune(resume="latest", trials=-1, database=database)
    again = autotune.tune(resume="latest", trials=5, database=database)
    assert (again.job_id, again.state, again.message) == (first.job_id, JobState.SUCCEEDED, "5 of 5 trials are spent")
    assert again.best_config is not None
    request = again.best_config["job"]["request"]
    assert (request["trials"], request["name"], request["tags"]) == (5, "nightly", ["smoke"])


@pytest.mark.prove
def test_what_is_changed_while_a_job_runs_is_in_its_document(tmp_path: Path) -> None:
    database = str(tmp_path / "db")

    class Labelling(LoopListener):
        def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
            with open_store(database) as store:
                store.queue.change_request(trial.job_id, None, {"name": "changed", "tags": ("b",), "trials": 4})

    result = autotune.tune(**arguments(tmp_path, trials=3, tags=["a"], listener=Labelling()))
    assert result.best_config is not None
    request = result.best_config["job"]["request"]
    assert (request["name"], request["tags"], request["trials"]) == ("changed", ["b"], 4)


def test_an_output_that_cannot_be_written_is_found_before_anything(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        autotune.tune(**arguments(tmp_path, out=tmp_path / "none" / "best.json"))
    assert not (tmp_path / "db").exists()


def test_a_bad_request_opens_no_job(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="trials"):
        autotune.tune(**arguments(tmp_path, trials=0))
    with pytest.raises(NothingFeasibleError):
        autotune.tune(**arguments(tmp_path, memory_limit=1_000))
    with open_store(str(tmp_path / "db")) as store:
        assert store.jobs.newest() == []


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a folder"):
        require_writable(tmp_path)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_whole(path, "one")
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_report_appends_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_REPORT", raising=False)
    autotune.report(loss=1.0)
    monkeypatch.setenv("AUTOTUNE_REPORT", str(tmp_path / "report.jsonl"))
    autotune.report(step=1, loss=2.0)
    autotune.report(step=2, loss=1.5)
    lines = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.0), (2, 1.5)]


def test_importing_autotune_is_light() -> None:
    heavy = ("torch", "ray", "sqlalchemy", "optuna", "fastapi", "executor", "storage")
    root = str(Path(autotune.__file__).parents[1])
    for used, unwanted in (("autotune.report", (*heavy, "search_spaces", "httpx2")), ("autotune.Client().url", heavy)):
        script = f"import sys, autotune; {used}; print([name for name in {unwanted!r} if name in sys.modules])"
        answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
        assert answer.stdout.strip() == "[]"


def test_an_unknown_attribute_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tuna'"):
        autotune.tuna  # noqa: B018


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_whole(tmp_path / "best.json", "text")
    assert list(tmp_path.iterdir()) == []
