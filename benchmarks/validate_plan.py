"""Rank of experts' tuned configurations in the plan of their space: their model, cluster and batch, with a free layout.

    python benchmarks/validate_plan.py [--data ../shared/data]

The space of a row: every legal tensor, pipeline, context and data size, stages a rank and micro-batch on its devices;
recomputation and sharding as memory requires, since the source states neither. Nothing is fitted on the source.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from validate_targets import BRIDGE, Line

from autotune.evaluation.row_cases import refusal
from autotune.evaluation.table_predictor import TablePredictor
from autotune.evaluation.validation.row import Row
from autotune.evaluation.validation.table import read_table

TOP, SHARE = 10, 0.80
TENSOR, CONTEXT, MICRO_BATCH = (1, 2, 4, 8), (1, 2, 4), (1, 2, 4)


def space(row: Row) -> Iterator[Row]:
    """Every layout of the row's model on the row's devices."""
    layers, world = row.num_layers or 1, row.num_gpus or 1
    pipelines = [size for size in range(1, min(layers, world, 64) + 1) if world % size == 0]
    for tp in TENSOR:
        if (row.kv_heads or 1) % tp or tp > (row.gpus_per_node or 8):
            continue
        for pp in pipelines:
            for cp in CONTEXT:
                for micro_batch in MICRO_BATCH:
                    yield from _pipelined(replace(row, tp=tp, pp=pp, cp=cp, micro_batch=micro_batch), layers, world)


def _pipelined(row: Row, layers: int, world: int) -> Iterator[Row]:
    tp, pp, cp, micro_batch = row.tp or 1, row.pp or 1, row.cp or 1, row.micro_batch or 1
    dp, rest = divmod(world, tp * pp * cp)
    if rest or not dp or (row.global_batch or 1) % (dp * micro_batch):
        return
    most = layers // pp if pp > 1 else 1
    for virtual in [stages for stages in range(1, most + 1) if (layers // pp) % stages == 0]:
        yield replace(row, dp=dp, vpp=virtual)


def layout(row: Row) -> tuple[int, ...]:
    """The layout as a key."""
    return (row.tp or 1, row.pp or 1, row.cp or 1, row.micro_batch or 1)


def place(row: Row, predictor: TablePredictor) -> tuple[int, int]:
    """Rank of the expert's layout among the feasible ones, each with its best number of stages a rank; and their number."""
    rows = [each for each in space(row) if refusal(each) is None]
    forecast = predictor.forecast(rows)
    best: dict[tuple[int, ...], float] = {}
    for each, seconds, full in zip(rows, forecast.step_seconds, forecast.out_of_memory, strict=True):
        if not full:
            best[layout(each)] = min(float(seconds), best.get(layout(each), np.inf))
    if layout(row) not in best:
        return len(best) + 1, len(best)
    return 1 + sum(seconds < best[layout(row)] for seconds in best.values()), len(best)


def places(data: Path) -> dict[str, tuple[int, int]]:
    """Row -> rank and number of feasible layouts."""
    rows = [row for row in read_table(data / "measured.csv").rows if refusal(row) is None]
    predictor = TablePredictor().calibrated([row for row in rows if not row.source.startswith(BRIDGE)])
    return {row.row_id: place(row, predictor) for row in rows if row.source.startswith(BRIDGE)}


def lines(data: Path) -> list[Line]:
    """The target."""
    found = places(data)
    inside = sum(where <= TOP for where, _ in found.values())
    return [
        Line(
            target=f"Megatron-Bridge: an expert's choice inside the plan's top {TOP}",
            mode="leave-source-out",
            bound=f"at least {100 * SHARE:.0f} %",
            figure=f"{100 * inside / max(len(found), 1):.0f} %, {inside} of {len(found)}",
            held=inside >= SHARE * len(found),
        )
    ]


def main() -> int:
    """Print each row's rank."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    options = parser.parse_args()
    for row, (where, count) in places(options.data).items():
        print(f"{row:40} {where:4} of {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
