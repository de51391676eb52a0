"""`autotune guard` against planted slowdowns: live runs of a script, and replays of those that were recorded.

python -m benchmarks.trials.guard [--live 5] [--trials 5] [--replays 400] [--markdown docs/results/guard.md]

`--live N` records 16 runs of a script on two CPU ranks, then N runs with a slowdown of 5 % in each of its parts, and N without
one, interleaved, in benchmarks/data/guard-runs.jsonl. Without it, the recorded runs are judged.
"""

import dataclasses
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from autotune.outcome.regression import RecipeRun, RunComparison, compare
from benchmarks.common.written_page import give, page_parser, table
from executor.measurement.timeline import PARTS
from search_spaces.plain import from_plain

SCRIPT = Path(__file__).with_name("guarded_script.py")
RUNS = Path(__file__).parents[1] / "data" / "guard-runs.jsonl"
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


def record(folder: Path, repeats: int, trials: int) -> None:
    """Run the script as often as the module's docstring says, in a random order, and write its runs."""
    plan = [*(CLEAN_RUNS * [""]), *random.Random(1).sample(repeats * ["", *PARTS], repeats * (1 + len(PARTS)))]
    slow, best = folder / "slow.json", folder / "best.json"
    slow.write_text('{"part": "", "seconds": 0}', encoding="utf-8")
    command = [
        str(SCRIPT),
        "--slowdown",
        str(slow),
        "--micro-batch",
        "{micro_batch_size}",
        "--accumulation",
        "{gradient_accumulation_steps}",
    ]
    autotune(
        folder, "sweep", "--ranks", "2", "--runner", "local", "--global-batch-size", "128", "--sequence-length", "512",
        "--pin", "micro_batch_size=32", "--trials", "1", "--out", str(best), "--", sys.executable, *command,
    )  # fmt: skip
    lines: list[str] = []
    for number, part in enumerate(plan):
        clean = [json.loads(line)["run"]["calm_seconds"] for line in lines[:CLEAN_RUNS]]
        seconds = SLOWDOWN * fmean(map(fmean, clean)) if clean else 0.0
        slow.write_text(json.dumps({"part": part, "seconds": seconds}), encoding="utf-8")
        words = (
            "guard",
            str(best),
            "--against",
            str(folder / "none.jsonl"),
            "--trials",
            str(trials),
            "--runner",
            "local",
            "--json",
        )
        lines.append(json.dumps({"planted": part, "run": json.loads(autotune(folder, *words))["now"]}))
        print(f"run {number + 1} of {len(plan)}: {part or 'nothing planted'}", file=sys.stderr, flush=True)
        RUNS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def recorded() -> list[tuple[str, RecipeRun]]:
    rows = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
    return [(row["planted"], from_plain(RecipeRun, row["run"])) for row in rows]


def replay(clean: Sequence[RecipeRun], noise: float, draws: random.Random) -> Judged:
    """Draw a history and one more run from the recorded ones, with more noise, and a slowdown in half of the cases."""
    *history, now = (noisy(run, noise, draws) for run in draws.sample(clean, HISTORY + 1))
    part = draws.choice(PARTS) if draws.random() < 0.5 else ""
    return Judged(part, compare(slowed(now, part) if part else now, history, 0.01))


def noisy(run: RecipeRun, noise: float, draws: random.Random) -> RecipeRun:
    factor = math.exp(draws.gauss(0.0, noise))
    return scaled(run, factor, dict.fromkeys(PARTS, factor))


def slowed(run: RecipeRun, part: str) -> RecipeRun:
    mine = run.mean_parts()
    return scaled(
        run, 1.0 + SLOWDOWN, {name: 1.0 + SLOWDOWN * sum(mine.values()) / mine[name] * (name == part) for name in PARTS}
    )


def scaled(run: RecipeRun, factor: float, by_part: dict[str, float]) -> RecipeRun:
    return dataclasses.replace(
        run,
        seconds=tuple(factor * value for value in run.seconds),
        calm_seconds=tuple(factor * value for value in run.calm_seconds),
        parts=tuple({name: by_part[name] * value for name, value in parts.items()} for parts in run.parts),
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
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--replays", type=int, default=400)
    arguments = parser.parse_args()
    if arguments.live:
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder), arguments.live, arguments.trials)
    rows = recorded()
    clean = [run for _, run in rows[:CLEAN_RUNS]]
    live = [Judged(part, compare(run, clean, 0.01)) for part, run in rows[CLEAN_RUNS:]]
    draws = random.Random(2)
    every = [run for part, run in rows if not part]
    replays = [[replay(every, noise, draws) for _ in range(arguments.replays)] for noise in NOISES]
    spread = stdev(math.log(fmean(run.calm_seconds)) for run in every)
    about = (
        f"Written by `python -m benchmarks.trials.guard`. {len(rows)} runs of a DDP script on two CPU ranks, "
        f"{len(rows[0][1].seconds)} trials each. Runs with nothing planted differ by {spread:.1%} (standard deviation). A "
        f"slowdown is {SLOWDOWN:.0%} of a step, in one part: more products, more collectives, a slower loader, or a wait of "
        f"Python. Live runs are compared with the first {CLEAN_RUNS}. A replay draws {HISTORY} earlier runs and a later one "
        "from runs with nothing planted, adds noise between runs, and in half of the cases a slowdown."
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
                    row_of(f"{len(judged)} replays, {noise:.1%} more noise", judged)
                    for noise, judged in zip(NOISES, replays, strict=True)
                ),
            ],
        ),
        "",
        "`detectable`: the median of the least slowdown that a run says it would find. A part is named from 90 % on.",
    ]
    give(lines, arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
