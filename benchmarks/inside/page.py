"""Writes docs/results/inside.md: what tuning inside a run costs, and that it changes nothing of what is trained.

`python -m benchmarks.inside.page` runs everything, in two to four hours of two cores; options make it shorter, and
`--results benchmarks/data/inside.json` goes on from the runs recorded there. Loops of libraries that are not installed are left
out, and nanoGPT's where NANOGPT does not name a folder with its `model.py`.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from itertools import filterfalse, product
from pathlib import Path
from typing import Any

from benchmarks.inside.loops import LOOPS, ZERO_STAGE, missing
from benchmarks.inside.overhead import STEPS, TURNS, overhead
from benchmarks.inside.ranks import run_ranks
from benchmarks.inside.scripts import BLOCK, PAIR_ROUNDS, ROUNDS, steps_of
from benchmarks.inside.simulated import SimulatedRun, rows_of_page

PAGE = Path("docs/results/inside.md")
TEXT = """# Tuning inside a run

Written by `python -m benchmarks.inside.page`. [A page](../tune-inside-the-run.md) says how to use it.

## Simulated runs

Six knobs, 480 settings, steps with correlated noise of 2 to 20 %, outliers, slow drifts, jumps, and in a fifth of the runs
other work from the middle on. The search may cost 1 % of the run. The first target is that 99 % of the runs keep this budget,
the second that the choice of 95 % is within 3 % of the best setting.

{simulated}

{verdict}

## Random changes in every step

Each schedule draws another setting for each step of a small language model in float64: micro-batch, recomputation, and DDP's
bucket or FSDP2's resharding and prefetch. It is compared with an untuned loop.

{changes}

## Libraries

The same in loops of libraries on two ranks. DeepSpeed trains in fp32, and models of Transformers (TRL) compute their loss in
it; all others train in float64.

{libraries}

## Eight scripts

Loops of a small language model on two ranks, in which the user's setting is a micro-batch of 2 and four of them in a step.
Offline, every setting of the run is measured in turn, {block} steps at a time, in {rounds_offline} rounds, without starting the
program anew. Then the run has the best of them from its first step on, and then it tunes itself. Where it has chosen another
setting, both are measured again, in {rounds_pair} turns each: the least of many measured times is too low by chance. Figures
are those of {seeds} seeds; all loops run with one seed before the next.

{scripts}

## Out of memory

Limits of the address space (RLIMIT_AS) make a real allocation fail in the forward pass, the backward pass, the update or an
evaluation, on one rank or on all.

{events}

## Overhead

A step in which nothing is tuned any more takes {overhead} microseconds of processor time longer than in a plain loop
({share:.2%} of a step of 10 ms; the target is 0.2 %): the median of {turns:,} pairs of turns of {steps_each} steps, with its
95 % interval.

## Not covered

- With several ranks, FSDP2 communicates inside of forward passes. A step that runs out of memory there cannot be trained again,
  so larger settings are tried only where the device's memory is predicted to suffice, and not on CPUs.
- An update that runs out of memory with a setting that was proven before ends the run: nothing could undo a half of it.
- With several ranks under DDP, a step of a setting that was proven before ends the run if it runs out of memory.
- With DeepSpeed's engine the same holds on one rank, because it keeps state in the middle of a step.
- Workers of data loaders do not change: random augmentations would be others.
"""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = [[*head], ["---" for _ in head], *([*row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def simulated(runs: int) -> tuple[str, str]:
    """The table of simulated runs, and how they stand against the targets."""
    rows = rows_of_page([SimulatedRun(seed).play() for seed in range(runs)])
    shown = ([name, str(count), *(f"{value:.1%}" for value in figures[:2]), *(f"{value:.2%}" for value in figures[2:])]
             for name, count, *figures in rows)  # fmt: skip
    _, count, within, close, _, _ = rows[0]
    verdict = f"Of {count} runs, {within:.1%} keep the budget (target 99 %), and {close:.1%} choose within 3 % (target 95 %)."
    if close < 0.95:
        verdict += " The second target is missed, most in short runs and with much noise."
    return table(("runs", "number", "within the budget", "within 3 % of the best", "mean cost", "highest cost"), shown), verdict


class Results:
    """Raw results of ranks, kept in a file so that an interrupted page goes on."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}

    def of(self, module: str, ranks: int, *arguments: str) -> list[Any]:
        """The rows of all ranks."""
        key = " ".join((module, str(ranks), *arguments))
        if key not in self._rows:
            self._rows[key] = run_ranks(f"benchmarks.inside.{module}", ranks, *arguments, seconds=3600)
            if self._path:
                self._path.write_text(json.dumps(self._rows), encoding="utf-8")
        return [row for rank in self._rows[key] for row in rank]


def changes(results: Results, schedules: int) -> str:
    """The table of random changes."""
    rows = []
    for ranks, wrapper, share in ((1, "none", 0.5), (2, "ddp", 0.3), (2, "fsdp2", 0.2)):
        count = max(round(share * schedules), 1)
        compared = results.of("random_changes", ranks, str(count), wrapper)
        rows.append((
            f"{wrapper}, {ranks} rank{'s' * (ranks > 1)}", str(count), f"{max(row['losses'] for row in compared):.1e}",
            f"{max(row['weights'] for row in compared):.1e}", "yes" if all(row["in_order"] for row in compared) else "no",
        ))  # fmt: skip
    return table(("wrapper", "schedules", "largest difference of losses", "of weights", "each sample once, in order"), rows)


