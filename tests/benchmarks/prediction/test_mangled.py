"""Whatever is in the file: a document without NaN, or one clear line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.errors import MeasurementsError
from autotune.knowledge.row import COLUMNS
from autotune.knowledge.table import read_table
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.forecasts import Protocol
from benchmarks.prediction.scoring.markdown import markdown_page
from benchmarks.prediction.scoring.outcomes import NO_LABELS, read_labels
from benchmarks.prediction.scoring.report import validate
from tests.autotune.measurements import sweep, write_table
from tests.benchmarks.prediction.roofline import Roofline

CELLS = st.sampled_from(
    [
        "", " ", "nan", "inf", "-inf", "-1", "0", "1e308", "1e-308", "1e15", "1_000", "½", "٣", "true", "x", '"', "'", "a,b",
        "a\nb", "1;2", "ok", "oom", "fail_unknown", "grad_acc=0", "grad_acc=999999999", "kernel=", "|<b>", "\N{SNOWMAN}", "8",
        "8.0", "64", "1e3",
    ]
)  # fmt: skip
ONCE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
MODES = st.sampled_from(list(Calibration))


def scored(path: Path, mode: Calibration) -> dict[str, Any] | None:
    try:
        table = read_table(path)
    except MeasurementsError as error:
        assert "\n" not in str(error)
        return None
    document = validate(table, Roofline(), Protocol(calibrate=mode, min_timed=2))
    assert "NaN" not in json.dumps(document, allow_nan=False)
    assert document["rows"]["in_table"] == len(table.rows) + len(table.skipped)
    assert all(skip["line"] > 1 and skip["reason"] for skip in document["skipped"])
    assert markdown_page(document)
    return document


@pytest.mark.prove
@ONCE
@given(
    changes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(COLUMNS)), CELLS), max_size=12),
    mode=MODES,
    ends=st.sampled_from(["\n", "\r\n"]),
)
def test_mangled_cells(tmp_path: Path, changes: list[tuple[int, str, str]], mode: Calibration, ends: str) -> None:
    rows = sweep(10)
    for number, column, cell in changes:
        rows[number][column] = cell
    document = scored(write_table(tmp_path / "t.csv", rows, ends=ends), mode)
    assert document
    untouched = {f"r{number}" for number in range(10)} - {f"r{number}" for number, _, _ in changes}
    assert not untouched & {skip["row_id"] for skip in document["skipped"] if "configurations" not in skip["reason"]}


@ONCE
@given(data=st.data(), mode=MODES)
def test_mangled_bytes(tmp_path: Path, data: st.DataObject, mode: Calibration) -> None:
    content = bytearray(write_table(tmp_path / "t.csv", sweep(6)).read_bytes())
    for _ in range(data.draw(st.integers(0, 6))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["replace", "remove", "insert"])):
            case "replace":
                content[place] = data.draw(st.integers(0, 255))
            case "remove":
                del content[place : place + data.draw(st.integers(1, 80))]
            case _:
                content[place:place] = data.draw(st.binary(max_size=8))
        if not content:
            break
    (tmp_path / "t.csv").write_bytes(bytes(content))
    scored(tmp_path / "t.csv", mode)


@pytest.mark.prove
@ONCE
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode())))
def test_no_table_at_all(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    assert scored(tmp_path / "t.csv", Calibration.NONE) is None
    try:
        assert read_labels(tmp_path / "t.csv") == NO_LABELS
    except MeasurementsError as error:
        assert "\n" not in str(error)
