"""How far shipped predictions are from NVIDIA's published runs of models with experts, and where its layouts stand in plans.

    python -m benchmarks.megatron_bridge PAGE [PAGE ...] [--markdown docs/megatron-bridge.md]

PAGE is docs/performance-summary.md, or its archive, of NVIDIA-NeMo/Megatron-Bridge (Apache-2.0). Its tables of pre-training
runs are read, whose models this product knows and whose dense layers alone do not describe them.
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.evaluation.row_cases import refusal
from autotune.evaluation.row_models import named_model
from autotune.evaluation.table_predictor import TablePredictor
from autotune.evaluation.validation.csv_file import Record
from autotune.evaluation.validation.markdown import table
from autotune.evaluation.validation.row import Row
from autotune.evaluation.validation.table import read_records
from autotune.evaluation.validation.truth import step_seconds
from benchmarks.validate_plan import TOP, Place, place
from benchmarks.written_page import give, page_parser

MODELS = {
    "DeepSeekV3": "deepseek-v3", "GPT OSS 120B": "gpt-oss-120b", "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b", "Kimi_K2": "kimi-k2",
}  # fmt: skip
"""The page's name -> a preset."""
SYSTEMS = {
    "DGX-GB300": ("GB300-288GB", "4"), "DGX-GB200": ("GB200-186GB", "4"), "DGX-B300": ("B300-SXM-288GB", "8"),
    "DGX-B200": ("B200-SXM-180GB", "8"), "DGX-H100": ("H100-SXM-80GB", "8"),
}  # fmt: skip
"""The page's name -> device and devices of a node."""
COLUMNS = {"MBS": "micro_batch", "GBS": "global_batch", "Sequence Length": "seq_len", "TP": "tp", "PP": "pp", "CP": "cp", "VP": "vpp", "EP": "ep"}
PRECISIONS = {"BF16": "bf16", "NVFP4": "fp4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run, and what is predicted for it."""

    row: Row
    release: str
    measured: float
    """Seconds of a step."""
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def records(page: Path) -> Iterator[Record]:
    """The runs of a page, as records of a table of measurements."""
    release = task = model = system = ""
    headings: list[str] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.startswith("#"):
            text = line.lstrip("# ")
            release = text.removesuffix(" NeMo Container") if text.endswith("NeMo Container") else release
            task = text if text.endswith("Performance") else task
            model = text.removeprefix("Model: ") if text.startswith("Model: ") else ("" if text.startswith("System") else model)
            system = text.removeprefix("System: ") if text.startswith("System: ") else ("" if text.startswith("Model") else system)
        if not line.startswith("|"):
            headings = []
            continue
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not headings:
            headings = cells
        elif not set(line) <= set("|-: ") and task.startswith("Pre-Training"):
            cell = dict(zip(headings, cells, strict=True))
            name = re.sub(r"\[.*", "", cell.get("Model", model)).strip()
            machine = cell.get("System", system)
            if name in MODELS and machine in SYSTEMS:
                yield Record(line=number, cells=_cells(cell, MODELS[name], machine, f"{page.name}:{number}", release))


def _cells(cell: Mapping[str, str], model: str, machine: str, row_id: str, release: str) -> dict[str, str]:
    device, node = SYSTEMS[machine]
    sizes = {column: re.sub(r"\D", "", cell.get(heading, "")) or "1" for heading, column in COLUMNS.items()}
    tokens = re.sub(r"[^\d.]", "", next(text for heading, text in cell.items() if heading.startswith("Tokens")))
    return {
        "source": "Megatron-Bridge", "row_id": row_id, "model_name": model, "gpu_type": device, "gpus_per_node": node,
        "num_gpus": cell["#-GPUs"], "precision": PRECISIONS.get(cell["Precision"], "fp8"),
        "framework": "Megatron-Bridge/Megatron-Core", "tokens_per_s_per_gpu": tokens,
        "notes": f"release {release}; precision_raw={cell['Precision']}", "outcome": "ok", **sizes,
    }  # fmt: skip


if __name__ == "__main__":
    rows, problems = read_records([record for page in map(Path, sys.argv[1:]) for record in records(page)])
    print(len(rows), problems[:5])
    why=defaultdict(int)
    for r in rows: why[refusal(r)]+=1
    print(dict(why))
    rows=[r for r in rows if refusal(r) is None and step_seconds(r)]
    print(sum(named_model(r) is not None for r in rows))
    f=TablePredictor().forecast(rows)
    for r,s,l,h,m,fp in zip(rows,f.step_seconds,f.step_seconds_low,f.step_seconds_high,f.memory_bytes,f.fit_probability):
        t=step_seconds(r); print(r.model_name, r.gpu_type,r.num_gpus,r.notes[:60], r.tp,r.pp,r.vpp,r.cp,r.ep,r.micro_batch,r.global_batch, f"{t:.3g} {s:.3g} {s/t-1:+.0%} {m/2**30:.0f} {fp:.2f}")
    for name in [*MODELS.values(), ""]:
        e=[abs(s/step_seconds(r)-1) for r,s in zip(rows,f.step_seconds) if name in r.model_name]
        print(name or "all",len(e),np.median(e),np.mean(e),np.max(e))
