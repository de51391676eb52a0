"""How far shipped predictions are from NVIDIA's published runs of models with experts, and where its layouts stand in plans.

    python -m benchmarks.prediction.megatron_bridge PAGE [PAGE ...] [--markdown docs/results/megatron-bridge.md]

PAGE is docs/performance-summary.md, or its archive, of NVIDIA-NeMo/Megatron-Bridge (Apache-2.0). Its tables of pre-training
runs are read, whose models this product knows and whose dense layers alone do not describe them.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from autotune.knowledge.row import TableRow, step_seconds
from autotune.knowledge.row_cases import refusal
from autotune.knowledge.table import CsvRecord, read_records
from autotune.prediction.equations.software import EXCHANGE_HIDDEN
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.prediction.predicted_runs import PredictedRun, summary, table_of_models
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.prediction.validate_plan import TOP, Place, place

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
COLUMNS = {
    "MBS": "micro_batch", "GBS": "global_batch", "Sequence Length": "seq_len",
    "TP": "tp", "PP": "pp", "CP": "cp", "VP": "vpp", "EP": "ep",
}  # fmt: skip
PRECISIONS = {"BF16": "bf16", "NVFP4": "fp4"}
ROUTER, LAYERS, ITERATION = "expert_work=0", "captured=1", "captured=2; pads_experts=0; bias_bytes=0"
RECOMPUTED = "keeps_products=1"
EACH, HIDDEN = "once_per_domain=0", f"exchange_hidden={EXCHANGE_HIDDEN}"
RECIPES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("(deepseek-v3|qwen3-.*|gpt-oss-120b) GB.* MXFP8 26.0[68].*", (ITERATION, HIDDEN)),
    ("qwen3-30b-a3b B300.* MXFP8 26.06.*", (ITERATION, HIDDEN)),
    ("deepseek-v3 B300.* MXFP8 26.06.*", (LAYERS,)),
    ("deepseek-v3 B300.* 26.04.01", (LAYERS,)),
    ("deepseek-v3 B200.* 26.04.01", (LAYERS, HIDDEN)),
    ("deepseek-v3 GB200.*", (LAYERS,)),
    ("qwen3-235b-a22b GB300.* BF16 25.11", (ROUTER,)),
    ("qwen3-235b-a22b GB.*", (LAYERS,)),
    ("qwen3-235b-a22b B300.* 26.02.*", (EACH, HIDDEN)),
    ("qwen3-235b-a22b B300.* 26.04", (EACH,)),
    ("qwen3-235b-a22b B200.* 25.11", (EACH, HIDDEN)),
    ("qwen3-235b-a22b B200.*", (EACH,)),
    ("qwen3-235b-a22b H100.*", (EACH, HIDDEN)),
    ("qwen3-30b-a3b B200.* 26.04.*", (LAYERS,)),
    ("qwen3-30b-a3b H100.* (25.11|26.02)", (EACH, HIDDEN)),
    ("qwen3-30b-a3b H100.* FP8.*", ()),
    ("qwen3-30b-a3b .*", (ROUTER,)),
    ("gpt-oss-120b B300.* 26.0(4.01|6)", (LAYERS,)),
    ("gpt-oss-120b (GB300|B300).*", (EACH, LAYERS)),
    ("gpt-oss-120b .*", (EACH, RECOMPUTED)),
)
"""Model, device, precision and release -> what its recipe sets of `Software`, the first that matches: scripts/performance and
perf_recipes of the repository at each release. Recipes without an entry dispatch by DeepEP or HybridEP, without graphs."""


def records(page: Path) -> Iterator[CsvRecord]:
    """The runs of a page, as records of a table of measurements."""
    release = task = model = system = ""
    headings: list[str] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.startswith("#"):
            text = line.lstrip("# ")
            release = text.removesuffix(" NeMo Container") if text.endswith("NeMo Container") else release
            task = text if text.endswith("Performance") else task
            kind, _, name = text.partition(": ")
            if kind in ("Model", "System"):
                model, system = (name, "") if kind == "Model" else ("", name)
        if not line.startswith("|"):
            headings = []
            continue
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not headings:
            headings = cells
        elif not set(line) <= set("|-: ") and task.startswith("Pre-Training"):
            cell = dict(zip(headings, cells, strict=True))
            trained, machine = re.sub(r"\[.*", "", cell.get("Model", model)).strip(), cell.get("System", system)
            if trained in MODELS and machine in SYSTEMS:
                yield CsvRecord(line=number, cells=_cells(cell, MODELS[trained], machine, f"{page.name}:{number}", release))


def _cells(cell: Mapping[str, str], model: str, machine: str, row_id: str, release: str) -> dict[str, str]:
    device, node = SYSTEMS[machine]
    sizes = {column: re.sub(r"\D", "", cell.get(heading, "")) or "1" for heading, column in COLUMNS.items()}
    recipe = f"{model} {device} {cell['Precision']} {release}"
    features = next((features for pattern, features in RECIPES if re.fullmatch(pattern, recipe)), ())
    tokens = re.sub(r"[^\d.]", "", next(text for heading, text in cell.items() if heading.startswith("Tokens")))
    return {
        "source": "Megatron-Bridge", "row_id": row_id, "model_name": model, "gpu_type": device, "gpus_per_node": node,
        "num_gpus": cell["#-GPUs"], "precision": PRECISIONS.get(cell["Precision"], "fp8"),
        "framework": "Megatron-Bridge/Megatron-Core", "tokens_per_s_per_gpu": tokens,
        "notes": "; ".join([f"release {release}", f"precision_raw={cell['Precision']}", *features]), "outcome": "ok",
        "zero_stage": "1", "recompute": "selective" if RECOMPUTED in features else "none", **sizes,
    }  # fmt: skip


PAGE = """# Predictions against Megatron-Bridge's models with experts

