"""The field `expert_loads`, as each surface writes it, and the line for what is not loads of the model's experts."""

from pathlib import Path
from typing import Any

import pytest

from autotune.cli.fields import request_fields
from autotune.errors import RequestError
from autotune.request.field_forms import read_loads, with_loads
from autotune.request.rows import read_config_file, request_from_fields, request_from_row, request_to_row
from autotune.session.resolve import resolve
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec

LOADS = ((3.0, 1.0), (1.0, 1.0))


def loads_of(fields: dict[str, Any]) -> tuple[tuple[float, ...], ...]:
    return request_from_fields({"model": "mixtral-8x7b", **fields}).expert_loads


def test_every_surface_gives_the_same_loads(tmp_path: Path) -> None:
    (tmp_path / "loads.txt").write_text("3, 1\n\n1 1.0\n")
    assert loads_of({}) == ()
    assert loads_of({"expert_loads": [3, 1]}) == LOADS[:1]
    assert loads_of({"expert_loads": [[3, 1], [1.0, 1.0]]}) == LOADS
    assert loads_of(request_fields({"expert_loads": str(tmp_path / "loads.txt")}, None)) == LOADS
    assert loads_of(request_fields({"expert_loads": "3,1"}, None)) == LOADS[:1]
    for line in ("expert_loads = [[3, 1], [1.0, 1.0]]", 'expert-loads = "loads.txt"'):
        (tmp_path / "sweep.toml").write_text(line)
        assert loads_of(read_config_file(tmp_path / "sweep.toml")) == LOADS


def test_a_row_of_the_database_holds_them_and_one_from_before_has_none() -> None:
    request = request_from_fields({"model": "mixtral-8x7b", "expert_loads": [[3, 1]]})
    row = request_to_row(request)
    assert request_from_row(row) == request
    assert request_from_row({name: value for name, value in row.items() if name != "expert_loads"}).expert_loads == ()


def test_a_job_trains_a_model_that_follows_them() -> None:
    fields = {"model": "mixtral-8x7b", "cluster": "dgx-h100:4", "global_batch_size": 64, "sequence_length": 2048}
    session = resolve(request_from_fields({**fields, "expert_loads": [[1, 1, 1, 1, 1, 1, 1, 2]]}))
    assert isinstance(session.model, ModelSpec)
    assert session.model.expert_loads == ((1, 1, 1, 1, 1, 1, 1, 2),)
    assert resolve(session.request).model == session.model
    with pytest.raises(RequestError, match="expert_loads: row 1 has 2 numbers, and mixtral-8x7b has 8 experts; give a row of"):
        resolve(request_from_fields({**fields, "expert_loads": [[1, 1]]}))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"1, many", "expert_loads: 'many' in {file} is not a number; give numbers separated by commas, or the path"),
        (b"1, nan", "expert_loads: 'nan' in {file} is not a number"),
        (b"\n\n", "expert_loads: '{file}' contains no numbers"),
        (b"\xff\xfe", "expert_loads: {file} is not text"),
        (None, "expert_loads: {file} cannot be read (No such file or directory)"),
    ],
)
def test_what_a_file_holds_is_named(tmp_path: Path, content: bytes | None, line: str) -> None:
    file = tmp_path / "loads.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        read_loads(str(file))
    assert str(caught.value).startswith(line.format(file=file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([3, "1"], "expert_loads: "),
        ([["3", 1]], "expert_loads: "),
        ([[3, [1]]], "expert_loads: "),
        ("loads.txt", "expert_loads: "),
        ([[1.0] * 1001], "expert_loads: has more than 1000 rows or numbers in a row"),
    ],
)
def test_what_is_not_rows_of_numbers_is_one_line(given: Any, line: str) -> None:
    with pytest.raises(RequestError) as caught:
        loads_of({"expert_loads": given})
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "loads", "line"),
    [
        ("llama-3-8b", ((1.0,),), "expert_loads: llama-3-8b has no experts of ours; leave it out, or give a preset"),
        (
            "mixtral-8x7b",
            ((1.0,) * 8,) * 3,
            "expert_loads: has 3 rows, and mixtral-8x7b has 32 layers with experts; give a row",
        ),
        ("mixtral-8x7b", ((-1.0, *(1.0,) * 7),), "expert_loads: row 1 has a number that is negative or not finite, or no load"),
        ("mixtral-8x7b", ((0.0,) * 8,), "expert_loads: row 1 has a number that is negative or not finite, or no load"),
        (
            "mixtral-8x7b",
            ((9.0, *(1.0,) * 7),),
            "expert_loads: an expert in row 1 would be chosen 1.12 times by each token; give",
        ),
    ],
)
def test_what_no_experts_can_follow_is_one_line(model: str, loads: tuple[tuple[float, ...], ...], line: str) -> None:
    with pytest.raises(RequestError) as caught:
        with_loads(resolve_model(model), loads)
    assert str(caught.value).startswith(line)
