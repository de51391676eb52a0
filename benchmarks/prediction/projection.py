"""Pairs of published runs of one layout on few and on many devices: how far projections are (`fitting.residuals.projected`).

    python -m benchmarks.prediction.projection TABLE [--markdown docs/results/projection.md]

TABLE is a table of measurements. A pair has the same source, model, software, layout and micro-batch on other numbers of
devices, at least twice as many; the data degree, and with it the batch or the micro-batches, is what differs.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.knowledge.row import TableRow, step_seconds
from autotune.knowledge.row_cases import refusal
from autotune.knowledge.table import read_table
from autotune.prediction.equations.step import Z90
from autotune.prediction.fitting.residuals import projected
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.prediction.scoring.table_predictor import TablePredictor

SAME = (
    "source", "model_name", "gpu_type", "precision", "kernel", "framework", "seq_len",
    "tp", "pp", "vpp", "cp", "ep", "zero_stage", "recompute", "micro_batch",
)  # fmt: skip
INTRODUCTION = """\
Written by `python -m benchmarks.prediction.projection TABLE --markdown docs/results/projection.md`: published runs of one
layout on some devices and on twice as many or more. The larger run is projected from the smaller: the difference between its
measured and predicted time goes to the parts of its step, and from there to the same parts of the larger. Beside it: the larger
as it is predicted, and times measured / predicted of the smaller. Errors are |log(predicted / measured)|, medians of pairs."""


class Pair(NamedTuple):
    """Errors of the larger run of a pair: logarithms of predicted / measured seconds."""

    source: str
    blind: float
    scaled: float
    projected: float
    deviation: float


def pairs(rows: Sequence[TableRow]) -> list[Pair]:
    """All pairs of the table's rows."""
    sources: dict[str, list[TableRow]] = defaultdict(list)
    for row in rows:
        sources[row.source].append(row)
    found = []
    for source, members in sources.items():
        predicted = TablePredictor().described(members).prediction.parts
        parts = {name: np.broadcast_to(seconds, len(members)) for name, seconds in predicted.items()}
        layouts: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, row in enumerate(members):
            layouts[tuple(getattr(row, name) for name in SAME)].append(index)
        for small, large in (pair for alike in layouts.values() for pair in permutations(alike, 2)):
            if (members[large].num_gpus or 0) >= 2 * (members[small].num_gpus or 1):
                few, many = ({name: float(seconds[at]) for name, seconds in parts.items()} for at in (small, large))
                here, there = (step_seconds(members[at]) or math.nan for at in (small, large))
                seconds, deviation = projected(here, few, many)
                blind, scale = sum(many.values()) / there, here / sum(few.values())
                errors = (math.log(each) for each in (blind, blind * scale, seconds / there))
                found.append(Pair(source, *errors, deviation))
    return found


def page(found: Sequence[Pair]) -> list[str]:
    """Markdown."""
    sources: dict[str, list[Pair]] = defaultdict(list)
    for pair in found:
        sources[pair.source].append(pair)
    cells = []
    for source, own in sources.items():
        errors = [
            f"{np.median(np.abs([getattr(pair, name) for pair in own])):.1%}" for name in ("blind", "scaled", "projected")
        ]
        inside = np.mean([abs(pair.projected) <= Z90 * pair.deviation for pair in own])
        reach = f"{Z90 * np.median([pair.deviation for pair in own]):.1%}"
        cells.append([source, str(len(own)), *errors, reach, f"{inside:.0%}"])
    names = ["source", "pairs", "as predicted", "scaled", "projected", "half of the 90 % band", "inside"]
    return ["# Projections to more devices", "", *INTRODUCTION.splitlines(), "", *table(names, cells), ""]


def main() -> int:
    """Read, project, print and write."""
    parser = page_parser(__doc__)
    parser.add_argument("table", type=Path, metavar="TABLE")
    options = parser.parse_args()
    # Below 200 tokens/s a device, runs of the largest sweep are pathological.
    rows = [
        row
        for row in read_table(options.table).rows
        if refusal(row) is None and step_seconds(row) and (row.tokens_per_s_per_gpu or 200.0) >= 200.0
    ]
    give(page(pairs(rows)), options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
