"""The document and the page of a small table against their golden files; what they hold of a real one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from autotune.knowledge.table import read_table
from benchmarks.prediction.scoring.facts import gather_facts
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.forecasts import Protocol
from benchmarks.prediction.scoring.markdown import markdown_page
from benchmarks.prediction.scoring.outcomes import NO_LABELS, Fate, read_labels
from benchmarks.prediction.scoring.report import Document, validate
from tests.autotune.measurements import row, sweep, write_table
from tests.benchmarks.prediction.roofline import Roofline, oracle

GOLDEN = Path(__file__).parent / "golden"
DATA = Path(os.environ.get("AUTOTUNE_DATA", Path(__file__).parents[4] / "shared" / "data"))
FOUR = ("oom", "memory", "rank", "time")


def report_of(folder: Path, rows: list[dict[str, Any]], mode: Calibration = Calibration.NONE, **how: Any) -> Document:
    return validate(read_table(write_table(folder / "t.csv", rows, **how)), Roofline(), Protocol(calibrate=mode))


def small_table() -> list[dict[str, Any]]:
    return [
        *sweep(9),
        *(each | {"source": "seen", "row_id": f"s{each['row_id']}"} for each in sweep(4, rank_group=None, peak_mem_gb=None)),
        row("again", notes="kernel=k0", tokens_per_s_per_gpu=1010, peak_mem_gb=11),
        row("full", outcome="oom", oom="true", micro_batch=64, dp=1, num_gpus=1),
        row("died", outcome="fail_unknown", oom=None, micro_batch=32, dp=1, num_gpus=1),
        row("bad | cell", hidden="wide"),
        row("wrong", notes="grad_acc=5", tokens_per_s_per_gpu=4, peak_mem_gb=7),
        row("tpu", gpu_type="TPU v4"),
    ]


def same_as_golden(path: Path, text: str) -> None:
    """Write the files anew with AUTOTUNE_WRITE_GOLDEN=1."""
    if os.environ.get("AUTOTUNE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def test_the_document_and_the_page_are_golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = report_of(Path(), small_table())
    same_as_golden(GOLDEN / "report.json", json.dumps(rounded(document), indent=2, allow_nan=False) + "\n")
    same_as_golden(GOLDEN / "report.md", markdown_page(document))


def test_the_document_has_what_was_promised(tmp_path: Path) -> None:
    document = report_of(tmp_path, small_table())
    promised = {
        "oom": {"recall", "precision", "rows"},
        "memory": {"median_abs_error", "p95_abs_error", "rows"},
        "rank": {"spearman_median", "predicted_best_share_mean", "groups"},
        "time": {"median_abs_error", "mean_abs_error", "max_abs_error", "rows"},
    }
    for figures in (document["summary"], *document["by_source"].values()):
        assert set(figures) == set(FOUR)
        assert all(names <= set(figures[score]) for score, names in promised.items())
    assert set(document["by_source"]) == {"lab", "seen"}
    assert {"rank_group", "rows", "timed", "spearman", "predicted_best_share", "ceiling"} <= set(document["groups"][0])
    assert all({"row_id", "reason"} <= set(skip) for skip in document["skipped"])


@pytest.mark.parametrize("mode", Calibration)
@pytest.mark.parametrize("case", ["one row", "no row", "no time", "no group", "no source", "nothing representable"])
def test_a_table_with_little_in_it_has_null_figures(tmp_path: Path, mode: Calibration, case: str) -> None:
    rows = {
        "one row": sweep(1),
        "no row": [],
        "no time": sweep(9, tokens_per_s_per_gpu=None),
        "no group": sweep(9, rank_group=None),
        "no source": sweep(9, source=None, row_id=None),
        "nothing representable": sweep(9, gpu_type=None),
    }[case]
    document = report_of(tmp_path, rows, mode)
    json.dumps(document, allow_nan=False)
    markdown_page(document)
    summary = document["summary"]
    if case in ("no row", "nothing representable"):
        assert (summary["time"]["median_abs_error"], summary["time"]["rows"]) == (None, 0)
    if case != "no source":
        assert (summary["rank"]["spearman_median"], summary["rank"]["groups"]) == (None, 0)
    if case == "no time":
        assert (summary["time"]["max_abs_error"], summary["time"]["rows"]) == (None, 0)
        assert summary["memory"]["rows"]
    assert summary["oom"]["recall"] is None


def test_a_missing_column_costs_its_scores_alone(tmp_path: Path) -> None:
    whole = report_of(tmp_path, small_table())
    for column, lost in (("peak_mem_gb", "memory"), ("rank_group", "rank")):
        document = report_of(tmp_path, small_table(), without=(column,))
        assert {score for score in FOUR if document["summary"][score] != whole["summary"][score]} == {lost}
        assert f"no column {column}" in document["problems"][0]["problem"]


@pytest.mark.skipif(not (DATA / "measured.csv").exists(), reason="needs ../shared/data/measured.csv, or AUTOTUNE_DATA")
def test_real_measurements() -> None:
    """What the table's own notes say is found; one who has read the table has no error; the ceiling is below what is known."""
    table, labels = read_table(DATA / "measured.csv"), read_labels(DATA / "failure_labels.csv")
    document = validate(table, oracle(table.rows), Protocol(), labels)
    json.dumps(document, allow_nan=False)
    summary = document["summary"]
    assert (document["rows"]["in_table"], document["rows"]["contradict_their_batch"]) == (2897, 20)
    assert summary["time"]["max_abs_error"] == summary["memory"]["p95_abs_error"] == 0
    assert (summary["oom"]["recall"], summary["rank"]["groups"]) == (1, 36)
    # Repeats are predicted alike, and measured not.
    assert summary["rank"]["spearman_median"] == pytest.approx(1)
    assert summary["oom"]["out_of_memory"] == 499 + 336 + 11
    assert gather_facts(table.rows, NO_LABELS).fate_is(Fate.OUT_OF_MEMORY).sum() == 499
