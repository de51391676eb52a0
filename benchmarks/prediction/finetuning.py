"""Peak memory, out-of-memory verdicts and step times of fine-tuning, predicted from tables that others published.

    python -m benchmarks.prediction.finetuning TABLE [TABLE ...] [--once TABLE] [--markdown docs/results/finetuning.md]

A TABLE has the columns of a table of measurements. Nothing is fitted to it. The rows of `--once` were described before any of
them was predicted, and not again.
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
Written by `python -m benchmarks.prediction.finetuning TABLE ... --once TABLE --several-cards TABLE --markdown FILE`:
fine-tuning with Transformers, PEFT, TRL, bitsandbytes, GPTQ, FSDP and DeepSpeed as others measured it, predicted by the
[equations of Transformers](../prediction-model.md#transformers). No coefficient is fitted to these rows, but the factor on what
the allocator keeps if lengths vary, and the share of a device that is usable. Memory is what the source reads: bytes
allocated, reserved, or used on the device. Sources: the benchmarks of foundation-model-stack/fms-acceleration (Apache-2.0), the
READMEs of QwenLM/Qwen and Qwen-VL, the benchmarks of modelscope/ms-swift (Apache-2.0) of 2024 and of 2023, the measurements of
fitcheck-llm (MIT), the wiki of LLaMA-Factory, the config hub of LitGPT (Apache-2.0), the README of torchtune (BSD-3-Clause),
the benchmarks of AnswerDotAI/fsdp_qlora (Apache-2.0), PEFT's method comparison (Apache-2.0), and the README of Unsloth
(Apache-2.0: the longest samples of Transformers by card, and 15 % longer ones as out of memory)."""


class Judged(NamedTuple):
    """A row with its prediction."""

    row: TableRow
    memory: float
    """Bytes, as the row reads them."""
    fit_probability: float
    """That the row fits."""
    seconds: float
    seconds_low: float
    seconds_high: float

    @property
    def memory_error(self) -> float:
        """Relative error; NaN: the row has no memory."""
        return self.memory / (peak_bytes(self.row) or np.nan) - 1

    @property
    def time_error(self) -> float:
        """Relative error; NaN: the row has no time."""
        return self.seconds / (step_seconds(self.row) or np.nan) - 1

    @property
    def fits(self) -> bool:
        """Whether the row is predicted to fit."""
        return self.fit_probability >= 0.5

    @property
    def in_band(self) -> bool | None:
        """Whether the time is within its band; None: the row has no time."""
        seconds = step_seconds(self.row)
        return None if seconds is None else self.seconds_low <= seconds <= self.seconds_high

    @property
    def surely_wrong(self) -> bool:
        """Whether the verdict is wrong, with a probability over 0.95."""
        return self.wrong and abs(self.fit_probability - 0.5) > 0.45

    @property
    def wrong(self) -> bool:
        """Whether the verdict is wrong."""
        return self.fits == (self.row.outcome is RowOutcome.OOM)


def judged(paths: Iterable[Path]) -> list[Judged]:
    """The rows that ran or ran out of memory, with their predictions."""
    rows = [row for path in paths for row in read_table(path).rows]
    rows = [row for row in rows if row.outcome in (RowOutcome.OK, RowOutcome.OOM) and refusal(row) is None]
    forecast = TablePredictor().forecast(rows)
    columns = (
        forecast.memory_bytes, forecast.fit_probability,
        forecast.step_seconds, forecast.step_seconds_low, forecast.step_seconds_high,
    )  # fmt: skip
    return [Judged(row, *map(float, values)) for row, *values in zip(rows, *columns, strict=True)]


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
    "card": lambda row: (row.gpu_type or "").split("-")[0],
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
    """Rows; median, 95th percentile and worst of memory; wrong verdicts; median of time; share of times within their bands."""
    memory, times = [run.memory_error for run in runs], [run.time_error for run in runs]
    wrong = f"{sum(run.wrong for run in runs)} of {len(runs)}"
    timed = [run.in_band for run in runs if run.in_band is not None]
    within = f"{100 * np.mean(timed):.0f} %" if timed else "–"
    return f"{len(runs)}", *(_percent(memory, share) for share in (0.5, 0.95, 1.0)), wrong, _percent(times, 0.5), within


def page(runs: Sequence[Judged]) -> list[str]:
    """The figures, by class and by row."""
    headings = ("", "rows", "memory, median", "95th percentile", "worst", "wrong verdicts", "time, median", "in its band")
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
    verdicts = (
        f"Wrong verdicts: {alarms} false alarms, {sum(run.wrong and run.fits for run in runs)} misses; "
        f"{sum(run.surely_wrong for run in runs)} of them with a probability over 0.95."
    )
    return [
        "# Predictions against published fine-tuning", "",
        *INTRODUCTION.splitlines(), "",
        verdicts, "",
        *table(headings, lines), "",
        "## The largest errors", "",
        *table(["row", "run", "error"], by_row),
    ]  # fmt: skip


ONCE = """\
## Rows that were described once

The rows above were described with their predictions at hand. Those of the two tables below were described once, before any
prediction of them was seen.

**LitGPT's resource tables** (Apache-2.0; LoRA on one and on several A100), in the words of the rows of its config hub, and the
README of torchao (BSD-3-Clause). These rows are no fresh test any more: at first, those on several cards were predicted 54 %
too low, with two wrong verdicts. The cause was not what a rank loads, as this page said: Fabric gathers a block at a time.
LitGPT puts frozen matrices and adapters into one flat parameter of FSDP1, whose gradients are of all of it, and sums them
whole over micro-batches (torch's own warning in FullyShardedDataParallel; `mixed_units` of the libraries' words).
No figure was fitted."""
SEVERAL_CARDS = """\
**Several cards**: 20 rows of other sources, described after that change and not touched since: the README of torchtune at four
commits of 2024 (BSD-3-Clause), PEFT's documentation of DeepSpeed and FSDP (Apache-2.0), a pull request of llama-cookbook, and a
published recipe of FSDP with QLoRA. **They are far from the targets.** What may explain it, looked at afterwards and not used:
torchtune's rows of 7B have padded samples of unknown lengths, and those of 4090, T4 and A6000 were measured on other cards
whose memory was limited; fp32 and SGD of its first recipes follow from files that state little; PEFT's QLoRA under FSDP is
predicted with norms in fp32 and the inputs of reentrant checkpoints kept twice."""


def page_once(path: Path, text: str) -> list[str]:
    """The figures of the rows that were described once."""
    runs = judged([path])
    groups = {
        "all": runs,
        "one card": [run for run in runs if run.row.num_gpus == 1],
        "several cards": [run for run in runs if (run.row.num_gpus or 1) > 1],
    }
    headings = ("", "rows", "memory, median", "95th percentile", "worst", "wrong verdicts", "time, median", "in its band")
    rows = [(name, *figures(members)) for name, members in groups.items() if members]
    sure = f"{sum(run.surely_wrong for run in runs)} wrong verdicts have a probability over 0.95."
    return ["", *text.splitlines(), "", *table(headings, rows), "", sure]


def main() -> int:
    """Read, predict, print and write."""
    parser = page_parser(__doc__)
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE")
    parser.add_argument("--once", type=Path, metavar="TABLE")
    parser.add_argument("--several-cards", type=Path, metavar="TABLE")
    options = parser.parse_args()
    described = {ONCE: options.once, SEVERAL_CARDS: options.several_cards}
    once = [line for text, path in described.items() if path is not None for line in page_once(path, text)]
    give([*page(judged(options.tables)), *once], options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
