"""The analytic model keeps the contract of predictors, and what it is calibrated on changes what it says."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "validation"))

from autotune.knowledge.row import RowOutcome, TableRow
from autotune.knowledge.row_cases import cases_of_rows, described, numbers_of, refusal, row_software
from autotune.knowledge.table import read_table
from autotune.prediction.equations.coefficients import shipped_rates
from autotune.prediction.equations.step import predict
from benchmarks.prediction.scoring.contract import Predictor
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from tests.benchmarks.prediction.predictor_case import PredictorCase

DATA = Path(os.environ.get("AUTOTUNE_DATA", Path(__file__).parents[4] / "shared" / "data"))


class TestTablePredictor(PredictorCase):
    """As shipped."""

    proves = ("test_calibration_reads_what_was_measured", "test_it_is_calibrated_on_few_rows_or_none")

    @pytest.fixture
    def predictor(self) -> Predictor:
        return TablePredictor()


def rows(slower: float) -> list[TableRow]:
    """A sweep whose steps take `slower` times what the priors predict."""
    made = [
        TableRow(
            line=number, row_id=str(number), source="s", num_layers=32, hidden=4096, heads=32, kv_heads=32, ffn_hidden=11008,
            vocab=32000, seq_len=2048, params_b=6.74, gpu_type="A100-SXM-80GB", num_gpus=64, gpus_per_node=8, precision="bf16",
            zero_stage=1, tp=tp, pp=1, dp=64 // tp, cp=1, vpp=1, micro_batch=size, global_batch=512, recompute="full",
            framework="x", outcome=RowOutcome.OK,
        )
        for number, (tp, size) in enumerate((tp, size) for tp in (1, 2, 4, 8) for size in (1, 2, 4, 8))
    ]  # fmt: skip
    predicted = TablePredictor().calibrated([]).forecast(made).step_seconds
    return [replace(row, step_time_s=float(slower * seconds)) for row, seconds in zip(made, predicted, strict=True)]


@pytest.mark.prove
@pytest.mark.parametrize("known", [3, 12])
def test_a_slower_cluster_is_learned_from_its_rows(known: int) -> None:
    table = rows(1.6)
    seen, unseen = table[:known], table[known:]
    truth = np.array([row.step_time_s for row in unseen])
    before = TablePredictor().calibrated([]).forecast(unseen).step_seconds
    after = TablePredictor().calibrated(seen).forecast(unseen).step_seconds
    assert np.median(np.abs(after / truth - 1)) < 0.4 * np.median(np.abs(before / truth - 1))


@pytest.mark.prove
def test_another_source_is_told_less_than_ones_own() -> None:
    table = rows(1.6)
    others = [replace(row, source="other") for row in table]
    truth = np.array([row.step_time_s for row in table])
    from_own = TablePredictor().calibrated(table).forecast(table).step_seconds
    from_other = TablePredictor().calibrated(others).forecast(table).step_seconds
    assert np.median(np.abs(from_own / truth - 1)) < np.median(np.abs(from_other / truth - 1))


def test_software_that_reduces_at_the_end_of_a_step_hides_no_reduction_of_sharded_gradients() -> None:
    """Only at stages 1 and 2: an all-reduce of stage 0 runs beside backward. More backward per step hides no more of it."""
    one = replace(rows(1.0)[0], inter_bw="1600 Gb/s per node")
    sharded, whole, longer = one, replace(one, zero_stage=0), replace(one, global_batch=4 * 512)

    def communication(row: TableRow, *, at_the_end: bool) -> float:
        cases = cases_of_rows([row])
        software = replace(cases.software, reduces_last=np.array([float(at_the_end)]))
        return float(predict(replace(cases, software=software), shipped_rates()).parts["data"][0])

    assert communication(whole, at_the_end=True) == communication(whole, at_the_end=False)
    assert communication(sharded, at_the_end=True) > 1.5 * communication(sharded, at_the_end=False)
    assert communication(longer, at_the_end=True) == communication(sharded, at_the_end=True)


def test_messages_of_single_matrices_cost_sharded_gradients_more_the_larger_the_run() -> None:
    """Stage 0 sends buckets in any case. Per message, a group with a part of the network pays as much as one with all."""

    def more(row: TableRow) -> float:
        cases = cases_of_rows([row])
        single = replace(cases, software=replace(cases.software, sends_matrices=np.ones(1)))
        return float((predict(single, shipped_rates()).parts["data"] - predict(cases, shipped_rates()).parts["data"])[0])

    one = rows(1.0)[0]
    larger = replace(one, num_gpus=512, dp=512, global_batch=8 * 512)
    assert more(replace(one, zero_stage=0)) == 0
    assert 0 < more(one) < more(larger)
    assert more(replace(one, tp=4, dp=16)) == pytest.approx(more(one), rel=0.5)


def test_software_that_waits_for_messages_between_stages_does_so_in_every_micro_batch() -> None:
    def wait(row: TableRow) -> float:
        cases = cases_of_rows([row])
        blocks = replace(cases, software=replace(cases.software, sends_shapes=np.ones(1)))
        return float((predict(blocks, shipped_rates()).seconds - predict(cases, shipped_rates()).seconds)[0])

    one = rows(1.0)[0]
    piped = replace(one, pp=4, dp=16)
    assert wait(one) == 0
    assert wait(replace(piped, micro_batch=2)) == pytest.approx(wait(piped) / 2)
    assert wait(replace(piped, num_gpus=128, dp=32, global_batch=1024)) == pytest.approx(4 * wait(piped))


@pytest.mark.prove
def test_disturbed_runs_are_not_fitted() -> None:
    """Below one per cent of the peak, a time says nothing about the terms of a step."""
    table = rows(1.2)
    disturbed = [replace(row, source="s", step_time_s=(row.step_time_s or 0.0) * 90) for row in table]
    one, both = (TablePredictor().calibrated(known).described(table).rates for known in (table, [*table, *disturbed]))
    assert one == both


def test_shipped_coefficients_say_what_they_have_seen() -> None:
    table = rows(1.0)
    assert TablePredictor().in_sample(table) == 0
    assert TablePredictor().in_sample([replace(table[0], source="torchtitan benchmarks")]) == 1
    assert TablePredictor().calibrated(table).in_sample([replace(table[0], source="torchtitan benchmarks")]) == 0


@pytest.mark.prove
def test_software_is_its_features_whatever_its_name() -> None:
    """Published rows whose features are stated, with the framework's name removed or replaced by another."""
    if not (DATA / "measured.csv").exists():
        pytest.skip(f"no measurements in {DATA}")
    published = [row for row in read_table(DATA / "measured.csv").rows if refusal(row) is None][::5]
    assert len({row.framework for row in published}) >= 9
    before = TablePredictor().forecast(published)
    for name in (None, "of our own", "torchtitan", "nanotron"):
        renamed = [replace(row, framework=name, notes=f"{row.notes}; {_features(row)}") for row in published]
        after = TablePredictor().forecast(renamed)
        np.testing.assert_allclose(after.step_seconds, before.step_seconds, rtol=1e-9)
        np.testing.assert_allclose(after.memory_bytes, before.memory_bytes, rtol=1e-9)
    unstated = TablePredictor().forecast([replace(row, framework=None) for row in published]).step_seconds
    assert np.max(np.abs(np.log(unstated / before.step_seconds))) > 0.1, "names are defaults of features"


def _features(row: TableRow) -> str:
    return "; ".join(f"{name}={value:.10g}" for name, value in numbers_of(row_software(described(row))).items())


def test_selenes_iteration_times_follow_one_curve() -> None:
    if not (DATA / "selene_iteration_times.csv").exists():
        pytest.skip(f"no measurements in {DATA}")
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    try:
        from benchmarks.prediction.validate_selene import errors
    finally:
        sys.path.pop(0)
    sizes = np.abs(list(errors(DATA).values()))
    assert sizes.mean() <= 0.035
    assert sizes.max() <= 0.08


@pytest.mark.prove
def test_every_published_row_is_refused_or_predicted() -> None:
    if not (DATA / "measured.csv").exists():
        pytest.skip(f"no measurements in {DATA}")
    table = read_table(DATA / "measured.csv").rows
    predictor = TablePredictor()
    usable = [row for row, why in zip(table, predictor.refusals(table), strict=True) if why is None]
    said = predictor.forecast(usable)
    assert len(usable) > 0.95 * len(table)
    assert np.all(np.isfinite(said.step_seconds) & (said.step_seconds > 0))
    assert np.all(np.isfinite(said.memory_bytes) & (said.memory_bytes > 0))
