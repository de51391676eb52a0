"""Memory and time of SimuMax's published runs of Megatron-LM on eight B200; nothing of its own calibration is used.

    python -m benchmarks.prediction.simumax PAGE

PAGE is docs/b200/b200_release_v1.2_summary.md of a clone of MooreThreads/SimuMax (Apache-2.0): a run a row, with its
milliseconds and the GiB that its fullest rank allocates.
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np

from autotune.knowledge.row import peak_bytes, step_seconds
from autotune.knowledge.table import CsvRecord, read_records
from benchmarks.common.written_page import table
from benchmarks.prediction.scoring.table_predictor import TablePredictor

LLAMA = {
    "gpu_type": "B200-SXM-180GB", "seq_len": 4096, "micro_batch": 1, "sequence_parallel": "true", "swiglu": "True",
    "normalization": "RMSNorm", "tied_embeddings": "False", "position": "rope", "bias_linear": "False", "kv_channels": 128,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "cross_entropy_fusion": "te", "create_attention_mask": "False",
    "gradient_accumulation_fusion": "True", "attention_backend": "auto", "deterministic": "False", "cublas_workspace": "",
    "vocab": 128256, "mem_kind": "allocated GiB",
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "mla": "True", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_dim": 64, "v_head_dim": 128,
    "num_layers": 4, "kv_channels": "", "heads": 128, "kv_heads": 128, "moe_layer_freq": "([0]*1+[1]*3)",
    "dispatcher": "alltoall", "grouped_gemm": "True", "permute_fusion": "True", "etp": 1, "sequence_parallel": "false",
    "attention_backend": "fused",
}  # fmt: skip
MODELS = {
    "llama3_70b": LLAMA | {"num_layers": 12, "hidden": 8192, "ffn_hidden": 28672, "heads": 64, "kv_heads": 8},
    "llama3_405b": LLAMA | {"num_layers": 4, "hidden": 16384, "ffn_hidden": 53248, "heads": 128, "kv_heads": 16},
    "deepseekv2": DEEPSEEK | {
        "hidden": 5120, "ffn_hidden": 12288, "experts": 160, "topk": 6, "moe_ffn": 1536, "shared_expert": 3072,
        "vocab": 102400,
    },
    "deepseekv3": DEEPSEEK | {
        "hidden": 7168, "ffn_hidden": 18432, "experts": 256, "topk": 8, "moe_ffn": 2048, "shared_expert": 2048,
        "vocab": 129280,
    },
}  # fmt: skip
"""Model of a case's name -> its cells."""
SIZES = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "dp": "dp", "seq": "seq_len"}
"""Size of a case's name -> its column."""


def record(line: int, case: str, milliseconds: str, gib: str) -> CsvRecord:
    """A row of the page as one of a table of measurements; `mbc` are micro-batches of a step."""
    model = next(name for name in MODELS if case.startswith(f"{name}_"))
    sizes = {column: int(size) for name, size in re.findall(r"_(tp|pp|cp|ep|dp|seq)(\d+)", case) for column in [SIZES[name]]}
    count = re.search(r"_mbc(\d+)", case)
    exchanged = {"cp_comm_type": "a2a"} if "cp" in sizes else {}
    cells = MODELS[model] | sizes | exchanged | {
        "source": "SimuMax", "row_id": case, "model_name": "GPT", "num_gpus": 8, "precision": "bf16", "zero_stage": 1,
        "global_batch": int(count[1] if count else 1) * sizes.get("dp", 1), "recompute": "none", "framework": "Megatron-LM",
        "transformer_impl": "transformer_engine", "outcome": "ok", "step_time_s": float(milliseconds) / 1e3,
        "peak_mem_gb": gib,
    }  # fmt: skip
    return CsvRecord(line=line, cells={name: str(cell) for name, cell in cells.items() if cell != ""})


def main() -> int:
    """Predict and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path, metavar="PAGE")
    lines = parser.parse_args().page.read_text("utf-8").splitlines()
    split = [(number, [cell.strip() for cell in line.strip("| ").split("|")]) for number, line in enumerate(lines, 1)]
    runs = [(number, cells) for number, cells in split if cells[0].startswith(tuple(MODELS))]
    rows, problems = read_records([record(number, cells[0], cells[2], cells[5]) for number, cells in runs])
    if problems or not rows:
        print(*problems, "no run was read; give b200_release_v1.2_summary.md", sep="; ", file=sys.stderr)
        return 2
    made = TablePredictor().forecast(rows)
    seconds = made.step_seconds / np.array([step_seconds(row) or np.nan for row in rows]) - 1
    memory = made.memory_bytes / np.array([peak_bytes(row) or np.nan for row in rows]) - 1
    cells = [[row.row_id, f"{time:+.1%}", f"{held:+.2%}"] for row, time, held in zip(rows, seconds, memory, strict=True)]
    print(*table(["run", "time", "memory"], cells), sep="\n")
    for name, errors in (("time", np.abs(seconds)), ("memory", np.abs(memory))):
        print(f"{name} of {len(rows)} runs: {errors.mean():.1%} on average, {errors.max():.1%} at worst")
    return 0


if __name__ == "__main__":
    sys.exit(main())
