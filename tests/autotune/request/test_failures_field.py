"""The field `failures`, as each surface writes it, and the line for a table that does not parse."""

from pathlib import Path

import pytest

from autotune.cli.fields import request_fields
from autotune.errors import RequestError
from autotune.request.rows import read_config_file, read_failures, request_from_fields, request_from_row, request_to_row
from search_spaces.errors import FailureTableError
from search_spaces.failure import FailureRow
from search_spaces.outcome import Outcome

TEXT = """
[killed]
retries = 0
[licence]
output = ['no licence left']
outcome = "LOST"
remedy = "ask for more"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    return path


def rows_of(fields: dict) -> tuple[FailureRow, ...]:
    return request_from_fields({"model": "gpt2-125m", **fields}).failures


def test_every_surface_gives_the_same_rows(file: Path, tmp_path: Path) -> None:
    killed, licence = rows_of({"failures": read_failures(file)})
    assert (killed.name, killed.outcome, killed.retries, killed.signals) == ("killed", Outcome.LOST, 0, ("SIGKILL",))
    assert (licence.name, licence.output) == ("licence", ("no licence left",))
    assert rows_of({"failures": (killed, licence)}) == (killed, licence)
    assert rows_of(request_fields({"failures": file}, None)) == (killed, licence)
    for text in ('failures = "mine.toml"', TEXT.replace("[", "[failures.").replace("'[failures.", "'[")):
        (tmp_path / "sweep.toml").write_text(text.replace("= [failures.", "= ["))
        assert rows_of(read_config_file(tmp_path / "sweep.toml")) == (killed, licence)


def test_a_row_of_the_database_holds_them(file: Path) -> None:
    request = request_from_fields({"model": "gpt2-125m", "failures": read_failures(file)})
    assert request_from_row(request_to_row(request)) == request


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[killed",
            "failures: {file} is not TOML (Expected ']' at the end of a table declaration (at end of document)); correct",
        ),
        ("[killed]\nretrys = 1", "failures.killed.retrys: is not a field of a row; did you mean retries?"),
        ("retries = 1", "failures.retries: 1 is not a row; write [retries] and its fields below it"),
    ],
)
def test_a_table_that_does_not_parse_is_one_line_with_its_remedy(file: Path, text: str, line: str) -> None:
    file.write_text(text)
    with pytest.raises((RequestError, FailureTableError)) as told:
        read_failures(file)
    assert str(told.value).startswith(line.format(file=file))
    assert "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"failures: .*none\.toml cannot be read \(No such file or directory\); give the path"
    ):
        read_failures(tmp_path / "none.toml")


def test_what_is_no_table_is_said() -> None:
    with pytest.raises(RequestError, match=r"failures: 'mine\.toml' is not a table of rows; give"):
        rows_of({"failures": "mine.toml"})
