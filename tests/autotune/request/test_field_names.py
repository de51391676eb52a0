"""One name for each field of a request, at every entry point."""

import dataclasses
import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

import autotune
from api.submission import HIDDEN, JobSubmission
from autotune.cli.app import app
from autotune.client.fields import SUBMISSION
from autotune.errors import RequestError
from autotune.frameworks.best_config import SCHEMA_PATH
from autotune.question.field import option_name
from autotune.request.job_fields import FIELDS
from autotune.request.request import JobRequest
from autotune.request.rows import read_config_file, request_from_fields, request_to_row
from search_spaces.models.command import CommandModel

# Where an entry point differs from the fields of `JobRequest`, and why. A new field needs an entry here or a place everywhere.
NO_OPTION = {
    "model": "an argument",
    "command": "everything after --; its parts have options",
    "fidelity": "--trial-seconds gives its max_seconds; a file of fields gives the others",
    "python_path": "the current folder and PYTHONPATH",
    "stop_at_first": "of a search within a search",
}
NO_OPTION_OF_SUBMIT = NO_OPTION | {
    "data_path": "a path on the machine of the worker",
    "nvme_path": "a path on the machine of the worker",
    "tune_on": "of a sweep that is run here",
    "answer_for": "of a sweep that is run here",
}
FLAGS = {
    "--trial-seconds": "fidelity.max_seconds",
    "--from": "reads a baseline", "--set": "of its script",
    "--price": "of a series", "--rate": "of a series", "--step": "of a series",
    "--config": "a file of fields", "--inside": "the run itself is tuned", "--share": "of the run that tunes itself",
    "--out": "", "--resume": "", "--db": "", "--url": "", "--json": "", "--help": "",
    "--priority": "of the queue", "--watch": "", "--no-racing": "turns --racing off",
    "--pass-environment": "of this machine's trials",
}  # fmt: skip
NOT_OVER_HTTP = {*HIDDEN, "stop_at_first", "tune_on", "answer_for"}
OF_TUNE = {"out", "database", "resume", "listener", "fields", "progress"}
OF_THE_QUEUE = {"priority"}
COMMAND_OPTIONS = {option_name(item.name) for item in dataclasses.fields(CommandModel)} - {"--arguments", "--template-name"}


def options_of(*names: str) -> set[str]:
    command: Any = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]
    return {option for item in command.params for option in (*item.opts, *item.secondary_opts) if option.startswith("--")}


def every_command(command: Any = None, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = getattr(command or typer.main.get_command(app), "commands", {})
    return [path, *(found for name, item in inner.items() for found in every_command(item, (*path, name)))]


@pytest.mark.parametrize(("name", "without"), [("sweep", NO_OPTION), ("submit", NO_OPTION_OF_SUBMIT)])
def test_every_field_is_an_option_by_its_name(name: str, without: dict[str, str]) -> None:
    options = options_of(name)
    assert {option_name(field) for field in FIELDS if field not in without} <= options
    assert not {option_name(field) for field in without} & options
    assert options - {option_name(field) for field in FIELDS} - COMMAND_OPTIONS <= FLAGS.keys()
    assert options >= COMMAND_OPTIONS - {"--name"}


def test_every_field_is_an_argument_of_python_by_its_name() -> None:
    parameters = inspect.signature(autotune.tune).parameters
    assert {*parameters} == {"model", *OF_TUNE}
    assert parameters["fields"].kind is inspect.Parameter.VAR_KEYWORD
    with pytest.raises(RequestError, match=r"^trails: is not a field of a request; did you mean trials\?"):
        autotune.tune("gpt2", trails=3)


def test_every_field_is_one_of_the_client_and_of_the_service_by_its_name() -> None:
    assert {*SUBMISSION, "model"} == {*FIELDS} - NOT_OVER_HTTP | OF_THE_QUEUE
    assert JobSubmission.model_fields.keys() == {*FIELDS} - NOT_OVER_HTTP | OF_THE_QUEUE


def test_every_field_is_a_key_of_a_file_of_a_row_and_of_a_best_config_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "fields.toml"
    path.write_text("\n".join(f"{name} = 1" for name in FIELDS))
    assert tuple(read_config_file(path)) == tuple(tomllib.loads(path.read_text())) == FIELDS
    row = request_to_row(JobRequest(model="m"))
    assert tuple(row) == tuple(item.name for item in dataclasses.fields(JobRequest))
    schema = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    assert {*schema["properties"]["job"]["properties"]["request"]["required"]} <= row.keys()


@pytest.mark.parametrize(
    ("limit", "count"),
    [(40_000_000_000, 40_000_000_000), ("40GB", 40_000_000_000), ("1.5 GiB", 1_610_612_736), ("2e9", 2 * 10**9)],
)
def test_a_memory_limit_may_have_a_unit(tmp_path: Path, limit: int | str, count: int) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(f"memory_limit = {json.dumps(limit)}")
    assert request_from_fields({"model": "m", **read_config_file(path)}).memory_limit == count
    assert JobRequest(model="m", memory_limit=limit).memory_limit == count  # type: ignore[arg-type]
    assert JobSubmission.model_validate({"model": "m", "memory_limit": limit}).memory_limit == count


@pytest.mark.parametrize("limit", ["40 bananas", "0", "-1GB", "1e30"])
def test_a_memory_limit_that_is_not_a_size(limit: str) -> None:
    with pytest.raises(RequestError, match=r"^memory_limit: '.*' is (not a size|out of range); (write|give) "):
        JobRequest(model="m", memory_limit=limit)  # type: ignore[arg-type]
