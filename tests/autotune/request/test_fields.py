"""A field of a request is declared once: every entry point has it from there."""

import inspect
from pathlib import Path

import pytest
import typer

from api.routes.catalog import choices
from api.settings import Settings
from api.submission import JobSubmission
from autotune.cli.request_app import request_app
from autotune.client import SubmissionFields
from autotune.request.field import option_name
from autotune.request.further_fields import FurtherFields
from autotune.request.generated import FILES, TUNE
from autotune.request.request import declared_fields
from autotune.tuning import tune

BEYOND = {"priority"}
"""Fields of a submission that no request has."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_generated_files_are_up_to_date(file: Path) -> None:
    assert file.read_text(encoding="utf-8") == FILES[file](), "run python -m autotune.request.generated"


def test_the_service_and_its_client_take_the_same_fields() -> None:
    declared = {name for name, field, _, _ in declared_fields() if field.service}
    assert set(JobSubmission.model_fields) == declared | BEYOND
    assert set(SubmissionFields.__annotations__) == declared - {"model"} | BEYOND


def test_a_sweep_from_Python_takes_each_field_once() -> None:
    own = {name for name, parameter in inspect.signature(tune).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert set(TUNE) == {"model"} | own - {"out", "database", "resume", "listener", "progress"}
    assert set(TUNE) | set(FurtherFields.__annotations__) == {name for name, *_ in declared_fields()}


def test_commands_have_an_option_for_each_field_that_they_take() -> None:
    commands = typer.main.get_group(request_app).commands
    for name, field, _, _ in declared_fields():
        for command in field.commands:
            options = {word for parameter in commands[command].params for word in parameter.opts}
            assert option_name(name) in options or name == "model", f"{command} has no option for {name}"


def test_the_form_has_an_entry_for_each_field_with_a_label() -> None:
    entries = {entry.name for entry in choices(Settings(database_url="sqlite://"), may_submit=True).fields}
    assert entries == {name for name, field, _, _ in declared_fields() if field.label} | BEYOND
