"""`autotune guard` against planted slowdowns: live runs of a script, and replays of those that were recorded.

python -m benchmarks.trials.guard [--live 5] [--pairs 5] [--trials 5] [--replays 400] [--markdown docs/results/guard.md]

`--live N` records 16 runs of a script on two CPU ranks, then N runs with a slowdown of 5 % in each of its parts, and N without
one, interleaved, in benchmarks/data/guard-runs.jsonl. `--pairs N` records as many runs beside an unchanged copy of the script
in another folder, trial by trial in turn, in benchmarks/data/guard-pairs.jsonl. Without them, the recorded runs are judged.
"""

import contextlib
import dataclasses
import json
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from autotune.outcome.regression import RecipeRun, RunComparison, compare, compare_in_turn
from benchmarks.common.written_page import give, page_parser, table
from executor.measurement.timeline import PARTS
from search_spaces.plain import from_plain

SCRIPT = Path(__file__).with_name("guarded_script.py")
RUNS = Path(__file__).parents[1] / "data" / "guard-runs.jsonl"
PAIRS = RUNS.with_name("guard-pairs.jsonl")
PAIRS_EACH = 8
"""Pairs of trials of a run."""
CLEAN_RUNS = 16
HISTORY = 12
"""Earlier runs of each replay."""
SLOWDOWN = 0.05
NOISES = (0.0, 0.005, 0.01)
"""Standard deviations between runs that replays add to the recorded ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """One run with what was planted in it."""

    planted: str
    """A part; empty: nothing."""
    comparison: RunComparison


def autotune(folder: Path, *words: str) -> str:
    answer = subprocess.run(
        [str(Path(sys.executable).with_name("autotune")), *words], capture_output=True, text=True, check=False,
        env={**os.environ, "AUTOTUNE_DB": f"sqlite:///{folder}/runs.db"},
    )  # fmt: skip
    if answer.returncode not in (0, 1) or (answer.returncode and not answer.stdout.startswith("{")):
        raise SystemExit(f"{shlex.join(words)}: {answer.stderr}")
    return answer.stdout


def sweep(folder: Path, best: Path, script: Path, slow: Path) -> None:
    """Write the recipe of the script, which reads `slow`."""
    autotune(
        folder, "sweep", "--ranks", "2", "--runner", "local", "--global-batch-size", "128", "--sequence-length", "512",
        "--pin", "micro_batch_size=32", "--trials", "1", "--out", str(best), "--", sys.executable, str(script),
        "--slowdown", str(slow), "--micro-batch", "{micro_batch_size}", "--accumulation", "{gradient_accumulation_steps}",
    )  # fmt: skip


def guard(folder: Path, best: Path, against: Path, trials: int) -> dict[str, Any]:
    """The answer of the command."""
    words = ("guard", str(best), "--against", str(against), "--trials", str(trials), "--runner", "local", "--json")
    answer: dict[str, Any] = json.loads(autotune(folder, *words))
    return answer


def record(folder: Path, repeats: int, trials: int) -> None:
    """Run the script as often as the module's docstring says, in a random order, and write its runs."""
    plan = [*(CLEAN_RUNS * [""]), *random.Random(1).sample(repeats * ["", *PARTS], repeats * (1 + len(PARTS)))]
    slow, best = folder / "slow.json", folder / "best.json"
    slow.write_text('{"part": "", "seconds": 0}', encoding="utf-8")
    sweep(folder, best, SCRIPT, slow)
    lines: list[str] = []
    for number, part in enumerate(plan):
        clean = [json.loads(line)["run"]["calm_seconds"] for line in lines[:CLEAN_RUNS]]
        seconds = SLOWDOWN * fmean(map(fmean, clean)) if clean else 0.0
        slow.write_text(json.dumps({"part": part, "seconds": seconds}), encoding="utf-8")
        lines.append(json.dumps({"planted": part, "run": guard(folder, best, folder / "none.jsonl", trials)["now"]}))
        print(f"run {number + 1} of {len(plan)}: {part or 'nothing planted'}", file=sys.stderr, flush=True)
        RUNS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def record_in_turn(folder: Path, repeats: int) -> None:
    """Run the script beside its copy, as the module's docstring says, and write both runs."""
    plan = random.Random(1).sample(repeats * ["", *PARTS], repeats * (1 + len(PARTS)))
    for name in ("ours", "theirs"):
        (folder / name).mkdir()
        shutil.copy(SCRIPT, folder / name / "train.py")
        (folder / name / "slow.json").write_text('{"part": "", "seconds": 0}', encoding="utf-8")
    os.chdir(folder / "ours")
    best, slow = Path("best-config.json"), Path("slow.json")
    sweep(folder, best, Path("train.py"), slow)
    measured = json.loads(best.read_text(encoding="utf-8"))["best"]["measured"]
    seconds = SLOWDOWN * 128 / measured["samples_per_second"]["mean"]
    lines: list[str] = []
    for number, part in enumerate(plan):
        slow.write_text(json.dumps({"part": part, "seconds": seconds}), encoding="utf-8")
        answer = guard(folder, best, Path("../theirs"), PAIRS_EACH)
        lines.append(json.dumps({"planted": part, "now": answer["now"], "other": answer["other"]}))
        print(f"run {number + 1} of {len(plan)}: {part or 'nothing planted'}", file=sys.stderr, flush=True)
        PAIRS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pairs_rows(replays: int, draws: random.Random) -> list[list[str]]:
    """The rows of runs in turn: live, and replays of pairs in which nothing was planted."""
    if not PAIRS.exists():
        return []
    rows = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    runs = [(row["planted"], from_plain(RecipeRun, row["now"]), from_plain(RecipeRun, row["other"])) for row in rows]
    live = [Judged(part, compare_in_turn(now, other, "theirs", 0.01)) for part, now, other in runs]
    clean = [(now, other, index) for part, now, other in runs if not part for index in range(len(now.seconds))]
    judged = []
    for _ in range(replays):
        drawn = draws.sample(clean, PAIRS_EACH)
        now, other = (joined([(pair[side], pair[2]) for pair in drawn]) for side in (0, 1))
        part = draws.choice(PARTS) if draws.random() < 0.5 else ""
        judged.append(Judged(part, compare_in_turn(slowed(now, part, True) if part else now, other, "theirs", 0.01)))
    return [row_of("live, in turn", live), row_of(f"{len(judged)} replays, in turn", judged)]


