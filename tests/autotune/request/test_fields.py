"""A field of a request is declared once: every entry point has it from there."""

from called import COMMANDS

from api.routes.catalog import choices
from api.settings import Settings
from api.submission import JobSubmission
from autotune.client.fields import SUBMISSION
from autotune.question.field import declared_fields, option_name
from autotune.request.request import JobRequest

BEYOND = {"priority"}
"""Fields of a submission that no request has."""


def test_the_service_and_its_client_take_the_same_fields() -> None:
    declared = {name for name, field, _, _ in declared_fields(JobRequest) if field.service}
    assert set(JobSubmission.model_fields) == declared | BEYOND
    assert set(SUBMISSION) == declared - {"model"} | BEYOND


def test_commands_have_an_option_for_each_field_that_they_take() -> None:
    for name, field, _, _ in declared_fields(JobRequest):
        for command in field.commands:
            options = {word for parameter in COMMANDS[command].params for word in parameter.opts}
            assert option_name(name) in options or name == "model", f"{command} has no option for {name}"


def test_the_form_has_an_entry_for_each_field_with_a_label() -> None:
    entries = {entry.name for entry in choices(Settings(database_url="sqlite://"), may_submit=True).fields}
    assert entries == {name for name, field, _, _ in declared_fields(JobRequest) if field.label} | BEYOND
