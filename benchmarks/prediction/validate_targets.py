"""Targets of predictions, source by source. Sources are named only here: the package does not depend on them."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.prediction.scoring.folds import Calibration

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the table of targets."""

    target: str
    """Source and figure."""
    mode: str
    """Calibration mode: the rows that the predictor was fitted on."""
    bound: str
    figure: str
    held: bool | None
    """None: not measured."""
    ceiling: str = ""
    """Figure of a perfect predictor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure of a source in a mode's document, and its bound."""

    source: str
    """Prefix of the source's name in the table."""
    title: str
    mode: Calibration
    score: str
    figure: str
    bound: float
    at_least: bool
    ceiling: str = ""
    """Name of the ceiling; empty: none."""

    def line(self, documents: Mapping[Calibration, Document]) -> Line:
        """The line of this target."""
        found = [figures for name, figures in documents[self.mode]["by_source"].items() if name.startswith(self.source)]
        if not found:
            return self._line("no such source in the table", None)
        scores = found[0][self.score]
        value = scores[self.figure]
        count = scores["groups" if self.score == "rank" else "rows"]
        unit = "groups" if self.score == "rank" else "rows"
        if value is None:
            return self._line(f"none, of {count:,g} {unit}", None)
        held = operator.ge(value, self.bound) if self.at_least else operator.le(value, self.bound)
        return self._line(f"{self._text(value)}, of {count:,g} {unit}", held, self._ceiling(scores))

    def _line(self, figure: str, held: bool | None, ceiling: str = "") -> Line:
        sense = "at least" if self.at_least else "at most"
        bound = f"{sense} {self._text(self.bound)}"
        return Line(target=self.title, mode=str(self.mode), bound=bound, figure=figure, held=held, ceiling=ceiling)

    def _ceiling(self, scores: Document) -> str:
        if not self.ceiling:
            return ""
        own = scores["ceiling"][self.ceiling]
        others = [
            f"{found[self.ceiling]:.3f} at {100 * float(noise):.0f} %" for noise, found in scores["ceiling_at_noise"].items()
        ]
        return f"{own:.3f} at 1 % noise, assumed; {', '.join(others)}" if scores["ceiling_assumes_noise"] else f"{own:.3f}"

    def _text(self, value: float) -> str:
        if self.figure in ("missed", "false_alarms"):
            return f"{value:g}"
        return f"{100 * value:.1f} %" if "error" in self.figure or self.figure == "false_alarm_share" else f"{value:.3f}"


def _target(source: str, title: str, mode: Calibration, path: str, bound: float, at_least: bool, ceiling: str = "") -> Target:
    score, figure = path.split(".")
    return Target(
        source=source, title=title, mode=mode, score=score, figure=figure, bound=bound, at_least=at_least, ceiling=ceiling
    )


SOURCE, GROUP, FEW = Calibration.LEAVE_SOURCE_OUT, Calibration.LEAVE_GROUP_OUT, Calibration.FEW_ROWS
HAGEMANN, PLAYBOOK, TITAN, LITGPT = "Hagemann", "HF Ultra-Scale Playbook", "torchtitan", "LitGPT"
FOUNDRY, BRIDGE = "MosaicML llm-foundry", "NVIDIA Megatron-Bridge"
SHARE, RANKS = "predicted_best_share_mean", "spearman_median"

TARGETS = (
    _target(HAGEMANN, "Hagemann: out-of-memory recall", SOURCE, "oom.recall", 0.97, True),
    _target(HAGEMANN, "Hagemann: out-of-memory precision", SOURCE, "oom.precision", 0.97, True),
    _target(PLAYBOOK, "Playbook: recall on certain and likely labels", SOURCE, "oom.recall", 0.97, True),
    _target(PLAYBOOK, "Playbook: rows that ran called out of memory", SOURCE, "oom.false_alarm_share", 0.02, False),
    _target(PLAYBOOK, "Playbook: memory, median error", SOURCE, "memory.median_abs_error", 0.04, False),
    _target(PLAYBOOK, "Playbook: memory, 95th percentile", SOURCE, "memory.p95_abs_error", 0.12, False),
    _target(TITAN, "torchtitan: memory, median error", SOURCE, "memory.median_abs_error", 0.04, False),
    _target(TITAN, "torchtitan: memory, 95th percentile", SOURCE, "memory.p95_abs_error", 0.12, False),
    _target(LITGPT, "LitGPT: memory, median error", SOURCE, "memory.median_abs_error", 0.06, False),
    _target(LITGPT, "LitGPT: out of memory that is missed", SOURCE, "oom.missed", 1, False),
    _target(LITGPT, "LitGPT: false alarms", SOURCE, "oom.false_alarms", 1, False),
    _target(HAGEMANN, "Hagemann: rank correlation, median", GROUP, "rank.spearman_median", 0.93, True, RANKS),
    _target(PLAYBOOK, "Playbook: rank correlation, median", GROUP, "rank.spearman_median", 0.93, True, RANKS),
    _target(HAGEMANN, "Hagemann: predicted best's share, mean", GROUP, "rank.predicted_best_share_mean", 0.97, True, SHARE),
    _target(PLAYBOOK, "Playbook: predicted best's share, mean", GROUP, "rank.predicted_best_share_mean", 0.90, True, SHARE),
    _target(FOUNDRY, "foundry: time, median error from 3 rows", FEW, "time.median_abs_error", 0.06, False),
    _target(BRIDGE, "Megatron-Bridge: rows called out of memory", SOURCE, "oom.false_alarm_share", 0.05, False),
)
