"""Does guided search find the winner if every memory prediction is wrong? Leave-source-out, on all visible tables.

    python -m benchmarks.search.wrong_verdicts [--data ../shared/data]

The predicted bytes of every configuration are multiplied by each of FACTORS before a group's first trial, which shifts the
verdict of all that are near the limit. Guided must still find the fastest configuration of a group within `BUDGET` trials in
`REACHED` of the groups, and with true predictions must not be behind the roofline order on any table.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.knowledge.table import read_table
from benchmarks.common.written_page import table
from benchmarks.prediction.scoring.facts import gather_facts
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.outcomes import read_labels
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search.search_targets import Line
from benchmarks.search.tables.contest_scores import group_figures, over_groups
from benchmarks.search.tables.groups import gather_groups
from benchmarks.search.tables.tournament import Rounds, Spread, play_all, predict_groups, workers

TABLES = ("measured.csv", "vtrain_visible.csv")
"""Tables of the data's folder; the second one may be absent."""
FACTORS = (1.0, 0.8, 1.2)
BUDGET, REACHED = 10, 0.95
BUDGETS = ("1", "3", "5", "10")
FOUND = 0.9999
"""Share of the best from which the winner was found: the rest is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifted:
    """Results of a strategy on a source, with memory predictions multiplied by the factor."""

    factor: float
    source: str
    strategy: str
    groups: int
    won: int
    """Groups whose fastest configuration was found within `BUDGET` trials."""
    shares: dict[str, float]
    """By budget."""
    failed: float
    """Failed trials of the first `BUDGET`."""


def measure(data: Path, spread: Spread, factors: Sequence[float] = FACTORS) -> list[Shifted]:
    """Play guided with each factor, and the roofline order, which has no predictions to shift."""
    rows = [row for name in TABLES if (data / name).is_file() for row in read_table(data / name).rows]
    facts, predictor = gather_facts(rows, read_labels(data / "failure_labels.csv")), TablePredictor()
    rounds = Rounds(strategies=("guided",), calibrate=Calibration.LEAVE_SOURCE_OUT, trials=BUDGET)
    gathered = gather_groups(facts, predictor, rounds.calibrate, rounds.min_timed)
    [known] = predict_groups(gathered, predictor, spread)
    found = []
    for strategy, factor in (*(("guided", factor) for factor in factors), ("roofline", 1.0)):
        forecasters = [forecaster.with_memory(factor) for forecaster in known]
        games = play_all(gathered.groups, forecasters, replace(rounds, strategies=(strategy,)), spread)
        for source in dict.fromkeys(group.key[0] for group in gathered.groups):
            played = [game[strategy][0] for group, game in zip(gathered.groups, games, strict=True) if group.key[0] == source]
            if broken := next((each.error for each in played if each.error), ""):
                raise RuntimeError(f"{strategy} on {source}: {broken}")
            figures = over_groups([group_figures([each], BUDGET) for each in played], (), rounds.seed)
            won = sum(max(each.shares, default=0.0) >= FOUND for each in played)
            found.append(
                Shifted(
                    factor=factor, source=source, strategy=strategy, groups=len(played), won=won,
                    shares={budget: figures["share"][budget] for budget in BUDGETS}, failed=figures["failed_in_first_10"],
                )
            )  # fmt: skip
        print(f"memory x {factor:g}, {strategy}: played", flush=True)
    return found


def lines(found: Sequence[Shifted]) -> list[Line]:
    """The targets."""
    targets = []
    for factor in sorted({each.factor for each in found if each.factor != 1.0}):
        ours = [each for each in found if each.factor == factor]
        won, groups = sum(each.won for each in ours), sum(each.groups for each in ours)
        targets.append(
            Line(
                target=f"memory x {factor:g}, sources left out: groups whose winner is found in {BUDGET}",
                bound=f"at least {REACHED:.0%}".replace("%", " %"), figure=f"{won} of {groups}", held=won >= REACHED * groups,
            )
        )  # fmt: skip
    pairs = [(guided, other) for guided in found for other in found if _rivals(guided, other)]
    behind = [
        f"{guided.source.split(' ')[0]} after {budget}: {guided.shares[budget]:.3f}, roofline {other.shares[budget]:.3f}"
        for guided, other in pairs
        for budget in BUDGETS
        if guided.shares[budget] < other.shares[budget] - 1e-9
    ]
    targets.append(
        Line(
            target="sources left out: tables and budgets at which roofline is ahead", bound="0",
            figure="; ".join(behind) or "0", held=not behind,
        )
    )  # fmt: skip
    return targets


def page(found: Sequence[Shifted]) -> list[str]:
    """A table of all results."""
    cells = [
        [each.source, each.strategy, f"{each.factor:g}", f"{each.won} of {each.groups}",
         *(f"{each.shares[budget]:.3f}" for budget in BUDGETS), f"{each.failed:.2f}"]
        for each in found
    ]  # fmt: skip
    headings = ["source", "strategy", "memory x", f"found in {BUDGET}", *(f"after {budget}" for budget in BUDGETS)]
    return table([*headings, f"failed of {BUDGET}"], cells)


def _rivals(guided: Shifted, other: Shifted) -> bool:
    return (
        guided.strategy == "guided"
        and other.strategy == "roofline"
        and guided.factor == other.factor
        and guided.source == other.source
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--factors", type=lambda text: [float(each) for each in text.split(",")], default=FACTORS)
    arguments = parser.parse_args()
    if not (arguments.data / TABLES[0]).is_file():
        print(f"{arguments.data / TABLES[0]} not found: nothing is measured; give its folder with --data")
        return 2
    with workers(0) as spread:
        found = measure(arguments.data, spread, arguments.factors)
    targets = lines(found)
    print(*page(found), *(f"{line.target}: {line.figure} ({line.bound})" for line in targets), sep="\n")
    return 0 if all(line.held for line in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
