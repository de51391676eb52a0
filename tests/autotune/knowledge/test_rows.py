"""What rows of tables leave out: gated or not, tied or not, which device, how fast its links; what notes may tell."""

from dataclasses import replace

import pytest

from autotune.knowledge.row import RowOutcome, TableRow
from autotune.knowledge.row_cases import case_of, described, refusal, row_software
from autotune.knowledge.row_names import find_device, row_hardware
from benchmarks.prediction.scoring.table_predictor import TablePredictor

ROW = TableRow(
    line=2, row_id="a", source="s", model_name="m", num_layers=32, hidden=4096, heads=32, kv_heads=32, ffn_hidden=11008,
    vocab=32000, seq_len=2048, params_b=6.74, gpu_type="A100-SXM-80GB", num_gpus=16, gpus_per_node=8, precision="bf16",
    zero_stage=1, tp=2, pp=2, dp=4, cp=1, vpp=1, micro_batch=1, global_batch=64, recompute="none", framework="x",
    outcome=RowOutcome.OK,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("A100-SXM-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("V100-SXM2-16GB", "v100-16gb"),
        ("H100-SXM-80GB", "h100"),
        ("H100-SXM-96GB (500W, HBM2e 2.4TB/s)", "h100-96gb"),
        ("GB200-186GB", "gb200"),
        ("H800-SXM-80GB", "h800"),
        ("MI300X-192GB", "mi300x"),
        ("MI325X-256GB", "mi325x"),
        ("MI355X-288GB", "mi355x"),
        ("RTX-4090-24GB", "4090"),
        ("NVIDIA RTX PRO 6000 Blackwell", "rtx-pro-6000"),
        ("Titan RTX", "titan-rtx"),
    ],
)
def test_devices_are_found_by_family_and_memory(name: str, preset: str) -> None:
    found = find_device(name)
    assert found is not None
    assert found[1].name == preset


def test_an_unknown_device_is_refused_in_one_line() -> None:
    assert refusal(replace(ROW, gpu_type="Abacus 9000")) == "device 'Abacus 9000' is not known"
    assert refusal(replace(ROW, heads=None)) == "has no heads"
    assert refusal(replace(ROW, pp=64)) == "32 layers do not fill 64 pipeline stages"
    assert refusal(replace(ROW, recompute="some")) == "recompute 'some' is none of none, selective, full"
    assert refusal(replace(ROW, recompute="selective (per operator)")) is None
    assert refusal(ROW) is None


@pytest.mark.parametrize(
    ("text", "per_node"),
    [
        ("1600 Gb/s per node (RoCE)", 200e9),
        ("8x400 Gb/s NDR IB per node", 400e9),
        ("4 Omni-Path 100 Gb/s links per node", 50e9),
        ("EFA", 400e9),
        (None, 50e9),
    ],
)
def test_links_are_read_from_words(text: str | None, per_node: float) -> None:
    found = row_hardware("A100-SXM-80GB", 8, 64, "NVLink3", text)
    assert found is not None
    assert found.inter == pytest.approx(per_node)


def test_a_rack_is_one_node() -> None:
    found = row_hardware("GB200-186GB", 4, 256, "NVLink5 NVL72", None)
    assert found is not None
    assert found.devices_per_node == 72


@pytest.mark.parametrize(
    ("ffn", "params", "matrices", "tied"), [(11008, 6.74, 3, 0), (16384, 6.65, 2, 0), (16384, 8.66, 3, 1), (None, 6.65, 2, 0)]
)
def test_the_parameter_count_tells_gated_and_tied(ffn: int | None, params: float, matrices: int, tied: int) -> None:
    shapes = case_of(replace(ROW, ffn_hidden=ffn, params_b=params)).shapes
    assert float(shapes.matrices[0]) == matrices
    assert tied == 0 or float(shapes.tied[0]) == tied


def test_notes_of_how_a_run_ended_change_nothing() -> None:
    """A table that notes a run's speed notes it for runs that ran alone."""
    told = replace(ROW, notes="kernel=torch; TFLOPs_megatron=123; raw_status=OOM Error; samples/s recomputed")
    assert described(told) == described(replace(ROW, notes="kernel=torch"))
    assert row_software(described(told)).scores[0] > 0


def test_adapters_freeze_the_rest() -> None:
    tuned = case_of(replace(ROW, notes="method=LoRA; trainable=4,194,304", precision="bf16-true+bnb.nf4"))
    assert float(tuned.shapes.adapter[0]) == 4_194_304 / 32
    assert 0.5 < float(tuned.shapes.frozen_bytes[0]) < 0.6


def test_software_that_adapts_recomputes_where_memory_asks_for_it() -> None:
    predictor = TablePredictor().calibrated([])
    wide = replace(
        ROW, framework="Megatron-Bridge", recompute=None, zero_stage=None, tp=1, pp=1, dp=16, micro_batch=4, seq_len=8192
    )
    fixed = replace(wide, recompute="none")
    said = predictor.forecast([wide, fixed])
    assert list(said.out_of_memory) == [False, True]
    assert said.step_seconds[0] > said.step_seconds[1]
