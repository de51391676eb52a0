"""Peak memory, out-of-memory verdicts and step times of fine-tuning, predicted from tables that others published.

    python -m benchmarks.prediction.finetuning TABLE [TABLE ...] [--markdown docs/results/finetuning.md]

A TABLE has the columns of a table of measurements. Nothing is fitted to it.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.knowledge.row import RowOutcome, TableRow, peak_bytes, step_seconds
from autotune.knowledge.row_cases import refusal
from autotune.knowledge.table import read_table
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.prediction.scoring.table_predictor import TablePredictor

INTRODUCTION = """\
Written by `python -m benchmarks.prediction.finetuning TABLE ... --markdown docs/results/finetuning.md`: fine-tuning with
Transformers, PEFT, TRL, bitsandbytes, GPTQ, FSDP and DeepSpeed as others measured it, predicted by the
[equations of Transformers](../prediction-model.md#transformers). No coefficient is fitted to these rows, but the factor on what
the allocator keeps if lengths vary, and the share of a device that is usable. Memory is what the source reads: bytes
allocated, reserved, or used on the device. Sources: the benchmarks of foundation-model-stack/fms-acceleration (Apache-2.0), the
README of QwenLM/Qwen, the benchmarks of modelscope/ms-swift (Apache-2.0) of 2024 and of 2023, the measurements of fitcheck-llm
(MIT), and the wiki of LLaMA-Factory."""


class Judged(NamedTuple):
    """A row with its prediction."""

    row: TableRow
    memory: float
    """Bytes, as the row reads them."""
    fits: bool
    """Whether the row is predicted to fit."""
    seconds: float

    @property
    def memory_error(self) -> float:
        """Relative error; NaN: the row has no memory."""
        return self.memory / (peak_bytes(self.row) or np.nan) - 1

    @property
    def time_error(self) -> float:
        """Relative error; NaN: the row has no time."""
        return self.seconds / (step_seconds(self.row) or np.nan) - 1

    @property
    def wrong(self) -> bool:
        """Whether the verdict is wrong."""
        return self.fits == (self.row.outcome is RowOutcome.OOM)


def judged(paths: Iterable[Path]) -> list[Judged]:
    """The rows that ran or ran out of memory, with their predictions."""
    rows = [row for path in paths for row in read_table(path).rows]
    rows = [row for row in rows if row.outcome in (RowOutcome.OK, RowOutcome.OOM) and refusal(row) is None]
    forecast = TablePredictor().forecast(rows)
    columns = (forecast.memory_bytes, forecast.fit_probability, forecast.step_seconds)
    return [
        Judged(row, float(bytes_read), bool(fit >= 0.5), float(seconds))
        for row, bytes_read, fit, seconds in zip(rows, *columns, strict=True)
    ]


def method(row: TableRow) -> str:
    """What is trained, beside what."""
    if "gptq" in (row.precision or "").lower():
        return "LoRA on GPTQ"
    if "nf4" in (row.precision or "").lower():
        return "LoRA on nf4"
    return "LoRA" if re.search(r"\blora\b", row.notes, re.IGNORECASE) else "full"


CLASSES: dict[str, Callable[[TableRow], str]] = {
    "source": lambda row: row.source,
    "method": method,
    "ranks": lambda row: f"{row.num_gpus} GPU",
    "rows": lambda row: "padded, or of varying length" if re.search(r"lengths vary|padded", row.notes) else "full",
    "kernels": lambda row: "fused" if "fused (" in row.notes else "eager",
    "loss": lambda row: "fused with the projection" if "fused linear cross" in row.notes else "of all logits",
    "read": lambda row: (row.mem_kind or "none").split("(")[0].strip(),
}
"""Property -> its value of a row."""


def _percent(errors: Sequence[float], share: float) -> str:
    known = [abs(error) for error in errors if np.isfinite(error)]
    return f"{100 * np.quantile(known, share):.1f} %" if known else "–"


def figures(runs: Sequence[Judged]) -> tuple[str, ...]:
    """Rows; median and 95th percentile of memory; wrong verdicts; median of time."""
    memory, times = [run.memory_error for run in runs], [run.time_error for run in runs]
    wrong = f"{sum(run.wrong for run in runs)} of {len(runs)}"
    return f"{len(runs)}", _percent(memory, 0.5), _percent(memory, 0.95), wrong, _percent(times, 0.5)


def page(runs: Sequence[Judged]) -> list[str]:
    """The figures, by class and by row."""
    headings = ("", "rows", "memory, median", "95th percentile", "wrong verdicts", "time, median")
    lines = [("all", *figures(runs))]
    for name, value in CLASSES.items():
        members: dict[str, list[Judged]] = defaultdict(list)
        for run in runs:
            members[value(run.row)].append(run)
        lines += [(f"{name}: {kind}", *figures(having)) for kind, having in sorted(members.items())]
    alarms = sum(run.wrong and not run.fits for run in runs)
    worst = sorted((run for run in runs if np.isfinite(run.memory_error)), key=lambda run: -abs(run.memory_error))
    by_row = [
        (
            run.row.row_id,
            f"{method(run.row)}, {run.row.model_name}, {run.row.num_gpus} GPU, {run.row.micro_batch} x {run.row.seq_len}",
            f"{100 * run.memory_error:+.1f} %",
        )
        for run in worst[:40]
    ]
    return [
        "# Predictions against published fine-tuning", "",
        *INTRODUCTION.splitlines(), "",
        f"Wrong verdicts: {alarms} false alarms, {sum(run.wrong and run.fits for run in runs)} misses.", "",
        *table(headings, lines), "",
        "## The largest errors", "",
        *table(["row", "run", "error"], by_row),
    ]  # fmt: skip


def main() -> int:
    """Read, predict, print and write."""
    parser = page_parser(__doc__)
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE")
    options = parser.parse_args()
    give(page(judged(options.tables)), options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
