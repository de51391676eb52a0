"""Errors, verdicts and ranks of predictors that are known to be right, or wrong by so much."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.knowledge.table import MeasurementTable, read_table
from autotune.prediction.planning.depth import mid_ranks, spearman
from benchmarks.prediction.scoring.forecasts import Protocol
from benchmarks.prediction.scoring.outcomes import Fate, Labels
from benchmarks.prediction.scoring.report import validate
from tests.autotune.measurements import row, sweep, write_table
from tests.benchmarks.prediction.roofline import Oracle, Roofline, oracle

FAILED: dict[str, Any] = {"tokens_per_s_per_gpu": None, "peak_mem_gb": None}


def table_of(folder: Path, rows: list[dict[str, Any]]) -> MeasurementTable:
    return read_table(write_table(folder / "t.csv", rows))


def oom(row_id: str, **cells: Any) -> dict[str, Any]:
    return row(row_id, outcome="oom", oom="true", **cells)


def test_a_perfect_predictor(tmp_path: Path) -> None:
    table = table_of(tmp_path, [*sweep(12), oom("x", micro_batch=16, pp=4, dp=2), oom("y", micro_batch=32, pp=4, dp=2)])
    summary = validate(table, oracle(table.rows), Protocol())["summary"]
    assert summary["time"] | {"inside_interval": 1.0} == {
        "median_abs_error": 0, "mean_abs_error": 0, "max_abs_error": 0, "bias": 0, "inside_interval": 1.0, "rows": 12,
        "pathological": 0,
    }  # fmt: skip
    assert (summary["memory"]["median_abs_error"], summary["memory"]["p95_abs_error"], summary["memory"]["rows"]) == (0, 0, 12)
    assert summary["oom"] == {
        "recall": 1, "precision": 1, "false_alarm_share": 0, "rows": 14, "out_of_memory": 2, "missed": 0, "false_alarms": 0,
    }  # fmt: skip
    rank = summary["rank"]
    assert (rank["spearman_median"], rank["predicted_best_share_mean"], rank["groups"]) == (1, 1, 1)


def test_a_reversed_predictor(tmp_path: Path) -> None:
    table = table_of(tmp_path, sweep(12))
    (group,) = validate(table, oracle(table.rows, power=-1.0), Protocol())["groups"]
    rates = [each.tokens_per_s_per_gpu or 0 for each in table.rows]
    assert group["spearman"] == -1
    assert group["predicted_best_share"] == pytest.approx(min(rates) / max(rates))
    assert group["regret"] == pytest.approx(1 - min(rates) / max(rates))


def test_errors_are_shares_of_what_was_measured(tmp_path: Path) -> None:
    table = table_of(tmp_path, sweep(3))
    knows = oracle(table.rows)
    seconds = dict(zip(knows.seconds, np.array(list(knows.seconds.values())) * [1.1, 0.8, 1.5], strict=True))
    scores = validate(table, Oracle(seconds=seconds, bytes={"r0": knows.bytes["r0"] * 0.5}), Protocol())["summary"]
    assert scores["time"]["median_abs_error"] == pytest.approx(0.2)
    assert scores["time"]["mean_abs_error"] == pytest.approx(0.8 / 3)
    assert scores["time"]["max_abs_error"] == pytest.approx(0.5)
    assert scores["time"]["bias"] == pytest.approx(0.1)
    assert scores["time"]["inside_interval"] == pytest.approx(1 / 3)


def test_recall_precision_and_false_alarms(tmp_path: Path) -> None:
    rows = [
        *sweep(6),
        *(oom(f"x{number}", micro_batch=64, pp=1, dp=1, num_gpus=1 + number, tp=1 + number) for number in range(3)),
    ]
    rows += [row("e", outcome="error", oom=None), row("f", outcome="fail_unknown", oom=None)]
    table = table_of(tmp_path, rows)
    says = Oracle(seconds={}, bytes={}, failing=frozenset({"x0", "x1", "r0", "e", "f"}))
    scores = validate(table, says, Protocol())["summary"]["oom"]
    assert scores == {
        "recall": 2 / 3, "precision": 2 / 3, "false_alarm_share": 1 / 6, "rows": 9, "out_of_memory": 3, "missed": 1,
        "false_alarms": 1,
    }  # fmt: skip
    labelled = validate(table, says, Protocol(), Labels(fates={"f": Fate.OUT_OF_MEMORY}))["summary"]["oom"]
    assert (labelled["recall"], labelled["rows"]) == (3 / 4, 10)
    excused = validate(table, says, Protocol(), Labels(fates={"f": Fate.FAILED_OTHERWISE}))["summary"]["oom"]
    assert excused == scores


def test_the_predicted_best_is_worth_nothing_where_it_failed(tmp_path: Path) -> None:
    """Of unstated cause or of memory; one that is called out of memory, or failed of something else, is not picked."""
    quick = {"num_gpus": 8, "tp": 8, "dp": 1, "pp": 1}
    for outcome, called, share in (("oom", False, 0), ("fail_unknown", False, 0), ("error", False, 1), ("oom", True, 1)):
        table = table_of(tmp_path, [*sweep(8), row("x", outcome=outcome, oom=None, **quick)])
        knows = oracle(table.rows)
        says = Oracle(seconds=knows.seconds, bytes=knows.bytes, failing=frozenset({"x"} if called else ()))
        (group,) = validate(table, says, Protocol())["groups"]
        assert (group["predicted_best_share"], group["share_among_timed"]) == (share, 1), (outcome, called)
        assert group["predicted_best"] == ("x" if share == 0 else group["measured_best"])


def test_where_all_are_called_out_of_memory_the_smallest_is_picked(tmp_path: Path) -> None:
    table = table_of(tmp_path, sweep(8))
    knows = oracle(table.rows)
    says = Oracle(seconds=knows.seconds, bytes=knows.bytes, failing=frozenset(knows.seconds))
    (group,) = validate(table, says, Protocol())["groups"]
    assert group["predicted_best"] == "r0"


def test_rows_of_one_configuration_are_one_candidate(tmp_path: Path) -> None:
    rows = [*sweep(8), *sweep(1, tokens_per_s_per_gpu=2000), row("r0", notes="kernel=k0", outcome="fail_unknown", oom=None)]
    rows[8]["row_id"], rows[9]["row_id"] = "again", "failed"
    table = table_of(tmp_path, rows)
    document = validate(table, oracle(table.rows), Protocol())
    assert document["merged"] == [
        {
            "rank_group": "small-8", "rows": ["r0", "again", "failed"], "lines": [2, 10, 11],
            "outcomes": ["ok", "ok", "fail_unknown"], "counts_as": "ran",
        }
    ]  # fmt: skip
    (group,) = document["groups"]
    assert (group["rows"], group["candidates"], group["timed"], group["failed"]) == (10, 8, 8, 0)


def test_groups_need_timed_candidates(tmp_path: Path) -> None:
    table = table_of(tmp_path, sweep(7))
    assert validate(table, oracle(table.rows), Protocol())["groups"] == []
    assert len(validate(table, oracle(table.rows), Protocol(min_timed=7))["groups"]) == 1


def test_rows_that_contradict_their_batch_count_for_memory_alone(tmp_path: Path) -> None:
    table = table_of(tmp_path, [*sweep(8), *({**each, "notes": "grad_acc=999", "row_id": "c"} for each in sweep(1))])
    document = validate(table, oracle(table.rows), Protocol())
    assert (document["summary"]["time"]["rows"], document["summary"]["memory"]["rows"]) == (8, 9)
    assert document["groups"][0]["rows"] == 8
    assert document["rows"]["contradict_their_batch"] == 1


def test_pathological_rows_are_ranked_and_not_timed(tmp_path: Path) -> None:
    rows = sweep(9)
    rows[0]["tokens_per_s_per_gpu"] = 20
    table = table_of(tmp_path, rows)
    document = validate(table, oracle(table.rows), Protocol())
    assert (document["summary"]["time"]["rows"], document["summary"]["time"]["pathological"]) == (8, 1)
    assert document["groups"][0]["timed"] == 9


def test_what_is_refused_is_listed_and_left_out(tmp_path: Path) -> None:
    table = table_of(tmp_path, [*sweep(8), row("tpu", gpu_type="TPU", peak_mem_gb=9), row("bad", tp="x")])
    document = validate(table, Roofline(), Protocol())
    assert document["skipped"] == [
        {"row_id": "tpu", "line": 10, "reason": "device is unknown"},
        {"row_id": "bad", "line": 11, "reason": "tp 'x' is not a number"},
    ]
    assert (document["rows"]["in_table"], document["rows"]["read"], document["rows"]["scored"]) == (10, 9, 8)


def test_figures_that_are_no_numbers_are_no_figures(tmp_path: Path) -> None:
    table = table_of(tmp_path, sweep(4))
    says = Oracle(seconds={"r0": np.nan, "r1": np.inf, "r2": -1.0, "r3": 2.0}, bytes={"r0": np.nan})
    document = validate(table, says, Protocol())
    assert [skip["reason"] for skip in document["skipped"]] == ["the predictor gives neither time nor memory"]
    assert (document["summary"]["time"]["rows"], document["summary"]["memory"]["rows"]) == (1, 3)


def test_mid_ranks_and_rank_correlation_with_ties() -> None:
    assert mid_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1, 3.5, 2]
    first, second = np.array([1.0, 2.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0, 2.0])
    # Pearson's correlation of the middle ranks (1, 2.5, 2.5, 4) and (1, 4, 2.5, 2.5), by hand: 2.25 / 4.5.
    assert spearman(first, second) == pytest.approx(0.5)
    assert spearman(first, np.ones(4)) is None
    assert spearman(np.ones(1), np.ones(1)) is None
