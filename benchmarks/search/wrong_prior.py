"""Guided search with deliberately wrong predictions: coefficients are changed at random after fitting.

    python -m benchmarks.search.wrong_prior [--data ../shared/data] [--draws 8] [--markdown FILE]

Each draw multiplies bandwidths, compute efficiencies and the memory of activations by factors that are log-uniform between
the bounds of RANGES, before any trial of a group. Guided must still find nearly the best in ten trials, and must not fall
behind TPE, which does not predict, by more than the 95 % interval of their paired difference over groups.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.knowledge.table import read_table
from autotune.prediction.equations.coefficients import Coefficients
from benchmarks.common.written_page import table
from benchmarks.prediction.scoring.facts import gather_facts
from benchmarks.prediction.scoring.outcomes import read_labels
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search.search_targets import HAGEMANN, PLAYBOOK, Line
from benchmarks.search.tables.contest_scores import group_figures, over_groups, paired
from benchmarks.search.tables.groups import Gathered, gather_groups
from benchmarks.search.tables.table_forecaster import TableForecaster
from benchmarks.search.tables.tournament import Games, Rounds, Spread, play_all, predict_groups, workers

DRAWS = 8
REACHED = 0.95
"""Share of the best that guided must reach after `BUDGET` trials on each of FAMILIES."""
BUDGET = 10
FAMILIES = (HAGEMANN, PLAYBOOK)
RANGES: Mapping[str, tuple[tuple[str, ...], float, float]] = {
    "bandwidth": (("link_efficiency", "network_efficiency"), 0.5, 2.0),
    "compute": (("matrix_efficiency", "attention_efficiency"), 0.6, 1.5),
    "activations": (("activation_scale",), 0.75, 1.3),
}
"""Name -> the coefficients that one factor multiplies, and its bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """Multiplies coefficients by wrong factors."""

    factors: Mapping[str, float]
    """Name of RANGES -> factor."""

    def __call__(self, rates: Coefficients) -> Coefficients:
        """The changed coefficients."""
        changes: dict[str, Any] = {}
        for name, factor in self.factors.items():
            changes |= {each: getattr(rates, each) * factor for each in RANGES[name][0]}
        return replace(rates, **changes)


def drawn(count: int) -> list[Wrong]:
    """`count` draws, the same on every run."""
    random = np.random.default_rng(0)
    return [
        Wrong(
            factors={name: float(np.exp(random.uniform(np.log(low), np.log(high)))) for name, (_, low, high) in RANGES.items()}
        )
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of one draw in one family."""

    wrong: Wrong
    source: str
    shares: Mapping[str, float]
    """Shares of guided, by budget."""
    ahead: Mapping[str, Any]
    """Lead over TPE, by budget: mean and interval of the difference."""

    @property
    def behind(self) -> list[str]:
        """Budgets at which guided is worse than TPE beyond the interval."""
        return [budget for budget, each in self.ahead.items() if each["interval"] is not None and each["interval"][1] < 0]


def measure(
    gathered: Gathered,
    known: Sequence[Sequence[TableForecaster]],
    wrongs: Sequence[Wrong],
    tpe: Games,
    rounds: Rounds,
    spread: Spread,
) -> list[Measured]:
    """Play guided with each draw's predictions. `tpe`: TPE's games on the same groups, which do not use predictions."""
    guided_only = replace(rounds, strategies=("guided",))
    found = []
    for wrong, forecasters in zip(wrongs, known, strict=True):
        games = play_all(gathered.groups, forecasters, guided_only, spread)
        found += [one for source in FAMILIES if (one := _measured(gathered, wrong, source, games, tpe, rounds))]
        print(f"wrong prior: {len(found)} of {len(wrongs) * len(FAMILIES)}", flush=True)
    return found


def lines(found: Sequence[Measured]) -> list[Line]:
    """The targets, for the worst of all draws."""
    targets = []
    for source in FAMILIES:
        ours = [each for each in found if each.source.startswith(source)]
        share = f"{source}, prior wrong: share after {BUDGET} in the worst draw"
        behind = f"{source}, prior wrong: draws and budgets at which TPE is ahead beyond the interval"
        if not ours:
            absent = "no such source in the table"
            targets += [Line(target=each, bound="", figure=absent, held=None) for each in (share, behind)]
            continue
        worst = min(each.shares[str(BUDGET)] for each in ours)
        count = sum(len(each.behind) for each in ours)
        targets += [
            Line(
                target=share, bound=f"at least {REACHED:g}", figure=f"{worst:.4f}, of {len(ours)} draws", held=worst >= REACHED
            ),
            Line(target=behind, bound="0", figure=f"{count} of {sum(len(each.ahead) for each in ours)}", held=count == 0),
        ]
    return targets


def page(found: Sequence[Measured]) -> list[str]:
    """A table of all draws."""
    if not found:
        return ["Not measured."]
    budgets = list(found[0].shares)
    cells = [
        [
            each.source,
            *(f"{factor:.2f}" for factor in each.wrong.factors.values()),
            *(f"{each.shares[budget]:.3f} ({each.ahead[budget]['mean']:+.3f})" for budget in budgets),
        ]
        for each in found
    ]
    return table(["source", *RANGES, *(f"after {budget}" for budget in budgets)], cells)


def _measured(gathered: Gathered, wrong: Wrong, source: str, games: Games, tpe: Games, rounds: Rounds) -> Measured | None:
    places = [at for at, group in enumerate(gathered.groups) if group.key[0].startswith(source)]
    if not places:
        return None
    ours = [group_figures(games[at]["guided"], rounds.trials) for at in places]
    theirs = [group_figures(tpe[at]["tpe"], rounds.trials) for at in places]
    return Measured(
        wrong=wrong, source=source, shares=over_groups(ours, (), rounds.seed)["share"], ahead=paired(ours, theirs, rounds.seed)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--seeds", type=int, default=20, help="games of TPE on a group")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    if not (arguments.data / "measured.csv").is_file():
        print(f"{arguments.data / 'measured.csv'} not found: nothing is measured; give its folder with --data")
        return 2
    facts = gather_facts(read_table(arguments.data / "measured.csv").rows, read_labels(arguments.data / "failure_labels.csv"))
    rounds, wrongs, predictor = Rounds(strategies=("tpe",), seeds=arguments.seeds), drawn(arguments.draws), TablePredictor()
    gathered = gather_groups(facts, predictor, rounds.calibrate, rounds.min_timed)
    with workers(0) as spread:
        known = predict_groups(gathered, predictor, spread, wrongs)
        tpe = play_all(gathered.groups, known[0], rounds, spread)
        found = measure(gathered, known, wrongs, tpe, rounds, spread)
    targets = lines(found)
    text = "\n".join(page(found))
    print(text, *(f"{line.target}: {line.figure} ({line.bound})" for line in targets), sep="\n")
    if arguments.markdown:
        arguments.markdown.write_text(text + "\n", encoding="utf-8")
    return 0 if all(line.held for line in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
