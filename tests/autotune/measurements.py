"""Small tables of measurements, as tests write them."""

import csv
from pathlib import Path
from typing import Any

from autotune.knowledge.row import COLUMNS

ROW: dict[str, Any] = {
    "source": "lab", "model_name": "small", "num_layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn_hidden": 2048,
    "vocab": 32000, "seq_len": 1024, "gpu_type": "A100-SXM-80GB", "num_gpus": 8, "gpus_per_node": 8, "precision": "bf16",
    "zero_stage": 1, "tp": 1, "pp": 1, "vpp": 1, "dp": 8, "cp": 1, "ep": 1, "sequence_parallel": "false", "recompute": "none",
    "micro_batch": 1, "global_batch": 64, "optimizer": "AdamW", "offload": "none", "framework": "own", "outcome": "ok",
    "oom": "false", "mem_kind": "max allocated GiB", "rank_group": "small-8",
}  # fmt: skip
"""A row that contradicts nothing and has no measurement."""


def row(row_id: str | None, **cells: Any) -> dict[str, Any]:
    """ROW with some cells changed; None: blank."""
    return ROW | {"row_id": row_id} | cells


def write_table(
    path: Path, rows: list[dict[str, Any]], *, without: tuple[str, ...] = (), extra: tuple[str, ...] = (), ends: str = "\n"
) -> Path:
    """Write rows as CSV, without some columns and with others that nobody asked for."""
    columns = [name for name in (*COLUMNS, *extra) if name not in without]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator=ends)
        writer.writeheader()
        writer.writerows(rows)
    return path


def sweep(count: int, **cells: Any) -> list[dict[str, Any]]:
    """Configurations of one group: micro-batches, pipelines and kernels, each with its own throughput and memory."""
    rows = []
    for number in range(count):
        micro_batch, pp = 2 ** (number % 4), 2 ** (number // 4 % 3)
        cell = {
            "micro_batch": micro_batch, "pp": pp, "dp": 8 // pp, "notes": f"kernel=k{number // 12}",
            "tokens_per_s_per_gpu": 1000 + 37 * number + 11 * (number * number % 7), "peak_mem_gb": 10 + 3 * number,
        }  # fmt: skip
        rows.append(row(f"r{number}", **cell) | cells)
    return rows
