"""`python -m benchmarks.prediction.validate`, with a small predictor in the shipped one's place."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prediction import validate
from tests.autotune.measurements import row, sweep, write_table
from tests.benchmarks.prediction.roofline import Roofline


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "TablePredictor", Roofline)


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert validate.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("small_predictor")
def test_the_document_on_standard_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(folder / "t.csv", sweep(9))
    found = document(capsys, "t.csv")
    assert list(found["summary"]) == ["oom", "memory", "time", "rank"]
    assert found["summary"]["time"]["rows"] == 9
    assert found["groups"][0]["rank_group"] == "small-8"


@pytest.mark.usefixtures("small_predictor")
def test_options_reach_the_protocol(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(folder / "t.csv", [*sweep(9), row("f", outcome="fail_unknown", oom=None, micro_batch=64, dp=1, num_gpus=1)])
    (folder / "labels.csv").write_text("row_id,label_DERIVED_HERE\nf,likely_oom\n")
    words = ("--calibrate", "few-rows", "--calibration-rows", "2", "--min-timed", "5", "--seed", "4", "--labels", "labels.csv")
    found = document(capsys, "t.csv", *words)
    assert (found["calibrate"], found["calibration_rows"], found["seed"]) == ("few-rows", 2, 4)
    assert (found["min_timed"], found["draws"], found["summary"]["oom"]["out_of_memory"]) == (5, 20, 1)


@pytest.mark.usefixtures("small_predictor")
def test_the_page_is_printed_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*sweep(9), row("[bold]x[/bold]", source="[red]two", tokens_per_s_per_gpu=9), row("bad", hidden="wide")]
    write_table(folder / "t.csv", rows)
    assert validate.main(["t.csv", "--markdown", "page.md"]) == 0
    printed = capsys.readouterr().out
    for part in ("# Validation\n", "Calibration: none", "11 rows, 10 scored", "Out of memory", "Ranks", "[red]two"):
        assert part in printed
    assert "hidden 'wide' is not a number | 1 | bad, line 12 |" in printed
    assert (folder / "page.md").read_text() == printed[:-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.csv",), "none.csv: no such file; give the path of a CSV file of measurements"),
        (("t.csv", "--labels", "none.csv"), "none.csv: no such file; give the path of a CSV file of labels"),
        (("config.json",), "no such column"),
    ],
)
def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    write_table(folder / "t.csv", sweep(3))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert validate.main(words) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    assert says in printed.err


@pytest.mark.prove
def test_tables_are_validated_with_knowledge_but_not_with_their_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = sweep(12)
    write_table(folder / "asked.csv", written[:6])
    write_table(folder / "given.csv", [*written, row("far", source="other", num_gpus=16, dp=16, samples_per_s=150.0)])
    blind = document(capsys, "asked.csv")
    assert validate.main(["asked.csv", "--knowledge", "given.csv", "--json"]) == 0
    printed = capsys.readouterr()
    assert "7 rows of given.csv are learned from" in printed.err
    assert "left out: the table has the same measurements" in printed.err
    assert json.loads(printed.out)["summary"] != blind["summary"]
    assert validate.main(["asked.csv", "--knowledge", "asked.csv"]) == 2
    assert "knowledge: no row of asked.csv may be learned from" in capsys.readouterr().err
