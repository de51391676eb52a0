"""`python -m benchmarks.search.bench_search` on small tables."""

import json
from pathlib import Path

import pytest

from benchmarks.search.bench_search import main
from tests.autotune.measurements import row, sweep, write_table

ROWS = [*sweep(9), row("f", micro_batch=64, dp=1, num_gpus=1, outcome="fail_unknown", oom=None)]
QUICK = ("--strategies", "random,grid", "--calibrate", "none", "--seeds", "2", "--trials", "10", "--processes", "1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_document_on_standard_output(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(folder / "t.csv", ROWS)
    (folder / "labels.csv").write_text("row_id,label_DERIVED_HERE\nf,likely_oom\n")
    assert main(["t.csv", *QUICK, "--labels", "labels.csv", "--min-timed", "9", "--seed", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["strategies"]) == ["random", "grid"]
    assert set(document["strategies"]["grid"]) >= {
        "share", "within_5_percent", "failed_in_first_10", "oom_in_first_10", "propose_ms_p95",
    }  # fmt: skip
    assert document["strategies"]["grid"]["share"]["10"] == 1.0
    assert document["strategies"]["grid"]["failed_in_first_10"] == document["strategies"]["grid"]["oom_in_first_10"] == 1
    assert (document["trials"], document["seeds"], document["seed"], document["min_timed"]) == (10, 2, 4, 9)
    assert [(each["rank_group"], each["rows"], each["timed"]) for each in document["groups"]] == [("small-8", 10, 9)]


def test_the_page_is_printed_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = sweep(8, source="[red]two", rank_group="[bold]g")
    write_table(folder / "t.csv", [*ROWS, *others, row("bad", hidden="wide"), row("alone", rank_group="tiny")])
    assert main(["t.csv", *QUICK, "--markdown", "page.md"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Strategies against each other\n")
    for part in ("[red]two", "oracle, 5 % noise", "Chance of being within 5 %", "out of memory"):
        assert part in printed
    assert "1 group with fewer than 8 timed candidates" in printed
    assert "1 row: hidden 'wide' is not a number (first: bad, line 20)" in printed
    assert "| [bold]g | 8 | 8 |" in printed
    assert (folder / "page.md").read_text() == printed[:-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.csv",), "none.csv: no such file; give the path of a CSV file of measurements"),
        (("t.csv", "--strategies", "tpe,magic"), "strategy: 'magic' is not known; use one of guided"),
        (("t.csv", "--strategies", "tpe,tpe"), "strategies: tpe is named twice"),
        (("t.csv", "--strategies", ","), "strategies: none is named"),
    ],
)
def test_bad_input_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    write_table(folder / "t.csv", sweep(3))
    assert main(words) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    assert says in printed.err


@pytest.mark.prove
def test_sources_that_are_left_out_are_left_out_of_knowledge_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = sweep(12)
    write_table(folder / "asked.csv", written[:6])
    write_table(folder / "given.csv", [*written, row("far", source="other", num_gpus=16, dp=16, samples_per_s=150.0)])
    words = ("--min-timed", "2", "--trials", "2", "--seeds", "1", "--processes", "1", "--strategies", "guided")
    assert main(["asked.csv", *words, "--calibrate", "leave-source-out", "--knowledge", "given.csv", "--json"]) == 0
    assert "1 rows of given.csv are learned from" in capsys.readouterr().err
