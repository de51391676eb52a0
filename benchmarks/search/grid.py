"""The reference grid of ZeRO's knobs: every configuration of a small space measured on real ranks with a slow network.

    python -m benchmarks.search.grid [--ranks 2 4] [--most N] [--markdown docs/results/reference-grid.md]

About 25 minutes for 2 ranks and 35 for 4, on two idle cores. Every measurement is written at once to
benchmarks/data/reference-grid-RANKS.csv; a restart continues from there. Each rank runs in its own network namespace, which
needs root and Linux; without them, the page is written from the existing files.
"""

import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from autotune.installed import version as product_version
from benchmarks.common.shaped_link import why_not
from benchmarks.common.shaped_network import NetworkRunner, ShapedNetwork
from benchmarks.common.written_page import give, page_parser
from benchmarks.search.grid_design import (
    DOMAINS,
    FIDELITY,
    MODEL,
    RATE_MBIT,
    REFERENCE_EVERY,
    REPEAT_EVERY,
    TOP,
    TOP_ROUNDS,
    WORKLOAD,
    WORLDS,
    Grid,
)  # fmt: skip
from benchmarks.search.grid_figures import best_points
from benchmarks.search.grid_file import DATA, GridFile, Role, Row, grid_path, read_header, read_rows
from benchmarks.search.grid_page import page
from executor.runners.runner import Runner
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig

Planned = tuple[Role, TrialConfig]
SECONDS_EACH = {2: 3.8, 4: 5.0}
"""Ranks -> seconds of a measurement on two idle cores, for the estimate at the start."""


def agenda(grid: Grid) -> list[Planned]:
    """All measurements but the best ten's repeats: the points, the reference at intervals, and some points again."""
    planned: list[Planned] = []
    for place, config in enumerate(grid.points):
        planned += [(Role.REFERENCE, grid.reference)] if place % REFERENCE_EVERY == 0 else []
        planned.append((Role.POINT, config))
    again = grid.points[::REPEAT_EVERY]
    return [*planned, (Role.REFERENCE, grid.reference), *((Role.REPEAT, config) for config in again)]


def remaining(grid: Grid, rows: Sequence[Row]) -> list[Planned]:
    """The missing measurements; the best ten are known once all points are measured."""
    static = agenda(grid)
    if len(rows) < len(static):
        return static[len(rows) :]
    top = best_points(rows[: len(static)], TOP)
    repeats = ([(Role.TOP, config) for config in top] + [(Role.REFERENCE, grid.reference)]) * TOP_ROUNDS
    return repeats[len(rows) - len(static) :]


def measure(grid: Grid, file: GridFile, most: int | None) -> None:
    """Run the missing measurements, at most `most`."""
    spent, todo = 0, remaining(grid, file.rows)
    if not todo:
        return
    with ShapedNetwork(grid.ranks, f"{RATE_MBIT}mbit") as network, NetworkRunner(network) as runner:
        # Warms up the ranks, and gives the reference losses for all others.
        first = runner.run(grid.request("first", grid.reference))
        if first.outcome is not Outcome.OK:
            raise SystemExit(f"the reference ended {first.outcome}: {first.message}\n{first.traceback}")
        while todo and (most is None or spent < most):
            role, config = todo[0]
            began = time.monotonic()
            file.add(_measured(grid, runner, first.losses, len(file.rows), role, config))
            spent += 1
            left = len(todo) - 1 if len(todo) > 1 else len(remaining(grid, file.rows))
            _print_row(file.rows[-1], grid, left, time.monotonic() - began)
            todo = remaining(grid, file.rows)


def _measured(grid: Grid, runner: Runner, losses: tuple[float, ...], order: int, role: Role, config: TrialConfig) -> Row:
    began = time.monotonic()
    result = runner.run(grid.request(f"{order}", config, losses=losses))
    return Row.of(order, role, config, result, time.monotonic() - began)


def _print_row(row: Row, grid: Grid, left: int, seconds: float) -> None:
    changes = row.config.differences(grid.reference)
    text = " ".join(f"{name}={value}" for name, value in changes.items()) or "the reference"
    rate = f"{row.rate:.1f} samples/s ({row.low:.1f}-{row.high:.1f})" if row.rate else row.outcome.value
    print(f"{row.order:4} {row.role:9} {rate}, {seconds:.1f} s, {left} left: {text}", flush=True)


def header(grid: Grid) -> dict[str, str]:
    """The header of the file; it names no machine. Stored and compared: a changed text makes existing files invalid."""
    work = WORKLOAD
    return {
        "model": f"{MODEL}, {grid.model.parameter_count:,} parameters, fp32",
        "workload": f"global batch {work.global_batch_size}, sequence length {work.sequence_length}, data seed {work.seed}",
        "ranks": f"{grid.ranks}, each in a network namespace of its own",
        "link": f"{RATE_MBIT} Mbit/s each way at every port of one switch (tc tbf)",
        "fidelity": f"{FIDELITY.min_steps} to {FIDELITY.max_steps} timed steps, {FIDELITY.max_seconds:g} s, "
        f"ended at +-{FIDELITY.target_relative_half_width:.0%}",
        "intervals": "95 %, of the measurement's own steps; repeats tell the rest",
        "cores": str(grid.cluster.cores_per_node),
        "versions": f"autotune {product_version()}, torch {version('torch')}, Python {platform.python_version()}",
    }


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--most", type=int, help="stop after this many measurements, for a trial run")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the files")
    arguments = parser.parse_args()
    missing = why_not()
    if missing:
        print(f"nothing is measured: {missing}")
    for ranks in arguments.ranks if not missing else ():
        grid = Grid(ranks)
        file = GridFile(grid_path(ranks, arguments.data), header(grid), tuple(DOMAINS[ranks]))
        left = len(remaining(grid, file.rows)) + (TOP_ROUNDS * (TOP + 1) if len(file.rows) < len(agenda(grid)) else 0)
        minutes = left * SECONDS_EACH[ranks] / 60
        print(
            f"{ranks} ranks: {len(grid.points)} points, {len(file.rows)} measured, {left} to do, {minutes:.0f} min", flush=True
        )
        measure(grid, file, arguments.most)
    paths = {ranks: grid_path(ranks, arguments.data) for ranks in WORLDS}
    known = {ranks: (read_header(path), read_rows(path)) for ranks, path in paths.items() if path.exists()}
    lines = page({ranks: found for ranks, found in known.items() if found[1]})
    give(lines, arguments.markdown if known else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
