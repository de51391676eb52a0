"""Are the verdicts of `autotune challenge` right? Games against recipes whose place in the reference grid is known.

    python -m benchmarks.search.challenges [--games 5] [--markdown docs/results/challenge-games.md]

In each grid, eight DeepSpeed recipes are taken from the fastest to the slowest. Each is challenged several times by the whole
command: predictions nominate rivals, a job runs on the replay runner, and its rows decide. A measurement is the configuration's
mean rate in the grid times log-normal noise, as large as the grid's own repeats differ.

A verdict is right if the grid's mean rates agree: beaten, and the named rival is faster; not beaten, and no rival is faster by
more than 1 %; undecided, and the intervals of as many measurements overlap.
"""

import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.cli.carry import RecipeOptions
from autotune.cli.challenge import ChallengeOptions, prepare_challenge, run_challenge
from autotune.outcome.verdict import EQUAL
from autotune.question.question import QuestionFields
from autotune.recipes.challenge import Challenged, Result, Rival
from benchmarks.common.written_page import judge, page_parser
from benchmarks.search.decisions import measured
from benchmarks.search.grid_design import DOMAINS, MODEL, WORKLOAD, WORLDS, Grid
from benchmarks.search.grid_figures import mean_rates, noise_of
from benchmarks.search.grid_file import grid_path, read_rows
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import open_store

RECIPES = 8
RIVALS, ROUNDS = 5, 5
LEAST_RIGHT = 0.95
SETTINGS: Mapping[str, str] = {
    "zero_stage": "stage", "overlap_comm": "overlap_comm", "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size", "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
}  # fmt: skip
"""Knob of the grid -> its key in DeepSpeed's `zero_optimization`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """One challenge and its truth."""

    recipe: TrialConfig
    place: int
    """Place of the recipe among the grid's configurations; 1: the fastest."""
    of: int
    challenged: Challenged
    ratio: float
    """Of the fastest rival that ran, its mean rate in the grid over the recipe's; 0: none ran."""
    named: float | None
    """The same of the rival that the verdict names; None: it names none."""
    noise: float
    """Standard deviation of the logarithm of a measurement."""

    @property
    def right(self) -> bool:
        """Whether the grid agrees with the verdict."""
        if self.challenged.result is Result.BEATEN:
            return self.named is not None and self.named > 1.0
        if self.challenged.result is Result.NOT_BEATEN:
            return self.ratio <= 1.0 + EQUAL
        # The half-width of a 95 % interval of each of the two rates, from as many measurements as the recipe has.
        half = 1.96 * self.noise / math.sqrt(max(self.challenged.rounds, 1))
        return self.ratio > 0 and abs(math.log(self.ratio)) <= 2 * half


def recipe_text(config: TrialConfig, ranks: int) -> str:
    """The configuration as a DeepSpeed file. Settings without effect at its stage have a value of the grid, for its rivals."""
    batch = WORKLOAD.global_batch_size
    domains = DOMAINS[ranks]
    values = {knob: getattr(config, knob) for knob in SETTINGS}
    zero = {SETTINGS[knob]: value if value in domains[knob] else domains[knob][-1] for knob, value in values.items()}
    return json.dumps({
        "train_batch_size": batch, "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": batch // ranks // config.micro_batch_size,
        "zero_optimization": zero,
    })  # fmt: skip


def games(ranks: int, count: int) -> Iterator[Game]:
    """Challenge every recipe `count` times."""
    grid, rows = Grid(ranks), read_rows(grid_path(ranks))
    rates, noise = mean_rates(rows), noise_of(rows).repeat
    order = sorted(rates, key=lambda config: -rates[config])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ds_config.json"
        own = [config for config in order if _is_stated(path, config, grid)]
        for place in range(RECIPES):
            recipe = own[round(place * (len(own) - 1) / (RECIPES - 1))]
            path.write_text(recipe_text(recipe, ranks))
            for seed in range(count):
                yield _game(path, recipe, seed, grid, rates, noise)


def _is_stated(path: Path, config: TrialConfig, grid: Grid) -> bool:
    """Whether a DeepSpeed file states the configuration: read back, it is the same."""
    rest = config.micro_batch_size * grid.ranks
    if rest > WORKLOAD.global_batch_size or config.zero_ranks(grid.ranks) != grid.ranks:
        return False
    path.write_text(recipe_text(config, grid.ranks))
    return grid.space.canonical(_options(path, grid, 0).recipe.read().case.config) == config


def _options(path: Path, grid: Grid, seed: int) -> ChallengeOptions:
    return ChallengeOptions(
        recipe=RecipeOptions(
            recipe=str(path), source=None, url=None, database=None,
            asked=QuestionFields(
                model=MODEL, global_batch_size=WORKLOAD.global_batch_size, sequence_length=WORKLOAD.sequence_length,
            ),
        ),
        cluster="local", ranks=grid.ranks, rivals=RIVALS, rounds=ROUNDS, predict_only=False, json=True, fields={"seed": seed},
    )  # fmt: skip


