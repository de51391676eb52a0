"""The field `document_lengths`, as each surface writes it, and the line for what is no list of lengths."""

from pathlib import Path

import pytest

from autotune.cli.fields import request_fields
from autotune.errors import RequestError
from autotune.request.field_forms import read_lengths
from autotune.request.rows import read_config_file, request_from_fields, request_from_row, request_to_row


def lengths_of(fields: dict) -> tuple[int, ...]:
    return request_from_fields({"model": "gpt2-125m", **fields}).document_lengths


def test_every_surface_gives_the_same_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("128, 17\n64\n")
    assert lengths_of({}) == ()
    assert lengths_of({"document_lengths": [128, 17, 64]}) == (128, 17, 64)
    for text in ("128,17,64", str(tmp_path / "lengths.txt")):
        assert lengths_of(request_fields({"document_lengths": text}, None)) == (128, 17, 64)
    for line in ("document_lengths = [128, 17, 64]", 'document-lengths = "lengths.txt"', 'document_lengths = "128,17,64"'):
        (tmp_path / "sweep.toml").write_text(line)
        assert lengths_of(read_config_file(tmp_path / "sweep.toml")) == (128, 17, 64)


def test_a_row_of_the_database_holds_them_and_one_from_before_has_none() -> None:
    request = request_from_fields({"model": "gpt2-125m", "document_lengths": [64, 9]})
    row = request_to_row(request)
    assert row["document_lengths"] == [64, 9]
    assert request_from_row(row) == request
    earlier = {name: value for name, value in row.items() if name != "document_lengths"}
    assert request_from_row(earlier).document_lengths == ()
    assert request.workload.document_lengths == (64, 9)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("none.txt", "document_lengths: none.txt cannot be read (No such file or directory); give numbers separated by commas"),
        ("12,,x", "document_lengths: 12,,x cannot be read"),
        (",", "document_lengths: ',' contains no numbers; give numbers"),
    ],
)
def test_what_holds_no_lengths_is_named(text: str, line: str) -> None:
    with pytest.raises(RequestError) as told:
        read_lengths(text)
    assert str(told.value).startswith(line)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"12 long 3", "document_lengths: 'long' in {file} is not a number of tokens; give numbers"),
        (b"", "document_lengths: '{file}' contains no numbers; give numbers"),
        (b"\xff\xfe", "document_lengths: {file} is not text; give numbers"),
        (b"-3", "document_lengths: '-3' in {file} is not a number of tokens"),
    ],
)
def test_what_a_file_holds_is_named(tmp_path: Path, content: bytes, line: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_bytes(content)
    with pytest.raises(RequestError) as told:
        read_lengths(str(file))
    assert str(told.value).startswith(line.format(file=file))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([8, 0], "document_lengths: 0 is not a whole number of 1 or more; give the tokens of each document"),
        ([8, 129], "document_lengths: a document of 129 tokens does not fit into a sample of 128; cut such documents"),
        ([1] * 1001, "document_lengths: 1001 lengths are more than 1000; give a sample of at most 1000 documents"),
        ([8, "9"], "document_lengths: '9' is not a whole number"),
    ],
)
def test_lengths_that_no_row_has_are_one_line(given: list, line: str) -> None:
    with pytest.raises(RequestError) as told:
        lengths_of({"document_lengths": given})
    assert str(told.value).startswith(line)
    assert "\n" not in str(told.value)
