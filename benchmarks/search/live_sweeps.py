"""Live sweeps of twelve trials: guided search against every other strategy on real ranks with a slow network.

    python -m benchmarks.search.live_sweeps [--ranks 2] [--seeds 10] [--warm] [--markdown docs/results/live-sweeps.md]
    python -m benchmarks.search.live_sweeps --replay [--ranks 2 4] [--seeds 20]

A sweep takes about 45 s on two idle cores: 10 strategies and 10 seeds 75 minutes, re-measuring the winners 15 more. Seeds are
interleaved: every strategy runs one seed before any runs the next, in rotating order. Every result is written at once to the
folder of --out; a restart continues from there. With `--replay` nothing is measured: trials return the reference grid's
measurements with added noise. 10 seeds then take 2 minutes, and 4 more for `gp`, which is slow to decide.

The reference grid (`benchmarks/search/grid.py`) is measured first. Its best ten and all winners are measured again by one
harness, in rounds, and compared by these measurements. Root and Linux are needed, except with `--replay`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.common.paired_statistics import pooled_deviation
from benchmarks.common.shaped_link import why_not
from benchmarks.common.shaped_network import NetworkRunner, ShapedNetwork
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.search.contestants import CONTESTANTS
from benchmarks.search.grid import header
from benchmarks.search.grid_design import DOMAINS, RATE_MBIT, TOP, WORLDS, Grid
from benchmarks.search.grid_figures import mean_rates, noise_of, remeasured_best
from benchmarks.search.grid_file import DATA, GridFile, Role, Row, grid_path, read_rows
from benchmarks.search.sweep_play import WARM, Sweep, play, read_sweeps, replay_runner
from benchmarks.search.sweep_scores import GUIDED, Score, Truth, score
from executor.runners.runner import Runner
from search_spaces.trial_config import stable_hash

BOUND = 0.03
"""Largest average shortfall of guided search's winner from the best of the grid."""
RIVALS = tuple(name for name in CONTESTANTS if name not in (GUIDED, "smac"))
"""Without smac, which another distribution brings and which takes seconds to decide."""
SECONDS_A_TRIAL = {2: 3.8, 4: 5.0}
ROUNDS = 3
INTRODUCTION = (
    "Written by `make bench` (`benchmarks/search/live_sweeps.py`). Every strategy sweeps the space of the",
    "[reference grid](reference-grid.md) with the same number of trials, on the same ranks and link; seeds differ in the data,",
    "in the strategy's random draws, and in the measurements. The first trial is always the baseline. `guided, warm` is guided",
    "search with the jobs of earlier seeds in its database. `guided ahead by` is the mean of the paired differences of log",
    "rates over seeds, with its 95 % t interval; `below` is a share of the best's rate.",
)

MakeRunner = Callable[[str, int], Runner]


def contestants(seed: int, arguments: argparse.Namespace) -> list[str]:
    """The contestants of a seed in order; a different one begins each seed."""
    names = [GUIDED, *([WARM] if arguments.warm else []), *arguments.baselines]
    first = seed % len(names)
    return names[first:] + names[:first]


def sweep_all(grid: Grid, arguments: argparse.Namespace, path: Path, make: MakeRunner, known: list[Sweep]) -> list[Sweep]:
    """Run the missing sweeps; each is written at once."""
    done = {(sweep.contestant, sweep.seed) for sweep in known}
    planned = [(seed, name) for seed in range(arguments.seeds) for name in contestants(seed, arguments)]
    planned = [(seed, name) for seed, name in planned if (name, seed) not in done]
    for place, (seed, name) in enumerate(planned, start=1):
        warm = path.with_name(f"{path.stem}-warm.db")
        sweep = play(grid, name, seed, make(name, seed), trials=arguments.trials, confirm=arguments.confirm, warm=warm)
        with path.open("a", encoding="utf-8") as file:
            file.write(sweep.line() + "\n")
        known = [*known, sweep]
        print(f"{place} of {len(planned)}: seed {seed}, {name}: {sweep.seconds:.0f} s, winner {sweep.winner}", flush=True)
    return known


def remeasure(grid: Grid, runner: Runner, rows: Sequence[Row], sweeps: Sequence[Sweep], folder: Path) -> list[Row]:
    """Measure the grid's best ten and every winner in interleaved rounds; existing measurements are kept."""
    winners = {sweep.best: None for sweep in sweeps if sweep.best is not None}
    configs = list(dict.fromkeys([*remeasured_best(rows, TOP), *map(grid.representative, winners)]))
    compared = stable_hash([config.hash for config in configs])
    head = header(grid) | {"configurations": compared}
    file = GridFile(folder / f"winners-{grid.ranks}-{compared}.csv", head, tuple(DOMAINS[grid.ranks]))
    planned = [config for number in range(ROUNDS) for config in configs[number:] + configs[:number]]
    losses = runner.run(grid.request("first", grid.reference)).losses
    for order in range(len(file.rows), len(planned)):
        began = time.monotonic()
        result = runner.run(grid.request(f"{order}", planned[order], losses=losses))
        file.add(Row.of(order, Role.TOP, planned[order], result, time.monotonic() - began))
        print(f"again {order + 1} of {len(planned)}: {file.rows[-1].rate:.1f} samples/s", flush=True)
    return file.rows


def truth_of(grid: Grid, rows: Sequence[Row], again: Sequence[Row]) -> Truth:
    """Rates measured again, or else the grid's, scaled to the level of the new measurements."""
    whole, fresh = mean_rates(rows), mean_rates(again)
    shared = [config for config in fresh if config in whole]
    level = fmean(fresh[config] / whole[config] for config in shared) if shared else 1.0
    known = {config: level * rate for config, rate in whole.items()} | fresh
    slowest = min(known.values())
    return lambda config: slowest if config is None else known.get(grid.representative(config), slowest)