Written by `python -m benchmarks.prediction.megatron_bridge PAGE ... --markdown docs/results/megatron-bridge.md`: pre-training
runs that NVIDIA published (NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and its archive, Apache-2.0), of models
with experts. No coefficient was fitted to them. After a first look (median error 22 %, most predictions too fast), two parts of
a layer with experts were added to the equations: what its kernels cost the host, as [counted on our engine](kernel-counts.md),
and the bytes that routing moves. After a second look (20 %) each run got what its recipe sets (`RECIPES` of the program): the
dispatcher, whether its exchange is hidden, CUDA graphs and recomputation. The host's work is that of Megatron-LM's functional
tests, what overlap hides that of one published pair of runs. gpt-oss-120b takes longer than the equations say (27 % before
what its biases of experts and its narrow heads take was counted); its attention's sinks are not in them. Recomputation is that
of a layout: in plans every layout has what memory requires.

{summary}

{models}

Releases differ: the same layout on the same devices is up to {spread:.1f} times as fast in one as in another, which no
prediction from the layout can follow.

## NVIDIA's layouts in the plan's top {top}

Among all feasible layouts of the model on its devices, each published one once: {inside} of {layouts} are in the top {top}.

{places}

## Each run

{rows}
"""


def main() -> int:
    """Read, predict, print and write."""
    parser = page_parser(__doc__)
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE")
    options = parser.parse_args()
    rows, problems = read_records([record for path in options.pages for record in records(path)])
    rows = [row for row in rows if refusal(row) is None and step_seconds(row) is not None]
    if problems or not rows:
        print(*problems, "no run of a model with experts was read; give docs/performance-summary.md", sep="; ", file=sys.stderr)
        return 2
    predictor = TablePredictor()
    found = runs(rows, predictor)
    give(page(found, [place(row, predictor) for row in _different(rows)]).splitlines(), options.markdown)
    return 0


def runs(rows: Sequence[TableRow], predictor: TablePredictor) -> list[PredictedRun]:
    """The rows with their predictions."""
    made = predictor.forecast(rows)
    seconds = zip(made.step_seconds, made.step_seconds_low, made.step_seconds_high, strict=True)
    return [
        PredictedRun(row=row, measured=step_seconds(row) or np.nan, predicted=float(mean), low=float(low), high=float(high))
        for row, (mean, low, high) in zip(rows, seconds, strict=True)
    ]


def _layout(row: TableRow) -> tuple[object, ...]:
    sizes = (row.tp, row.pp, row.vpp, row.cp, row.ep, row.micro_batch, row.global_batch, row.seq_len)
    return (row.model_name, row.gpu_type, row.num_gpus, row.precision, *sizes)


def _different(rows: Sequence[TableRow]) -> list[TableRow]:
    """One row of each layout of a model on its devices."""
    return [*{_layout(row): row for row in reversed(rows)}.values()][::-1]


def page(found: Sequence[PredictedRun], places: Sequence[Place]) -> str:
    """Markdown."""
    layouts = defaultdict(list)
    for run in found:
        layouts[_layout(run.row)].append(run.measured)
    by_model = defaultdict(list)
    for each in places:
        by_model[str(each.row.model_name)].append(each.rank)
    shares = [
        [name, str(sum(rank <= TOP for rank in ranks)), str(len(ranks)), str(int(np.median(ranks)))]
        for name, ranks in by_model.items()
    ]
    missed = [_missed(each) for each in places if each.rank > TOP]
    named = ["layout", "rank", "feasible", "predicted best: tensor, pipeline, context, expert size, micro-batch", "cause"]
    each_run = ["model", "devices", "layout", "precision", "release", "measured (s)", "predicted (s) [90 %]", "error"]
    return PAGE.format(
        summary=summary(found, "runs"), models=table_of_models(found, "runs"),
        spread=max(max(times) / min(times) for times in layouts.values()), top=TOP,
        inside=sum(each.rank <= TOP for each in places), layouts=len(places),
        places="\n".join([*table(["model", f"in the top {TOP}", "layouts", "median rank"], shares), "", *table(named, missed)]),
        rows="\n".join(table(each_run, map(_line, found))),
    )  # fmt: skip


def _sizes(row: TableRow) -> str:
    names = ("tp", "pp", "vpp", "cp", "ep", "micro_batch")
    return " ".join(f"{name} {size}" for name in names if (size := getattr(row, name) or 1) > 1)


def _missed(each: Place) -> list[str]:
    layout = f"{each.row.model_name}, {each.row.num_gpus} {each.row.gpu_type}, {_sizes(each.row)}"
    return [layout, str(each.rank), str(each.feasible), " ".join(map(str, each.first)), each.cause]


def _line(run: PredictedRun) -> list[str]:
    row = run.row
    release, precision = (text.partition("=")[2] or text.removeprefix("release ") for text in row.notes.split("; ")[:2])
    return [
        str(row.model_name), f"{row.num_gpus} {row.gpu_type}", _sizes(row), precision, release, f"{run.measured:.3g}",
        f"{run.predicted:.3g} [{run.low:.3g}, {run.high:.3g}]", f"{run.error:+.0%}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
