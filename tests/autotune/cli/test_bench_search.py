"""`autotune bench-search` on small tables."""

import json
from pathlib import Path

import pytest
from called import Command
from measurements import row, sweep, write_table

ROWS = [*sweep(9), row("f", micro_batch=64, dp=1, num_gpus=1, outcome="fail_unknown", oom=None)]
QUICK = ("--strategies", "random,grid", "--calibrate", "none", "--seeds", 2, "--trials", 10, "--processes", 1)


def test_the_document_on_standard_output(command: Command, folder: Path) -> None:
    write_table(folder / "t.csv", ROWS)
    (folder / "labels.csv").write_text("row_id,label_DERIVED_HERE\nf,likely_oom\n")
    answer = command("bench-search", "t.csv", *QUICK, "--labels", "labels.csv", "--min-timed", 9, "--seed", 4, "--json")
    assert (answer.status, answer.err) == (0, "")
    document = json.loads(answer.out)
    assert list(document["strategies"]) == ["random", "grid"]
    assert set(document["strategies"]["grid"]) >= {
        "share", "within_5_percent", "failed_in_first_10", "oom_in_first_10", "propose_ms_p95",
    }  # fmt: skip
    assert document["strategies"]["grid"]["share"]["10"] == 1.0
    assert document["strategies"]["grid"]["failed_in_first_10"] == document["strategies"]["grid"]["oom_in_first_10"] == 1
    assert (document["trials"], document["seeds"], document["seed"], document["min_timed"]) == (10, 2, 4, 9)
    assert [(each["rank_group"], each["rows"], each["timed"]) for each in document["groups"]] == [("small-8", 10, 9)]


def test_the_table_that_is_printed_and_the_page(command: Command, folder: Path) -> None:
    others = sweep(8, source="[red]two", rank_group="[bold]g")
    write_table(folder / "t.csv", [*ROWS, *others, row("bad", hidden="wide"), row("alone", rank_group="tiny")])
    answer = command("bench-search", "t.csv", *QUICK, "--markdown", "page.md")
    assert (answer.status, answer.err) == (0, "")
    for part in ("all: 2 groups", "[red]two: 1 group", "oracle, 5 % noise", "Chance of being within 5 %", "out of memory"):
        assert part in answer.out
    assert "left out, 1 group with fewer than 8 timed candidates" in answer.out
    assert "left out, 1 row: hidden 'wide' is not a number (first: bad, line 20)" in answer.out
    tables = [line for line in answer.out.splitlines() if "left out" not in line]
    assert max(map(len, tables)) <= 100
    page = (folder / "page.md").read_text()
    assert page.startswith("# Strategies against each other\n")
    assert "| [bold]g | 8 | 8 |" in page


BAD = {
    "no table": (("none.csv",), "none.csv: no such file; give the path of a CSV file of measurements"),
    "strategy": (("t.csv", "--strategies", "tpe,magic"), "strategy: 'magic' is not known; use one of guided"),
    "twice": (("t.csv", "--strategies", "tpe,tpe"), "strategies: tpe is named twice"),
    "none": (("t.csv", "--strategies", ","), "strategies: none is named"),
    "mode": (("t.csv", "--calibrate", "few-rows"), "calibrate: 'few-rows' is not a mode; use one of none, leave-group-out"),
    "page": (("t.csv", "--markdown", "no/where.md"), "cannot be written"),
    "trials": (("t.csv", "--trials", "0"), "trials: '0' is not at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(command: Command, folder: Path, case: str) -> None:
    write_table(folder / "t.csv", sweep(3))
    words, says = BAD[case]
    answer = command("bench-search", *words)
    assert (answer.status, answer.out, len(answer.err.splitlines())) == (2, "", 1)
    assert says in answer.err