def joined(trials: Sequence[tuple[RecipeRun, int]]) -> RecipeRun:
    """A run of these trials, each with its number in its run."""
    return dataclasses.replace(
        trials[0][0],
        seconds=tuple(run.seconds[index] for run, index in trials),
        calm_seconds=tuple(run.calm_seconds[index] for run, index in trials),
        parts=tuple(run.parts[index] for run, index in trials),
        calls={
            name: (
                tuple(run.calls[name][0][index] if name in run.calls else 0.0 for run, index in trials),
                fmean(run.calls[name][1] for run, _ in trials if name in run.calls),
            )
            for name in {name for run, _ in trials for name in run.calls}
        },
    )


def recorded() -> list[tuple[str, RecipeRun]]:
    rows = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
    return [(row["planted"], from_plain(RecipeRun, row["run"])) for row in rows]


def replay(clean: Sequence[RecipeRun], noise: float, by_calls: bool, draws: random.Random) -> Judged:
    """Draw a history and one more run from the recorded ones, with more noise, and a slowdown in half of the cases."""
    *history, now = (noisy(run, noise, draws) for run in draws.sample(clean, HISTORY + 1))
    part = draws.choice(PARTS) if draws.random() < 0.5 else ""
    return Judged(part, compare(slowed(now, part, by_calls) if part else now, history, 0.01))


def noisy(run: RecipeRun, noise: float, draws: random.Random) -> RecipeRun:
    factor = math.exp(draws.gauss(0.0, noise))
    return scaled(run, factor, dict.fromkeys(PARTS, factor))


