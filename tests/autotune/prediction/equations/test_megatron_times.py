"""Terms of Megatron's times: what its host does for stages and losses, and biases of experts."""

import pytest

from autotune.knowledge.row_cases import case_of
from autotune.knowledge.table import CsvRecord, read_records
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import seconds_of

SMALL = {
    "source": "tests", "model_name": "GPT", "num_layers": 8, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 256,
    "gpu_type": "H100-SXM-80GB", "num_gpus": 8, "precision": "bf16", "zero_stage": 1, "micro_batch": 1, "global_batch": 32,
    "framework": "Megatron-LM", "outcome": "ok", "tokens_per_s_per_gpu": 1,
}  # fmt: skip
GPT_OSS = SMALL | {
    "model_name": "gpt-oss-120b", "num_layers": "", "hidden": "", "heads": "", "vocab": "", "seq_len": 4096, "num_gpus": 64,
    "ep": 64, "micro_batch": 4, "global_batch": 256,
}  # fmt: skip


def seconds(cells: dict[str, object], notes: str = "") -> float:
    """Of a step of the row with these cells."""
    stated = {name: str(cell) for name, cell in {**cells, "notes": f"kernel=flash; {notes}"}.items() if cell != ""}
    rows, problems = read_records([CsvRecord(line=2, cells=stated)])
    assert not problems
    return float(seconds_of(case_of(rows[0]), Coefficients())[0])


@pytest.mark.parametrize("stages", [2, 8])
def test_the_host_works_for_every_stage_of_a_pipeline(stages: int) -> None:
    cells = SMALL | {"pp": stages, "tp": 1, "dp": 8 // stages}
    added = seconds(cells) - seconds(cells, "stage_work=0")
    layer = 1.85 * 3 * 6e-4
    passes = 32 / (8 / stages) + stages - 1
    assert added == pytest.approx(0.5 * layer * passes, rel=0.1)
    assert seconds(SMALL) == seconds(SMALL, "stage_work=0")


def test_operators_that_add_biases_of_experts_move_bytes() -> None:
    added = seconds(GPT_OSS, "captured=2") - seconds(GPT_OSS, "captured=2; bias_bytes=0")
    rows = 4 * 4096 * 4
    assert added == pytest.approx(36 * rows * 2880 * 104 / 3.35e12, rel=0.01)
    assert seconds(SMALL) == seconds(SMALL, "bias_bytes=0")
