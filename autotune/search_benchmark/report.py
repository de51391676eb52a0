"""Strategies on a table: who finds how much of the best after how many trials."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from autotune.objective import rate
from autotune.prediction.table_predictor import TablePredictor
from autotune.search_benchmark.contest import Played, play, score
from autotune.search_benchmark.contest_scores import group_figures, oracle, over_groups, paired
from autotune.search_benchmark.groups import Gathered, Group, Progress, gather_groups
from autotune.strategies.strategy import Guide, make_strategy
from autotune.validation.facts import gather_facts
from autotune.validation.folds import Calibration
from autotune.validation.outcomes import NO_LABELS, Labels
from autotune.validation.table import Table

Document = dict[str, Any]
FORMAT = 1
ORACLE_NOISES = (0.05, 0.1)
ORACLE_DRAWS = 400
RULES = (
    "share: highest throughput among the trials so far over the highest that the group has; 0 while none ran",
    "a configuration that failed for any cause costs a trial; none is tried twice; what the table does not have costs nothing",
    "rows of one configuration in a group are one candidate: it ran if any ran, its throughput the median of those",
    "coefficients are fitted without the group's rows (leave-group-out) or without any of its source (leave-source-out)",
    "means over groups, each the mean of its seeds; intervals of 95 % over groups, by drawing them anew",
    "oracle: knows each candidate's throughput but for one draw of that noise, and tries them in that order, none that failed",
    "who has tried everything keeps what was found",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What is played."""

    strategies: tuple[str, ...]
    calibrate: Calibration = Calibration.LEAVE_GROUP_OUT
    trials: int = 20
    seeds: int = 20
    min_timed: int = 8
    seed: int = 0
    """Of intervals and of the oracle's noise; strategies get 0, 1, …"""
    processes: int = 0
    """0: as many as there are cores."""


def bench_search(
    table: Table,
    rounds: Rounds,
    labels: Labels = NO_LABELS,
    predictor: TablePredictor | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Document:
    """Play every strategy on every group of the table."""
    facts = gather_facts(table.rows, labels)
    told = partial(progress, "groups predicted") if progress else None
    gathered = gather_groups(facts, predictor or TablePredictor(), rounds.calibrate, rounds.min_timed, told)
    played = _play_all(gathered.groups, rounds, partial(progress, "groups played") if progress else None)
    figures = [{name: group_figures(found, rounds.trials) for name, found in each.items()} for each in played]
    return {
        "format": FORMAT,
        "table": str(table.path),
        "calibrate": str(rounds.calibrate),
        "trials": rounds.trials,
        "seeds": rounds.seeds,
        "min_timed": rounds.min_timed,
        **_summary(gathered, figures, rounds),
        "groups": [_group(group, each, rounds) for group, each in zip(gathered.groups, figures, strict=True)],
        "skipped": [asdict(skip) for skip in sorted((*table.skipped, *gathered.skipped), key=lambda skip: skip.line)],
        "problems": [asdict(problem) for problem in (*table.problems, *labels.problems)],
        "rules": list(RULES),
    }


def _play_all(groups: Sequence[Group], rounds: Rounds, progress: Progress | None) -> list[dict[str, list[Played]]]:
    play_one = partial(_play_group, strategies=rounds.strategies, seeds=rounds.seeds, trials=rounds.trials)
    found: list[dict[str, list[Played]]] = []
    # Processes that are started anew: what this one has loaded, threads included, must not change what they do.
    with ProcessPoolExecutor(rounds.processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for result in pool.map(play_one, groups):
            found.append(result)
            if progress:
                progress(len(found), len(groups))
    return found


def _play_group(group: Group, strategies: Sequence[str], seeds: int, trials: int) -> dict[str, list[Played]]:
    guide = Guide(forecaster=group.forecaster, value=rate)
    return {
        name: [play(group, make_strategy(name, score, guide), seed, trials) for seed in range(seeds)] for name in strategies
    }


def _summary(gathered: Gathered, figures: Sequence[Mapping[str, Document]], rounds: Rounds) -> Document:
    """All groups, and those of each source."""
    sources = list(dict.fromkeys(group.key[0] for group in gathered.groups))
    ours = {source: [at for at, group in enumerate(gathered.groups) if group.key[0] == source] for source in sources}
    everything = _over(gathered, figures, list(range(len(figures))), rounds)
    return {
        "strategies": everything["strategies"],
        "oracles": everything["oracles"],
        "ahead": everything["ahead"],
        "by_source": {source: _over(gathered, figures, places, rounds) for source, places in ours.items()},
    }


def _over(gathered: Gathered, figures: Sequence[Mapping[str, Document]], places: Sequence[int], rounds: Rounds) -> Document:
    if not places:
        return {"groups": 0, "strategies": {}, "oracles": {}, "ahead": {}}
    first, *others = rounds.strategies
    by_group = {name: {str(at): figures[at][name] for at in places} for name in rounds.strategies}
    return {
        "groups": len(places),
        "strategies": {name: over_groups([figures[at][name] for at in places], rounds.seed) for name in rounds.strategies},
        "oracles": {f"{noise:g}": _oracle([gathered.groups[at] for at in places], noise, rounds) for noise in ORACLE_NOISES},
        "ahead": {f"{first} over {name}": paired(by_group[first], by_group[name], rounds.seed) for name in others},
    }


def _oracle(groups: Sequence[Group], noise: float, rounds: Rounds) -> Document:
    found = [oracle(group, noise, rounds.trials, ORACLE_DRAWS, rounds.seed) for group in groups]
    return {
        name: {budget: float(np.mean([each[name][budget] for each in found])) for budget in found[0][name]} for name in found[0]
    }


def _group(group: Group, figures: Mapping[str, Document], rounds: Rounds) -> Document:
    return {
        "source": group.key[0],
        "rank_group": group.key[1],
        "rows": group.rows,
        "candidates": len(group.candidates),
        "timed": group.timed,
        "strategies": dict(figures),
        "oracles": {f"{noise:g}": oracle(group, noise, rounds.trials, ORACLE_DRAWS, rounds.seed) for noise in ORACLE_NOISES},
    }
