"""Requests: ranges, plain data and back, the TOML file."""

import json
from pathlib import Path

import pytest
import table

from autotune.errors import JobNotResumableError, RequestError
from autotune.request.job_fields import Objective
from autotune.request.request import JobRequest
from autotune.request.rows import read_config_file, request_from_fields, request_from_row, request_to_row


def test_a_request_survives_plain_data(tmp_path: Path) -> None:
    resolved = table.session(tmp_path, pins={"zero_stage": [1, 2]}, max_seconds=9.5, baseline={"zero_stage": 2}).request
    row = json.loads(json.dumps(request_to_row(resolved)))
    assert request_from_row(row) == resolved


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trials", 0),
        ("trials", True),
        ("trials", 2.5),
        ("model", ""),
        ("max_seconds", -1.0),
        ("trial_timeout", 0),
        ("global_batch_size", 0),
        ("sequence_length", -4),
        ("memory_limit", 0),
        ("ranks", 0),
        ("headroom", 1.0),
        ("strategy", "genetic"),
        ("runner", "slurm"),
        ("confirm_repeats", -1),
        ("seed", -1),
        ("objective", "speed"),
        ("ranks", 2.5),
        ("max_seconds", "long"),
        ("headroom", "much"),
        ("space", None),
        ("name", "two\nlines"),
        ("name", None),
        ("note", "\x1b[31m"),
        ("tags", ("two words",)),
        ("tags", ("same", "same")),
        ("tags", "smoke"),
    ],
)
def test_a_bad_field_is_named_in_one_line_with_the_remedy(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        JobRequest(**{"model": "m", field: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{field}: ")
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_field_is_answered_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean trials"):
        request_from_fields({"model": "m", "trial": 3})


def test_labels_are_the_same_fields_in_a_file_and_in_a_request(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text('model = "m"\nname = "nightly"\ntags = ["a100", "smoke"]\nnote = """two\nlines"""\n')
    request = request_from_fields(read_config_file(path))
    assert (request.name, request.tags, request.note) == ("nightly", ("a100", "smoke"), "two\nlines")
    assert request_from_fields({"model": "m", "tags": "smoke"}).tags == ("smoke",)


def test_a_request_without_a_model_is_refused() -> None:
    with pytest.raises(RequestError, match="model: is missing"):
        request_from_fields({"trials": 3})


def test_values_of_the_wrong_kind_are_refused_in_one_line() -> None:
    for field, value in (("objective", "speed"), ("trial_timeout", "long"), ("fidelity", {"max_step": 3}), ("fidelity", 3)):
        with pytest.raises(RequestError, match=f"^{field}: "):
            request_from_fields({"model": "m", field: value})


def test_resolved_fields_cannot_be_given() -> None:
    with pytest.raises(RequestError, match="resolved_model"):
        request_from_fields({"model": "m", "resolved_model": {}})


def test_a_row_of_another_version_is_not_resumed() -> None:
    with pytest.raises(JobNotResumableError):
        request_from_row({"objective": "speed", "model": "m"})


def test_a_toml_file_has_the_same_fields(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(
        'model = "tiny"\nsequence-length = 64\nobjective = "memory"\n[pins]\nzero_stage = [1, 2]\n[fidelity]\nmax_steps = 9\n'
    )
    request = request_from_fields(read_config_file(path))
    assert request.sequence_length == 64
    assert request.objective is Objective.MEMORY
    assert request.pins == {"zero_stage": [1, 2]}
    assert request.fidelity.max_steps == 9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trails = 3", "trails: is not a field.*did you mean trials"),
        ("seed = 1\nseed = 2", "is not TOML"),
        ("sequence-length = 3\nsequence_length = 4", "sequence_length: is given twice in .*; leave one"),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(content)
    with pytest.raises(RequestError, match=message):
        read_config_file(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_config_file(tmp_path / "none.toml")
