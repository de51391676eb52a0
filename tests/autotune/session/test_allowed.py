"""What jobs from outside may run, when they are claimed."""

import dataclasses
from pathlib import Path

import pytest
import table

from autotune.errors import RequestError
from autotune.loop.listener import StopSignal
from autotune.loop.worker import Worker
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from autotune.session.allowed import AllowList
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import JobState
from storage.records import ORIGIN, Submission
from storage.store import Store

THERE = FactoryModel(reference="theirs:build", parameter_count=1)
MINE = dataclasses.replace(THERE, reference="mine:build")
SCRIPT = CommandModel(arguments=("python", "train.py", "{micro_batch_size}"), folder="/srv")


def of_command(command: CommandModel) -> dict[str, object]:
    return {"command": command, "engine": "command", "model": command.name, "resolved_model": command}


def allowed_of(folder: Path) -> JobRequest:
    """A request that any list allows."""
    return table.session(folder).request


@pytest.mark.prove(every=11)
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "theirs:build"}, "model"),
        ({"resolved_model": THERE}, "model"),
        ({"model": "mine:build", "resolved_model": THERE}, "model"),
        ({"model": "mine:build", "resolved_model": dataclasses.replace(MINE, python_path=("/tmp",))}, "model"),
        ({"model": "/etc/config.json", "resolved_model": None}, "model"),
        (of_command(CommandModel(arguments=("bash", "-c", "{micro_batch_size}"), folder="/srv")), "command"),
        ({"resolved_model": CommandModel(arguments=("python", "train.py"), folder="/tmp")}, "command"),
        (of_command(dataclasses.replace(SCRIPT, environment_knobs={"LD_PRELOAD": ("x", "y")})),
         "command.environment_knobs.LD_PRELOAD"),
        ({"python_path": ("/tmp",)}, "python_path"),
        ({"data_path": "/etc/passwd"}, "data_path"),
        ({"ray_address": "10.0.0.1:6379"}, "ray_address"),
    ],
    ids=str,
)  # fmt: skip
def test_a_worker_ends_what_is_not_allowed_with_one_line(
    store: Store, tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    row = request_to_row(allowed_of(tmp_path))
    changed = {name: request_to_row(value) if dataclasses.is_dataclass(value) else value for name, value in changes.items()}
    lists = AllowList(factories=("mine:build",), commands=("/srv:python train.py",))
    bad = store.queue.submit({**row, **changed, ORIGIN: "service"}, Submission())[0]
    good = store.queue.submit({**row, ORIGIN: "service"}, Submission())[0]
    Worker(store, lambda _session: table.runner(), allowed=lists, poll_seconds=0.02).run(StopSignal(), most_jobs=2)
    ended = store.jobs.get(bad.id)
    assert (ended.state, ended.reason) == (JobState.FAILED, "RequestError")
    assert ended.message.startswith(f"{field}: ")
    assert "\n" not in ended.message
    assert store.jobs.get(good.id).state is JobState.SUCCEEDED


def test_lists_allow_what_they_name(tmp_path: Path) -> None:
    request = allowed_of(tmp_path)
    lists = AllowList(factories=("theirs:build",), commands=("/srv:python train.py",))
    lists.require(dataclasses.replace(request, model="theirs:build", resolved_model=THERE))
    lists.require_words("/srv/", SCRIPT.arguments, ())
    with pytest.raises(RequestError, match="--allow-factory"):
        AllowList().require(dataclasses.replace(request, model="theirs:build", resolved_model=THERE))


def test_who_writes_the_database_may_have_anything_run(store: Store, tmp_path: Path) -> None:
    row = request_to_row(dataclasses.replace(allowed_of(tmp_path), python_path=(str(tmp_path),)))
    job = store.queue.submit(row, Submission())[0]
    Worker(store, lambda _session: table.runner(), poll_seconds=0.02).run(StopSignal(), most_jobs=1)
    assert store.jobs.get(job.id).state is JobState.SUCCEEDED
