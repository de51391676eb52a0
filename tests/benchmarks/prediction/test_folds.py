"""What a predictor is fitted on before it predicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.knowledge.row import TableRow
from autotune.knowledge.table import MeasurementTable, read_table
from benchmarks.prediction.scoring.contract import Forecast
from benchmarks.prediction.scoring.folds import DRAWS, Calibration
from benchmarks.prediction.scoring.forecasts import Protocol
from benchmarks.prediction.scoring.report import Document, validate
from tests.autotune.measurements import row, sweep, write_table
from tests.benchmarks.prediction.roofline import Roofline, forecast_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Spy:
    """Writes down what it was fitted on, and then asked about."""

    calls: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    known: frozenset[str] = frozenset()

    def in_sample(self, rows: Sequence[TableRow]) -> int:
        return len(rows)

    def refusals(self, rows: Sequence[TableRow]) -> list[str | None]:
        return ["refused" if row.model_name == "strange" else None for row in rows]

    def calibrated(self, rows: Sequence[TableRow]) -> "Spy":
        return Spy(calls=self.calls, known=frozenset(row.row_id for row in rows))

    def forecast(self, rows: Sequence[TableRow]) -> Forecast:
        assert not any(row.tokens_per_s_per_gpu or row.peak_mem_gb or row.oom or row.outcome != "unknown" for row in rows)
        self.calls.append((self.known, frozenset(row.row_id for row in rows)))
        return Roofline().forecast(rows)


def named(prefix: str, rows: list[dict[str, Any]], **cells: Any) -> list[dict[str, Any]]:
    return [each | {"row_id": f"{prefix}{number}"} | cells for number, each in enumerate(rows)]


def spied(folder: Path, rows: list[dict[str, Any]], mode: Calibration, **protocol: Any) -> tuple[Spy, Document]:
    spy = Spy()
    document = validate(read_table(write_table(folder / "t.csv", rows)), spy, Protocol(calibrate=mode, **protocol))
    return spy, document


def letters(ids: frozenset[str]) -> str:
    return "".join(sorted({row_id[0] for row_id in ids}))


def test_none_predicts_as_shipped_and_says_in_sample(tmp_path: Path) -> None:
    spy, document = spied(tmp_path, sweep(9), Calibration.NONE)
    assert [known for known, _ in spy.calls] == [frozenset()]
    assert (document["in_sample"], document["in_sample_rows"]) == (True, 9)
    assert document["in_sample_note"] == "in-sample: the shipped coefficients were fitted on 9 of these 9 rows"


def test_leave_source_out(tmp_path: Path) -> None:
    rows = [*named("a", sweep(3)), *named("b", sweep(3), source="b"), *named("c", sweep(2), source="c")]
    spy, document = spied(tmp_path, [*rows, row("z", model_name="strange")], Calibration.LEAVE_SOURCE_OUT)
    assert [(letters(known), letters(asked)) for known, asked in spy.calls] == [("bc", "a"), ("ac", "b"), ("ab", "c")]
    assert (document["in_sample"], document["in_sample_note"], document["predicted_by_priors_alone"]) == (False, None, 0)


def test_one_source_alone_is_predicted_by_priors(tmp_path: Path) -> None:
    _, document = spied(tmp_path, sweep(3), Calibration.LEAVE_SOURCE_OUT)
    assert document["predicted_by_priors_alone"] == 3


def test_leave_group_out(tmp_path: Path) -> None:
    """Groups a and b; c has too few timed for a group; d and e have none; d has the setting of a, e has not."""
    rows = [
        *named("a", sweep(8), rank_group="a"),
        *named("b", sweep(8), rank_group="b", model_name="other"),
        *named("c", sweep(2), rank_group="c", model_name="third"),
        *named("d", sweep(2), rank_group=None, notes="kernel=k0"),
        *named("e", sweep(2), rank_group=None, num_gpus=16, tp=2, notes="kernel=k0"),
    ]
    spy, _ = spied(tmp_path, rows, Calibration.LEAVE_GROUP_OUT)
    folds = [(letters(known), letters(asked)) for known, asked in spy.calls]
    assert folds == [("bce", "a"), ("acde", "b"), ("abde", "c"), ("bc", "de")]


def test_few_rows_draws_of_each_source_and_leaves_its_draws_and_their_repeats_out(tmp_path: Path) -> None:
    rows = [*named("a", sweep(6)), *named("b", sweep(5), source="b"), *named("c", sweep(3), source="c")]
    rows += [row("a-oom", outcome="oom", oom="true", micro_batch=64, dp=1, num_gpus=1), rows[0] | {"row_id": "a-again"}]
    spy, document = spied(tmp_path, rows, Calibration.FEW_ROWS)
    assert len(spy.calls) == 2 * DRAWS
    for known, asked in spy.calls:
        assert (len(known), letters(known), known & asked) == (3, letters(asked), set())
        assert letters(asked) != "a" or "a-oom" in asked
        assert not ({"a0", "a-again"} & known and {"a0", "a-again"} & asked)
    assert {skip["reason"] for skip in document["skipped"]} == {
        "its source has 3 measured configurations: too few to fit on 3 and score the rest"
    }
    assert (document["draws"], document["calibration_rows"], document["by_source"]["b"]["time"]["rows"]) == (DRAWS, 3, 2)
    assert len({known for known, _ in spy.calls}) > DRAWS


def test_few_rows_is_reproducible_by_its_seed(tmp_path: Path) -> None:
    def figures(seed: int) -> Any:
        table: MeasurementTable = read_table(write_table(tmp_path / "t.csv", sweep(30)))
        return validate(table, Roofline(), Protocol(calibrate=Calibration.FEW_ROWS, seed=seed))["summary"]

    assert figures(7) == figures(7)
    assert figures(7)["time"] != figures(8)["time"]


def test_figures_of_few_rows_are_medians_of_draws(tmp_path: Path) -> None:
    """A predictor whose slowness is its calibration's: what is told is the median draw, not any one."""
    table = read_table(write_table(tmp_path / "t.csv", sweep(12)))
    told = validate(table, Roofline(), Protocol(calibrate=Calibration.FEW_ROWS, calibration_rows=1, min_timed=4))
    assert told["summary"]["time"]["rows"] == 11
    assert isinstance(told["summary"]["time"]["rows"], int)
    assert told["groups"][0]["timed"] == 11
    one = validate(table, Roofline(), Protocol(min_timed=4))["groups"][0]
    assert told["groups"][0]["spearman"] == pytest.approx(one["spearman"], abs=0.1)


def test_calibration_is_what_the_fold_says(tmp_path: Path) -> None:
    """Twice as slow, twice the memory: found from the other source, not from one's own rows."""
    rows = [*named("a", sweep(8)), *named("b", sweep(8), source="b")]
    table = read_table(write_table(tmp_path / "t.csv", rows))
    errors = {
        mode: validate(table, Roofline(), Protocol(calibrate=mode))["summary"]["time"]["median_abs_error"]
        for mode in Calibration
    }
    assert errors[Calibration.LEAVE_SOURCE_OUT] < errors[Calibration.NONE]
    assert errors[Calibration.FEW_ROWS] < errors[Calibration.NONE]


def test_forecasts_do_not_share_arrays() -> None:
    said = Roofline().forecast([])
    assert forecast_of(said.step_seconds, said.memory_bytes, []).out_of_memory.size == 0
