"""Logs of MLPerf Training as knowledge: what a log states, what its script states, and what is refused."""

import json
from pathlib import Path

import pytest

from autotune.errors import KnowledgeError
from autotune.knowledge.read import read_knowledge, read_log
from autotune.knowledge.row import TableRow, step_seconds
from autotune.knowledge.row_cases import case_of, refusal
from autotune.knowledge.row_names import row_hardware

SYSTEM = {
    "number_of_nodes": "16", "accelerators_per_node": "8", "accelerator_model_name": "NVIDIA H100-SXM5-80GB",
    "framework": "NeMo 25",
    "host_networking": "Storage: 2x NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s",
}  # fmt: skip
SCRIPT = """
source $(dirname ${BASH_SOURCE[0]})/config_common.sh
export MINIBS=32
export TENSOR_MODEL_PARALLEL="${TP:=4}"   # of a layer
export PIPELINE_MODEL_PARALLEL=8
export INTERLEAVED_PIPELINE=2
export CONTEXT_PARALLEL=1
if [[ "${OLD:-}" == "1" ]]; then
    source $(dirname ${BASH_SOURCE[0]})/config_common_old.sh
fi
"""


def event(key: str, value: object, milliseconds: int = 0, **metadata: object) -> str:
    line = {"namespace": "", "time_ms": milliseconds, "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return ":::MLLOG " + json.dumps(line | {"metadata": metadata})


def write(folder: Path, *events: str, benchmark: str = "llama31_405b", script: str = SCRIPT) -> Path:
    """A log with its script, and what the script sources, beside it."""
    lines = [
        ":::SYSJSON " + json.dumps(SYSTEM), event("submission_benchmark", benchmark), event("submission_org", "Somebody"),
        event("global_batch_size", 128), event("max_sequence_length", 8192), *events,
    ]  # fmt: skip
    (folder / "config_common.sh").write_text("export MICRO_BATCH_SIZE=1\nexport FP8=True\n")
    (folder / "config_H100_16x8x32xtp4pp8cp1.sh").write_text(script)
    log = folder / "result_0.txt"
    log.write_text("what a launcher prints\n" + "\n".join(lines) + "\n:::MLLOG {broken\n")
    return log


def read(path: Path) -> TableRow:
    (row,) = read_knowledge(str(path)).rows
    return row


STEPS = [event("tracked_stats", {"train_step_time": seconds}) for seconds in (9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.2, 4.1)]


def test_a_log_and_its_script_are_a_row(tmp_path: Path) -> None:
    row = read(write(tmp_path, *STEPS))
    assert (row.tp, row.pp, row.vpp, row.cp, row.dp, row.micro_batch, row.global_batch) == (4, 8, 2, 1, 4, 1, 128)
    assert (row.num_gpus, row.gpus_per_node, row.precision, row.seq_len, row.num_layers) == (128, 8, "fp8", 8192, 126)
    assert row.inter_bw == "8x ConnectX-7 IB NDR 400Gb/s"
    assert (row.source, row.framework) == ("MLPerf Training, Somebody", "Megatron-Bridge (NeMo 25)")
    assert step_seconds(row) == pytest.approx(4.1)
    assert refusal(row) is None


def test_a_folder_is_all_its_logs(tmp_path: Path) -> None:
    log = write(tmp_path, *STEPS)
    (tmp_path / "result_1.txt").write_text(log.read_text())
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "result_2.txt").write_text(event("submission_benchmark", "resnet"))
    found = read_knowledge(str(tmp_path))
    assert len(found.rows) == 2
    assert found.measurements().measurements
    assert [note for note in found.notes if "result_2.txt" in note and "is of resnet" in note]


def test_a_log_of_a_rack_can_be_learned_from(tmp_path: Path) -> None:
    """Its nodes are part of a link domain of 72 devices, and the rate is of one node."""
    log = write(tmp_path, *STEPS)
    rack = {"accelerator_model_name": "NVIDIA GB300", "number_of_nodes": "32", "accelerators_per_node": "4"}
    log.write_text(":::SYSJSON " + json.dumps(SYSTEM | rack) + log.read_text().partition("}")[2])
    (tmp_path / "config_H100_16x8x32xtp4pp8cp1.sh").rename(tmp_path / "config_GB300_32x4x32xtp4pp8cp1.sh")
    (kept,) = read_knowledge(str(log)).measurements().measurements
    row = kept.measured
    assert isinstance(row, TableRow)
    found = row_hardware(row.gpu_type or "", row.gpus_per_node, 128, None, row.inter_bw)
    assert found is not None
    assert (found.family, found.devices_per_node, found.inter) == ("gb300", 72, 8 * 50e9 / 4 * 72)


def test_rates_and_blocks_are_times_too(tmp_path: Path) -> None:
    rated = read(write(tmp_path, *(event("tracked_stats", {"throughput": rate}) for rate in (30.0, 32.0, 34.0))))
    assert step_seconds(rated) == pytest.approx(4.0)
    tokens = 128 * 8192
    blocks = [event("block_start", None, 1000), event("block_stop", None, 41_000, epoch_count=10 * tokens)]
    assert step_seconds(read(write(tmp_path, *blocks))) == pytest.approx(4.0)


def test_adapters_of_llama_2(tmp_path: Path) -> None:
    row = read(write(tmp_path, *STEPS, benchmark="llama2_70b_lora"))
    assert (row.model_name, row.notes, row.seq_len) == ("Llama 2 70B", "lora r=16", 8192)
    assert refusal(row) is None


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "config_H100_16x8x32xtp4pp8cp1.sh").unlink(), "states no layout"),
        (lambda folder: (folder / "config_common.sh").unlink(), "lacks config_common.sh, which a script sources"),
        (lambda folder: (folder / "config_H200_16x8x32xtp8pp4cp1.sh").write_text(SCRIPT), "may be of config_H100"),
        (lambda folder: write(folder, *STEPS, benchmark="resnet"), "is of resnet"),
        (lambda folder: write(folder), "states no time of a step"),
    ],
)
def test_what_a_log_lacks_is_named(tmp_path: Path, spoil, problem: str) -> None:  # type: ignore[no-untyped-def]
    log = write(tmp_path, *STEPS)
    spoil(tmp_path)
    with pytest.raises(KnowledgeError) as caught:
        read_log(log)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_logs(tmp_path: Path) -> None:
    with pytest.raises(KnowledgeError, match="has no MLPerf log"):
        read_knowledge(str(tmp_path))


@pytest.mark.parametrize(
    ("stated", "captured"), [("FULL_CUDA_GRAPH=1", 2), ("MCORE_CUDA_GRAPH=True", 1), ("FULL_CUDA_GRAPH=0", 0)]
)
def test_graphs_of_a_script(tmp_path: Path, stated: str, captured: int) -> None:
    row = read(write(tmp_path, *STEPS, script=f"{SCRIPT}export {stated}\n"))
    assert float(case_of(row).software.captured[0]) == captured
