"""Rank of experts' tuned configurations in the plan of their space: their model, cluster and batch, with a free layout.

    python -m benchmarks.prediction.validate_plan [--data ../shared/data]

The space of a row: every legal tensor, pipeline, context, expert and data size, stages a rank and micro-batch on its devices;
recomputation and sharding as memory requires, since the source states neither. Nothing is fitted on the source.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from autotune.knowledge.row import TableRow
from autotune.knowledge.row_cases import refusal
from autotune.knowledge.row_names import completed, named_model
from autotune.knowledge.table import read_table
from benchmarks.common.written_page import table
from benchmarks.prediction.scoring.table_predictor import Described, TablePredictor
from benchmarks.prediction.validate_targets import BRIDGE, Line

TOP, SHARE = 10, 0.80
TENSOR, CONTEXT, MICRO_BATCH, EXPERT = (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64)


def space(row: TableRow) -> Iterator[TableRow]:
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


def _pipelined(row: TableRow, layers: int, world: int) -> Iterator[TableRow]:
    tp, pp, cp, micro_batch = row.tp or 1, row.pp or 1, row.cp or 1, row.micro_batch or 1
    dp, rest = divmod(world, tp * pp * cp)
    if rest or not dp or (row.global_batch or 1) % (dp * micro_batch):
        return
    most, model = layers // pp if pp > 1 else 1, named_model(row)
    experts = model.num_experts if model else 0
    divisors = [size for size in EXPERT if experts and experts % size == 0 and (dp * cp * tp) % size == 0] or [1]
    for virtual in [stages for stages in range(1, most + 1) if (layers // pp) % stages == 0]:
        for ep in divisors:
            yield replace(row, dp=dp, vpp=virtual, ep=ep)


def layout(row: TableRow) -> tuple[int, ...]:
    """The layout as a key."""
    return (row.tp or 1, row.pp or 1, row.cp or 1, row.ep or 1, row.micro_batch or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an expert's layout stands among the feasible ones, each with its best number of stages a rank."""

    row: TableRow
    rank: int
    """One more than their number: it is predicted not to fit."""
    feasible: int
    first: tuple[int, ...]
    """The layout predicted to be the fastest."""
    cause: str
    """Why it is not among the first `TOP`; empty: it is."""


def place(row: TableRow, predictor: TablePredictor) -> Place:
    """The place of a row's layout. What the row states of recomputation is of its layout: every layout has what memory
    requires."""
    row = replace(completed(row), recompute=None)
    rows = [each for each in space(row) if refusal(each) is None]
    forecast = predictor.forecast(rows)
    best: dict[tuple[int, ...], tuple[float, TableRow]] = {}
    for each, seconds, full in zip(rows, forecast.step_seconds, forecast.out_of_memory, strict=True):
        if not full and float(seconds) < best.get(layout(each), (np.inf, each))[0]:
            best[layout(each)] = float(seconds), each
    ordered = sorted(best.values(), key=lambda item: item[0])
    own = best.get(layout(row))
    rank = len(best) + 1 if own is None else 1 + sum(seconds < own[0] for seconds, _ in ordered)
    cause = "" if rank <= TOP else _too_full(row, predictor) if own is None else _slower(own[1], ordered[TOP - 1][1], predictor)
    return Place(row=row, rank=rank, feasible=len(best), first=layout(ordered[0][1]) if ordered else (), cause=cause)


def _too_full(row: TableRow, predictor: TablePredictor) -> str:
    found = predictor.described([row])
    needed, usable = (float(np.max(values)) / 2**30 for values in (found.fullest.needed, found.fullest.usable(found.cases)))
    return f"predicted to need {needed:.0f} of {usable:.0f} GiB with full recomputation"


def _slower(row: TableRow, tenth: TableRow, predictor: TablePredictor) -> str:
    """By how much, and the part of a step that adds the most."""
    found = predictor.described([row, tenth])
    own, other = _parts(found)
    name, more = max(((name, own[name] - other[name]) for name in own), key=lambda item: item[1])
    whole, least = sum(own.values()), sum(other.values())
    return f"{100 * (whole / least - 1):.0f} % slower than the {TOP}th; {name} adds {100 * more / least:.0f} %"


def _parts(found: Described) -> list[dict[str, float]]:
    parts = {name: np.broadcast_to(values, 2) for name, values in found.prediction.parts.items()}
    return [{name: float(values[place]) for name, values in parts.items()} for place in range(2)]


@cache
def places(data: Path) -> tuple[Place, ...]:
    """The place of every row of the source."""
    rows = [row for row in read_table(data / "measured.csv").rows if refusal(row) is None]
    predictor = TablePredictor().calibrated([row for row in rows if not row.source.startswith(BRIDGE)])
    return tuple(place(row, predictor) for row in rows if row.source.startswith(BRIDGE))


def section(data: Path) -> list[str]:
    """A section of the page: the share by model, and the rows that are missed with the cause."""
    found = places(data)
    models: dict[str, list[Place]] = {}
    for each in found:
        models.setdefault(each.row.model_name or "", []).append(each)
    shares = [
        [name, str(sum(each.rank <= TOP for each in own)), str(len(own)), str(int(np.median([each.rank for each in own])))]
        for name, own in models.items()
    ]
    missed = [_cells(each) for each in found if each.rank > TOP]
    return [
        f"## Experts' choices in the plan's top {TOP}",
        "",
        "Layouts published by NVIDIA (Megatron-Bridge), among all feasible layouts of their model on their devices.",
        "",
        *table(["model", f"in the top {TOP}", "rows", "median rank"], shares),
        "",
        "The rows that are not. The predicted best: tensor, pipeline, context and expert size, and micro-batch.",
        "",
        *table(["row", "rank", "feasible", "predicted best", "cause"], missed),
        "",
    ]


def _cells(each: Place) -> Sequence[str]:
    best = " ".join(map(str, each.first))
    return [each.row.row_id, str(each.rank), str(each.feasible), best, each.cause]


def lines(data: Path) -> list[Line]:
    """The target."""
    found = places(data)
    inside = sum(each.rank <= TOP for each in found)
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
    """Print the share, and the misses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    options = parser.parse_args()
    print("\n".join([*(line.figure for line in lines(options.data)), "", *section(options.data)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
