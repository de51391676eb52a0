"""The report of a contest on a table as a JSON document: shares of the best found after given numbers of trials."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autotune.knowledge.row import blinded
from autotune.knowledge.table import MeasurementTable
from benchmarks.prediction.scoring.configurations import problems_of
from benchmarks.prediction.scoring.facts import Facts, gather_facts
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.outcomes import NO_LABELS, Labels
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search.tables.contest_scores import group_figures, mean_oracle, oracle, over_groups, paired
from benchmarks.search.tables.groups import Gathered, Group, gather_groups
from benchmarks.search.tables.tournament import (
    SLOW_GAMES,
    Games,
    Rounds,
    play_all,
    predict_groups,
    workers,
)

Document = dict[str, Any]
FORMAT = 1
ORACLE_NOISES = (0.05, 0.1)
ORACLE_DRAWS = 400
RULES = (
    "share: highest throughput among the trials so far over the highest that the group has; 0 while none ran",
    "a configuration that failed for any cause costs a trial; none is tried twice; what the table does not have costs nothing",
    "rows of one configuration in a group are one candidate: it ran if any ran, its throughput the median of those",
    "a trial returns its throughput, or that it failed and whether the table names memory: no label, no peak, no other row",
    "candidates stand in the order of their configurations, whatever the order of the table",
    "coefficients are fitted without the group's rows (leave-group-out) or without any of its source (leave-source-out)",
    f"strategies that take seconds to decide (gp, smac) play {SLOW_GAMES} game on each group",
    "means over groups, each the mean of its seeds; intervals of 95 % over groups, by resampling; none for a single group",
    "out of memory: as the table or a label says; failed: that, and whatever else has no time",
    "decision time: the 95th percentile of all decisions but each game's first",
    "oracle: knows each candidate's throughput except for one draw of that noise, and tries them in that order, no failed one",
    "a strategy that has tried everything, or cannot go on, keeps its result",
)


def bench_search(
    table: MeasurementTable,
    rounds: Rounds,
    labels: Labels = NO_LABELS,
    predictor: TablePredictor | None = None,
) -> Document:
    """Play every strategy on every group of the table."""
    predictor = predictor or TablePredictor()
    facts = gather_facts(table.rows, labels)
    gathered = gather_groups(facts, predictor, rounds.calibrate, rounds.min_timed)
    with workers(rounds.processes if gathered.groups else 1) as spread:
        [known] = predict_groups(gathered, predictor, spread)
        games = play_all(gathered.groups, known, rounds, spread)
    return document(table, facts, gathered, games, rounds, labels) | _in_sample(facts, predictor, rounds)


def document(
    table: MeasurementTable, facts: Facts, gathered: Gathered, games: Games, rounds: Rounds, labels: Labels
) -> Document:
    """Figures of the games."""
    figures = [{name: group_figures(found, rounds.trials) for name, found in each.items()} for each in games]
    groups = [_group(group, each, rounds) for group, each in zip(gathered.groups, figures, strict=True)]
    sources = list(dict.fromkeys(group.key[0] for group in gathered.groups))
    ours = {source: [at for at, group in enumerate(gathered.groups) if group.key[0] == source] for source in sources}
    skipped = sorted((*table.skipped, *gathered.skipped), key=lambda skip: skip.line)
    return {
        "format": FORMAT,
        "table": str(table.path),
        "calibrate": str(rounds.calibrate),
        "trials": rounds.trials,
        "seeds": rounds.seeds,
        "seed": rounds.seed,
        "min_timed": rounds.min_timed,
        "rows": {
            "in_table": len(table.rows) + len(table.skipped),
            "without_a_group": sum(not row.rank_group for row in facts.rows),
            "in_groups": sum(group.rows for group in gathered.groups),
        },
        **_over(groups, games, list(range(len(groups))), rounds),
        "by_source": {source: _over(groups, games, places, rounds) for source, places in ours.items()},
        "groups": groups,
        "small_groups": [{"source": key[0], "rank_group": key[1], "timed": timed} for key, timed in gathered.small.items()],
        "cut_short": _cut_short(gathered.groups, games),
        "skipped": [asdict(skip) for skip in skipped],
        "problems": [asdict(problem) for problem in (*problems_of(table), *labels.problems)],
        "rules": list(RULES),
    }


def _over(groups: Sequence[Document], games: Games, places: Sequence[int], rounds: Rounds) -> Document:
    """Figures over some of the groups."""
    first, *others = rounds.strategies
    by_name = {name: [groups[at]["strategies"][name] for at in places] for name in rounds.strategies}
    played = {name: [each for at in places for each in games[at][name]] for name in rounds.strategies}
    return {
        "group_count": len(places),
        "strategies": {name: over_groups(by_name[name], played[name], rounds.seed) for name in rounds.strategies},
        "oracles": {
            f"{noise:g}": mean_oracle([groups[at]["oracles"][f"{noise:g}"] for at in places]) for noise in ORACLE_NOISES
        },
        "ahead": {f"{first} over {name}": paired(by_name[first], by_name[name], rounds.seed) for name in others},
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


def _cut_short(groups: Sequence[Group], games: Games) -> list[Document]:
    """Strategies that violated their interface or raised, each with the first group where they did."""
    found: dict[str, Document] = {}
    for group, each in zip(groups, games, strict=True):
        for name, played in each.items():
            for game in (game for game in played if game.error):
                first = {"strategy": name, "games": 0, "error": game.error, "source": group.key[0], "rank_group": group.key[1]}
                found.setdefault(name, first)["games"] += 1
    return list(found.values())


def _in_sample(facts: Facts, predictor: TablePredictor, rounds: Rounds) -> Document:
    count = predictor.in_sample([blinded(row) for row in facts.rows]) if rounds.calibrate is Calibration.NONE else 0
    return {"in_sample_rows": count}
