"""`--json`: a schema for every command, and documents for errors."""

import json

import pytest
from called import COMMANDS, Command

from autotune.cli.status import SCHEMAS, schema_path
from tests.documents import check_document, validator

WITH_JSON = [name for name, command in COMMANDS.items() if any("--json" in option.opts for option in command.params)]


@pytest.mark.parametrize("name", [*WITH_JSON, "error"])
def test_every_document_has_a_schema(name: str) -> None:
    check = validator(name)
    check.check_schema(json.loads(schema_path(name).read_text("utf-8")))
    assert not check.is_valid(7)  # which resolves its references


def test_every_schema_is_of_a_command() -> None:
    known = {schema_path(name).name for name in (*WITH_JSON, "error", "common")}
    assert {path.name for path in SCHEMAS.iterdir()} == known


@pytest.mark.parametrize(
    ("words", "kind", "field"),
    [
        ("plan no-such-model --json", "UnknownNameError", "no-such-model"),
        ("plan llama-tiny --cluster dgx-h100:1 --pin zero_stage=9 --json", "KnobValueError", "zero_stage"),
        ("plan --json --no-such-option", "UsageError", None),
        ("plan gpt2 --cluster dgx-h100:1 --sequence-length 8x --json", "UsageError", "sequence_length"),
        ("space --knobs --json", "RequestError", "json"),
        ("lint deepspeed none.json --json --sarif", "RequestError", "sarif"),
        ("label latest --json", "RequestError", "name"),
    ],
)
def test_an_error_is_a_document(command: Command, words: str, kind: str, field: str | None) -> None:
    answer = command(*words.split())
    error = json.loads(answer.out)["error"]
    assert answer.err == f"autotune: {error['message']}\n"
    assert error["exit_status"] == answer.status == 2
    assert (error["kind"], error["field"]) == (kind, field)
    assert field is None or error["message"] == f"{field}: {error['problem']}; {error['remedy']}"


def test_without_json_standard_output_stays_empty(command: Command) -> None:
    assert command("plan", "no-such-model").out == ""


def test_a_document_that_does_not_match_is_found() -> None:
    with pytest.raises(Exception, match="is not of type 'array'"):
        check_document(["jobs", "--json"], "{}")
    with pytest.raises(ValueError, match="NaN is not JSON"):
        check_document(["jobs", "--json"], "[NaN]")