def libraries(results: Results, schedules: int) -> str:
    """The table of random changes in loops of libraries."""
    rows = []
    for name in filterfalse(missing, LOOPS):
        loop = f"{name}-{ZERO_STAGE}" if name == "deepspeed" else name
        compared = results.of("libraries", 2, loop, str(schedules))
        rows.append((
            loop, str(schedules), f"{max(row['weights'] for row in compared):.1e}",
            "yes" if all(row["in_order"] for row in compared) else "no",
        ))  # fmt: skip
    return table(("loop", "schedules", "largest difference of weights", "each sample once, in order"), rows)


def scripts(results: Results, seeds: int, steps: int) -> str:
    """The table of runs that tune themselves, against every setting measured before."""
    loops = [*filterfalse(missing, LOOPS)]
    counts = {loop: results.of("scripts", 2, loop, "best", "0", "1")[0]["count"] for loop in loops}
    runs: dict[str, list[tuple[float, ...]]] = {loop: [] for loop in loops}
    for seed, loop in product(range(seeds), loops):
        offline = results.of("scripts", 2, loop, "offline", str(seed), str(steps_of(ROUNDS * counts[loop])))[0]
        seconds = {json.dumps(setting): time for setting, time in offline["settings"]}
        best = min(seconds, key=lambda setting: seconds[setting])
        of_best = results.of("scripts", 2, loop, "best", str(seed), str(steps), best)[0]
        tuned = results.of("scripts", 2, loop, "tuned", str(seed), str(steps))[0]
        choice, ratio = json.dumps(tuned["setting"]), 1.0
        if choice != best:  # of many figures the least is too low by chance: both are measured once more
            pair = results.of("scripts", 2, loop, "pair", str(seed), str(steps_of(2 * PAIR_ROUNDS)), f"[{choice}, {best}]")[0]
            again = {json.dumps(setting): time for setting, time in pair["settings"]}
            ratio = again[choice] / again[best]
        runs[loop].append((
            seconds[choice] / seconds[best], ratio, tuned["seconds"] / of_best["seconds"],
            (offline["seconds"] + of_best["seconds"]) / tuned["seconds"], tuned["lost"] / tuned["seconds"],
        ))  # fmt: skip
        print(f"seed {seed}, {loop}: {' '.join(f'{value:.3f}' for value in runs[loop][-1])}", file=sys.stderr, flush=True)
    rows = [
        (loop, str(counts[loop]), *(" / ".join(f"{value:.3f}" for value in column) for column in zip(*of_loop, strict=True)))
        for loop, of_loop in runs.items()
    ]
    head = ("loop", "settings", "time of the choice / of the best", "both measured again",
            f"time to step {steps:,} / with the best", "offline and run / tuned run", "share counted")  # fmt: skip
    return table(head, rows)


def events(results: Results, number: int) -> str:
    """The table of memory limits."""
    rows = []
    for ranks, count in ((1, number // 3), (2, number - number // 3)):
        outcomes: list[dict[str, Any]] = []
        for first in range(0, count, 8):
            size = min(8, count - first)
            outcomes += results.of("out_of_memory", ranks, str(size), str(first))
        for phase in sorted({row["phase"] for row in outcomes}):
            chosen = [row for row in outcomes if row["phase"] == phase]
            rows.append((
                f"{phase}, {ranks} rank{'s' * (ranks > 1)}", str(len(chosen) // ranks),
                str(sum(row["happened"] for row in chosen)),
                f"{max(row['weights'] for row in chosen):.1e}", "yes" if all(row["in_order"] for row in chosen) else "no",
            ))  # fmt: skip
    return table(("phase", "events", "allocations that failed", "largest difference of weights", "no sample lost"), rows)


def main() -> None:
    """Run the proofs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--library-schedules", type=int, default=6)
    parser.add_argument("--events", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3, help="of the eight scripts")
    parser.add_argument("--steps", type=int, default=2000, help="of a script's run")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keeps raw results, and goes on from them")
    options = parser.parse_args()
    results = Results(options.results)
    figures, verdict = simulated(options.runs)
    middle, low, high = overhead()
    text = TEXT.format(
        simulated=figures, verdict=verdict, changes=changes(results, options.schedules), events=events(results, options.events),
        libraries=libraries(results, options.library_schedules), scripts=scripts(results, options.seeds, options.steps),
        seeds=options.seeds, block=BLOCK, rounds_offline=ROUNDS, rounds_pair=PAIR_ROUNDS,
        overhead=f"{1e6 * middle:.1f} [{1e6 * low:.1f}, {1e6 * high:.1f}]", share=middle / 0.01, turns=TURNS, steps_each=STEPS,
    )  # fmt: skip
    PAGE.write_text(text, encoding="utf-8")
    print(json.dumps({"page": str(PAGE)}))


if __name__ == "__main__":
    main()
