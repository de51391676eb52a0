"""Targets of guided search, source by source. Sources are named only here: the package does not depend on them."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.prediction.scoring.folds import Calibration

Document = Mapping[str, Any]
GROUP, SOURCE = Calibration.LEAVE_GROUP_OUT, Calibration.LEAVE_SOURCE_OUT
HAGEMANN, PLAYBOOK = "Hagemann", "HF Ultra-Scale Playbook"
LOWER = 0.03
"""How much lower shares may be without the source's rows in the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the table of targets."""

    target: str
    bound: str
    figure: str
    held: bool | None
    """None: not measured."""
    oracle: str = ""
    """Figure of an oracle that knows every rate, at 5 and 10 % noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure of guided search on a source, and its bound."""

    source: str
    """Prefix of the source's name in the table."""
    score: str
    budget: int
    bound: float
    at_least: bool = True

    def line(self, documents: Mapping[Calibration, Document]) -> Line:
        """The line of this target."""
        title = f"{self.source}: {_NAMES[self.score].format(self.budget)}"
        bound = f"{'at least' if self.at_least else 'at most'} {self.bound:g}"
        found = of_source(documents[GROUP], self.source)
        if found is None:
            return Line(target=title, bound=bound, figure="no such source in the table", held=None)
        value = _figure(found["strategies"]["guided"], self.score, self.budget)
        held = operator.ge(value, self.bound) if self.at_least else operator.le(value, self.bound)
        oracles = [_figure(each, self.score, self.budget) for each in found["oracles"].values() if self.score in each]
        figure = f"{value:.4f}, of {found['group_count']} groups"
        return Line(target=title, bound=bound, figure=figure, held=held, oracle=", ".join(f"{each:.4f}" for each in oracles))


_NAMES = {
    "share": "share after {}",
    "within_5_percent": "within 5 % after {}",
    "oom_in_first_10": "out of memory in the first 10",
}
TARGETS = (
    Target(source=HAGEMANN, score="share", budget=3, bound=0.97),
    Target(source=HAGEMANN, score="share", budget=5, bound=0.99),
    Target(source=HAGEMANN, score="share", budget=10, bound=0.999),
    Target(source=HAGEMANN, score="within_5_percent", budget=5, bound=0.9),
    Target(source=HAGEMANN, score="oom_in_first_10", budget=10, bound=0.5, at_least=False),
    Target(source=PLAYBOOK, score="share", budget=3, bound=0.94),
    Target(source=PLAYBOOK, score="share", budget=5, bound=0.97),
    Target(source=PLAYBOOK, score="share", budget=10, bound=0.99),
    Target(source=PLAYBOOK, score="within_5_percent", budget=5, bound=0.9),
)


def transfers(documents: Mapping[Calibration, Document]) -> list[Line]:
    """Loss without the source's rows in the fit."""
    lines = []
    for source in (HAGEMANN, PLAYBOOK):
        with_it, without = (of_source(documents[mode], source) for mode in (GROUP, SOURCE))
        for budget in (3, 5, 10):
            title = f"{source}: share after {budget}, lost by leaving out the source"
            lines.append(_transfer(title, with_it, without, budget))
    return lines


def of_source(document: Document, name: str) -> Document | None:
    """The figures of the source whose name begins with `name`."""
    return next((figures for source, figures in document["by_source"].items() if source.startswith(name)), None)


def _transfer(title: str, with_it: Document | None, without: Document | None, budget: int) -> Line:
    bound = f"at most {LOWER:g}"
    if with_it is None or without is None:
        return Line(target=title, bound=bound, figure="no such source in the table", held=None)
    one, other = (each["strategies"]["guided"]["share"][str(budget)] for each in (with_it, without))
    return Line(target=title, bound=bound, figure=f"{one - other:+.4f} ({one:.4f} to {other:.4f})", held=one - other <= LOWER)


def _figure(figures: Document, score: str, budget: int) -> float:
    return float(figures[score][str(budget)] if isinstance(figures[score], Mapping) else figures[score])
