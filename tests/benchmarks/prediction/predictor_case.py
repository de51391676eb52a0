"""What every predictor must keep to, whatever it predicts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.knowledge.row import RowOutcome, TableRow, blinded
from autotune.knowledge.table import read_table
from benchmarks.prediction.scoring.contract import Forecast, Predictor
from tests.autotune.measurements import row, sweep, write_table

FIELDS = tuple(Forecast.__dataclass_fields__)


class PredictorCase:
    """Derive from it and give the fixture `predictor`."""

    @pytest.fixture
    def predictor(self) -> Predictor:
        raise NotImplementedError

    @pytest.fixture
    def rows(self, tmp_path: Path) -> list[TableRow]:
        """A sweep, another source's rows, and some that few can represent."""
        table = [
            *sweep(12),
            *({**each, "row_id": f"b{number}", "source": "b"} for number, each in enumerate(sweep(6, peak_mem_gb=None))),
            row("oom", outcome="oom", oom="true", micro_batch=64, dp=1, num_gpus=1, samples_per_s=None),
            row("blank", heads=None, kv_heads=None, ffn_hidden=None, recompute=None, gpus_per_node=None, notes=None),
            row("batchless", global_batch=None),
            row("device", gpu_type="Abacus"),
        ]
        return list(read_table(write_table(tmp_path / "t.csv", table)).rows)

    def test_it_refuses_in_one_line_and_keeps_to_it(self, predictor: Predictor, rows: list[TableRow]) -> None:
        refusals = list(predictor.refusals(rows))
        assert len(refusals) == len(rows)
        assert all(why is None or (why and "\n" not in why) for why in refusals)
        assert list(predictor.calibrated(self._usable(predictor, rows)).refusals(rows)) == refusals
        assert list(predictor.refusals([blinded(each) for each in rows])) == refusals

    def test_a_forecast_has_figures_in_order(self, predictor: Predictor, rows: list[TableRow]) -> None:
        usable = self._usable(predictor, rows)
        said = predictor.forecast(usable)
        assert len(usable) >= 18
        assert {getattr(said, name).shape for name in FIELDS} == {(len(usable),)}
        assert said.out_of_memory.dtype == bool
        for low, middle, high in (
            (said.step_seconds_low, said.step_seconds, said.step_seconds_high),
            (said.memory_bytes_low, said.memory_bytes, said.memory_bytes_high),
        ):
            assert np.all((low > 0) & (low <= middle) & (middle <= high))

    def test_no_row_changes_another(self, predictor: Predictor, rows: list[TableRow]) -> None:
        usable = self._usable(predictor, rows)
        together = predictor.forecast(usable)
        backwards = predictor.forecast(usable[::-1])
        alone = [predictor.forecast([each]) for each in usable]
        for name in FIELDS:
            np.testing.assert_allclose(getattr(backwards, name)[::-1], getattr(together, name), rtol=1e-9)
            np.testing.assert_allclose([getattr(one, name)[0] for one in alone], getattr(together, name), rtol=1e-9)

    def test_what_was_measured_does_not_enter(self, predictor: Predictor, rows: list[TableRow]) -> None:
        usable = self._usable(predictor, rows)
        lies = [replace(each, tokens_per_s_per_gpu=1.0, peak_mem_gb=1.0, outcome=RowOutcome.OOM, oom=True) for each in usable]
        said, other = predictor.forecast(usable), predictor.forecast(lies)
        assert all(np.array_equal(getattr(said, name), getattr(other, name)) for name in FIELDS)

    def test_calibration_makes_another_predictor(self, predictor: Predictor, rows: list[TableRow]) -> None:
        usable = self._usable(predictor, rows)
        before = predictor.forecast(usable)
        fitted = predictor.calibrated([each for each in usable if each.source == "lab"])
        assert fitted.in_sample(usable) == 0
        assert np.array_equal(predictor.forecast(usable).step_seconds, before.step_seconds)

    @pytest.mark.parametrize("count", [0, 1, 2, 3])
    def test_it_is_calibrated_on_few_rows_or_none(self, predictor: Predictor, rows: list[TableRow], count: int) -> None:
        usable = self._usable(predictor, rows)
        said = predictor.calibrated(usable[:count]).forecast(usable)
        assert np.isfinite(said.step_seconds).all()
        assert np.isfinite(said.memory_bytes).all()

    def test_calibration_reads_what_was_measured(self, predictor: Predictor, rows: list[TableRow]) -> None:
        """Twice the throughput in what is fitted on is less time in what is predicted."""
        usable = [each for each in self._usable(predictor, rows) if each.tokens_per_s_per_gpu]
        quick = [replace(each, tokens_per_s_per_gpu=2 * (each.tokens_per_s_per_gpu or 0)) for each in usable]
        slow, fast = predictor.calibrated(usable).forecast(usable), predictor.calibrated(quick).forecast(usable)
        assert np.median(fast.step_seconds / slow.step_seconds) < 0.9

    def _usable(self, predictor: Predictor, rows: list[TableRow]) -> list[TableRow]:
        return [each for each, why in zip(rows, predictor.refusals(rows), strict=True) if why is None]