def _game(
    path: Path, recipe: TrialConfig, seed: int, grid: Grid, rates: Mapping[TrialConfig, float], noise: float
) -> Game:  # fmt: skip
    draw = random.Random(f"{grid.ranks} {recipe.hash} {seed}")
    options = _options(path, grid, seed)
    session, nomination = prepare_challenge(options.recipe.read(), options, lambda _: None)
    baseline = session.baselines[0]

    def truth(config: TrialConfig) -> float | None:
        return rates.get(grid.representative(grid.space.canonical(config)))

    def answer(config: TrialConfig) -> TrialResult:
        rate = truth(config)
        if rate is None:
            return TrialResult(attempt="", outcome=Outcome.FAILED, losses=(), step_seconds=(), message="not in the grid")
        return measured(rate * math.exp(draw.gauss(0.0, noise)))

    def ratio(rival: Rival) -> float:
        rate = truth(baseline.replace(rival.differences))
        assert rate is not None  # it was measured
        return rate / rates[recipe]

    with tempfile.TemporaryDirectory() as folder, open_store(f"sqlite:///{folder}/jobs.db") as store:
        challenged = run_challenge(session, nomination, store, ReplayRunner(answer))
    return Game(
        recipe=recipe, place=1 + sum(rate > rates[recipe] for rate in rates.values()), of=len(rates), challenged=challenged,
        ratio=max((ratio(rival) for rival in challenged.rivals if rival.measured is not None), default=0.0),
        named=None if challenged.best is None else ratio(challenged.best), noise=noise,
    )  # fmt: skip


def page(found: Mapping[int, Sequence[Game]]) -> str:
    """The figures as Markdown."""
    every = [game for played in found.values() for game in played]
    lines = [
        "# Are the verdicts on recipes right?",
        "",
        "Written by `python -m benchmarks.search.challenges`. [Challenges](../recipes.md#challenge-a-recipe) of",
        f"{RECIPES} DeepSpeed recipes in each [reference grid](reference-grid.md), played on its rates with the noise of its",
        "repeats. A verdict is right if",
        "the grid agrees: *beaten*, and the named rival is faster; *not beaten*, and no rival is faster by more than 1 %;",
        "*undecided*, and the 95 % intervals of as many measurements overlap.",
        "",
        f"**{sum(game.right for game in every)} of {len(every)} verdicts are right.** {_counts(every)}.",
    ]
    for ranks, played in found.items():
        lines += [
            "",
            f"## {ranks} ranks",
            "",
            f"Noise of a measurement: {100 * played[0].noise:.1f} %.",
            "",
            "| recipe | place | best rival over it, in the grid | verdicts | right | measurements of the recipe |",
            "|---|--:|--:|---|--:|--:|",
        ]
        for recipe in dict.fromkeys(game.recipe for game in played):
            mine = [game for game in played if game.recipe == recipe]
            settings = (
                ", ".join(f"{name}={value}" for name, value in recipe.differences(TrialConfig()).items()) or "the defaults"
            )
            ratios = sorted({f"{game.ratio:.2f}" for game in mine})
            rounds = sum(game.challenged.rounds for game in mine) / len(mine)
            lines.append(
                f"| {settings} | {mine[0].place} of {mine[0].of} | {' to '.join(dict.fromkeys((ratios[0], ratios[-1])))} "
                f"| {_counts(mine)} | {sum(game.right for game in mine)} of {len(mine)} | {rounds:.1f} |"
            )
    return "\n".join(lines) + "\n"


def _counts(played: Sequence[Game]) -> str:
    counts = Counter(game.challenged.result.value for game in played)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def problems(found: Mapping[int, Sequence[Game]]) -> list[str]:
    """What misses the targets."""
    every = [game for played in found.values() for game in played]
    right = sum(game.right for game in every) / len(every)
    return [f"{right:.1%} of the verdicts are right; at least {LEAST_RIGHT:.0%} have to be"] if right < LEAST_RIGHT else []


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--games", type=int, default=5, help="challenges of each recipe")
    arguments = parser.parse_args()
    found: dict[int, list[Game]] = {}
    for ranks in WORLDS:
        found[ranks] = []
        for game in games(ranks, arguments.games):
            found[ranks].append(game)
            print(f"{ranks} ranks: {len(found[ranks])} of {RECIPES * arguments.games} games", file=sys.stderr, flush=True)
    return judge(page(found), problems(found), arguments.markdown)


if __name__ == "__main__":
    raise SystemExit(main())