def part(grid: Grid, rows: Sequence[Row], again: Sequence[Row], sweeps: Sequence[Sweep], how: str) -> tuple[list[str], bool]:
    """Lines of markdown for one number of ranks, and whether the bound holds."""
    top = remeasured_best(rows, TOP)
    truth = truth_of(grid, rows, again)
    scores = score(sweeps, truth, top)
    spread, freedom = pooled_deviation([[row.rate for row in again if row.config == config and row.rate] for config in top])
    best = max(truth(config) for config in top)
    guided = next((each for each in scores if each.contestant == GUIDED), None)
    holds = guided is not None and guided.below_best.mean <= BOUND
    verdict = f"guided's winner is {guided.below_best.percent()} below the best" if guided else "guided did not run"
    noise = f" (repeats differ by {spread:.1%}, {freedom} degrees of freedom)" if freedom else ""
    text = (
        f"{how} The fastest of the grid's best ten has {best:.1f} samples/s{noise}; the space has {grid.space.count():,} "
        f"configurations. **{'Holds' if holds else 'DOES NOT HOLD'}**: {verdict}, bound {BOUND:.0%}."
    )
    return ["", f"## {grid.ranks} ranks", "", text, "", *_table(scores)], holds


def _table(scores: Sequence[Score]) -> list[str]:
    headings = [
        "strategy", "below the best", "below the ten's mean", "worst seed", "guided ahead by", "seeds within 5 %",
        "trials until then (median)", "seconds a sweep",
    ]  # fmt: skip
    return table(headings, [_cells(each) for each in scores])


def _cells(each: Score) -> list[str]:
    many = each.median_trials
    return [
        f"`{each.contestant}`", each.below_best.percent(), each.below_ten.percent(), f"{each.worst:.1%}",
        each.lead.signed_percent() if each.lead else "", f"{each.found} of {each.seeds}",
        f"{many:g}" if many < float("inf") else "never", f"{each.seconds:.1f}",
    ]  # fmt: skip


def live(ranks: int, arguments: argparse.Namespace, rows: Sequence[Row]) -> tuple[list[str], bool]:
    """Run the sweeps on real ranks."""
    grid, path = Grid(ranks), arguments.out / f"sweeps-{ranks}-{arguments.trials}-{arguments.confirm}.jsonl"
    known = read_sweeps(path)
    count = arguments.seeds * len(contestants(0, arguments)) - len(known)
    minutes = (count * arguments.trials + ROUNDS * 40) * SECONDS_A_TRIAL[ranks] / 60
    print(f"{ranks} ranks: {max(count, 0)} sweeps to do, about {minutes:.0f} minutes with the winners again", flush=True)
    with ShapedNetwork(ranks, f"{RATE_MBIT}mbit") as network, NetworkRunner(network) as runner:
        sweeps = sweep_all(grid, arguments, path, lambda _name, _seed: runner, known)
        again = remeasure(grid, runner, rows, sweeps, arguments.out)
    how = (
        f"On real ranks, {RATE_MBIT} Mbit/s: sweeps of {arguments.trials} trials, {arguments.seeds} seeds, confirmation of "
        f"{arguments.confirm} rounds; winners and the best ten measured again in {ROUNDS} interleaved rounds."
    )
    return part(grid, rows, again, sweeps, how)


def replayed(ranks: int, arguments: argparse.Namespace, rows: Sequence[Row]) -> tuple[list[str], bool]:
    """Replay the sweeps from the grid's measurements."""
    grid, noise = Grid(ranks), noise_of(rows)
    print(f"{ranks} ranks: {arguments.seeds * len(contestants(0, arguments))} sweeps replayed, 1 s each (gp 20)", flush=True)
    path = arguments.out / f"replayed-{ranks}.jsonl"
    # Replays take seconds and depend on the code: earlier ones are not reused.
    for old in (path, path.with_name(f"{path.stem}-warm.db")):
        old.unlink(missing_ok=True)
    sweeps = sweep_all(grid, arguments, path, lambda name, seed: replay_runner(grid, rows, name, seed), [])
    how = (
        f"Replayed from the reference grid: sweeps of {arguments.trials} trials, {arguments.seeds} seeds, measurements "
        f"drawn around the grid's with {noise.between:.1%} between repeats, in addition to each one's own error; "
        "winners are compared by the grid."
    )
    return part(grid, rows, (), sweeps, how)


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=WORLDS, default=[2])
    parser.add_argument("--baselines", nargs="*", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--confirm", type=int, default=0, help="confirmation rounds at the end of a sweep")
    parser.add_argument("--warm", action="store_true", help="run guided again, each job learning from earlier ones")
    parser.add_argument("--replay", action="store_true", help="replay the grid's measurements")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the grid")
    parser.add_argument("--out", type=Path, default=Path("build/live-sweeps"), help="folder of the results")
    arguments = parser.parse_args()
    missing = None if arguments.replay else why_not()
    absent = [path for path in (grid_path(ranks, arguments.data) for ranks in arguments.ranks) if not path.exists()]
    if missing or absent:
        print(f"nothing is measured: {missing or f'{absent[0]} is absent; measure it with python -m benchmarks.search.grid'}")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = replayed if arguments.replay else live
    parts = [run(ranks, arguments, read_rows(grid_path(ranks, arguments.data))) for ranks in arguments.ranks]
    lines = ["# Live sweeps", "", *INTRODUCTION, *(line for lines, _ in parts for line in lines)]
    give(lines, arguments.markdown)
    return 0 if all(holds for _, holds in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