def slowed(run: RecipeRun, part: str, by_calls: bool) -> RecipeRun:
    """With a slowdown in a part; `by_calls`: by more calls of what takes longest there, else by calls that take longer."""
    mine = run.mean_parts()
    by = SLOWDOWN * sum(mine.values())
    by_part = {name: 1.0 + by / mine[name] * (name == part) for name in PARTS}
    slow = dataclasses.replace(scaled(run, 1.0 + SLOWDOWN, by_part), calls=run.calls)
    names = [name for name in run.calls if name.startswith(f"{part} ")]
    if not names or part == "data":  # a loader that sleeps calls nothing more
        return slow
    longest = max(names, key=lambda name: fmean(run.calls[name][0]) * run.calls[name][1])
    counts, seconds = run.calls[longest]
    if not by_calls:
        return dataclasses.replace(slow, calls={**run.calls, longest: (counts, seconds + by / fmean(counts))})
    return dataclasses.replace(slow, calls={**run.calls, longest: (tuple(count + by / seconds for count in counts), seconds)})


def scaled(run: RecipeRun, factor: float, by_part: dict[str, float]) -> RecipeRun:
    return dataclasses.replace(
        run,
        seconds=tuple(factor * value for value in run.seconds),
        calm_seconds=tuple(factor * value for value in run.calm_seconds),
        parts=tuple({name: by_part[name] * value for name, value in parts.items()} for parts in run.parts),
        calls={name: (counts, factor * seconds) for name, (counts, seconds) in run.calls.items()},
    )


def row_of(name: str, judged: Sequence[Judged]) -> list[str]:
    planted = [item for item in judged if item.planted]
    found = [item for item in planted if item.comparison.is_regression]
    alarms = [item for item in judged if not item.planted and item.comparison.is_regression]
    named = [item for item in found if item.comparison.part is not None]
    right = [item for item in named if item.comparison.part == item.planted]
    likeliest = [
        item for item in found
        if max(item.comparison.part_probabilities, key=item.comparison.part_probabilities.__getitem__) == item.planted
    ]  # fmt: skip
    detectable = sorted(item.comparison.detectable or math.inf for item in judged)[len(judged) // 2]
    return [
        name, f"{detectable:.1%}", f"{len(found)} of {len(planted)}", f"{len(alarms)} of {len(judged) - len(planted)}",
        f"{len(likeliest)} of {len(found)}", f"{len(right)} of {len(named)}",
    ]  # fmt: skip


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--replays", type=int, default=400)
    arguments = parser.parse_args()
    if arguments.live:
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder), arguments.live, arguments.trials)
    if arguments.pairs:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            record_in_turn(Path(folder), arguments.pairs)
    rows = recorded()
    clean = [run for _, run in rows[:CLEAN_RUNS]]
    live = [Judged(part, compare(run, clean, 0.01)) for part, run in rows[CLEAN_RUNS:]]
    draws = random.Random(2)
    every = [run for part, run in rows if not part]
    kinds = [(noise, True) for noise in NOISES] + [(0.0, False)]
    replays = [[replay(every, *kind, draws) for _ in range(arguments.replays)] for kind in kinds]
    spread = stdev(math.log(fmean(run.calm_seconds)) for run in every)
    about = (
        f"Written by `python -m benchmarks.trials.guard`. {len(rows)} runs of a DDP script on two CPU ranks, "
        f"{len(rows[0][1].seconds)} trials each. Runs with nothing planted differ by {spread:.1%} (standard deviation). A "
        f"slowdown is {SLOWDOWN:.0%} of a step, in one part: more products, more collectives, a slower loader, or a wait of "
        f"Python. Live runs are compared with the first {CLEAN_RUNS}. A replay draws {HISTORY} earlier runs and a later one "
        "from runs with nothing planted, adds noise between runs, and in half of the cases a slowdown, in computation and "
        "communication by more calls of what takes longest there; in the last row the same calls take longer. In turn: against "
        f"an unchanged copy in another folder, {PAIRS_EACH} pairs of trials beside each other."
    )
    lines = [
        "# Guard against planted slowdowns",
        "",
        about,
        "",
        *table(
            ["", "detectable", "found", "false alarms", "likeliest part right", "named part right"],
            [
                row_of("live", live),
                *(
                    row_of(
                        f"{len(judged)} replays, {noise:.1%} more noise" + ", calls that take longer" * (not by_calls), judged
                    )
                    for (noise, by_calls), judged in zip(kinds, replays, strict=True)
                ),
                *pairs_rows(arguments.replays, draws),
            ],
        ),
        "",
        "`detectable`: the median of the least slowdown that a run says it would find. A part is named from 90 % on.",
    ]
    give(lines, arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
