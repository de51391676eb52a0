"""`autotune validate`, with a small predictor in the shipped one's place."""

import json
from pathlib import Path

import pytest
from called import Command
from measurements import row, sweep, write_table
from roofline import Roofline

from autotune.cli import validate


@pytest.fixture(autouse=True)
def small_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "shipped_predictor", Roofline)


def test_the_document_on_standard_output(command: Command, folder: Path) -> None:
    write_table(folder / "t.csv", sweep(9))
    answer = command("validate", "t.csv", "--json")
    assert (answer.status, answer.err) == (0, "")
    document = json.loads(answer.out)
    assert list(document["summary"]) == ["oom", "memory", "time", "rank"]
    assert document["summary"]["time"]["rows"] == 9
    assert document["groups"][0]["rank_group"] == "small-8"


def test_options_reach_the_protocol(command: Command, folder: Path) -> None:
    write_table(folder / "t.csv", [*sweep(9), row("f", outcome="fail_unknown", oom=None, micro_batch=64, dp=1, num_gpus=1)])
    (folder / "labels.csv").write_text("row_id,label_DERIVED_HERE\nf,likely_oom\n")
    words = ("--calibrate", "few-rows", "--calibration-rows", 2, "--min-timed", 5, "--seed", 4, "--labels", "labels.csv")
    document = json.loads(command("validate", "t.csv", *words, "--json").out)
    assert (document["calibrate"], document["calibration_rows"], document["seed"]) == ("few-rows", 2, 4)
    assert (document["min_timed"], document["draws"], document["summary"]["oom"]["out_of_memory"]) == (5, 20, 1)


def test_the_table_that_is_printed_and_the_page(command: Command, folder: Path) -> None:
    rows = [*sweep(9), row("[bold]x[/bold]", source="[red]two", tokens_per_s_per_gpu=9), row("bad", hidden="wide")]
    write_table(folder / "t.csv", rows)
    answer = command("validate", "t.csv", "--markdown", "page.md")
    assert (answer.status, answer.err) == (0, "")
    for part in ("Calibration: none", "11 rows, 10 scored", "Out of memory", "Ranks", "[red]two"):
        assert part in answer.out
    assert "not scored, 1 row: hidden 'wide' is not a number (first: bad, line 12)" in answer.out
    assert (folder / "page.md").read_text().startswith("# Validation\n")


BAD = {
    "no table": (("none.csv",), "none.csv: no such file; give the path of a CSV file of measurements"),
    "no labels": (("t.csv", "--labels", "none.csv"), "none.csv: no such file; give the path of a CSV file of labels"),
    "mode": (("t.csv", "--calibrate", "all"), "calibrate: 'all' is not a mode; use one of none, leave-group-out"),
    "page": (("t.csv", "--markdown", "no/where.md"), "cannot be written"),
    "rows": (("t.csv", "--calibration-rows", "0"), "calibration_rows: '0' is not at least 1"),
    "columns": (("config.json",), "no such column"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(command: Command, folder: Path, case: str) -> None:
    write_table(folder / "t.csv", sweep(3))
    words, says = BAD[case]
    answer = command("validate", *words)
    assert (answer.status, answer.out, len(answer.err.splitlines())) == (2, "", 1)
    assert says in answer.err
