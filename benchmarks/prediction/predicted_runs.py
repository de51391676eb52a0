"""Published runs with what is predicted for them, and how far predictions are, in all and by model."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.knowledge.row import TableRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """A published run, and what is predicted for it. Seconds of a step; `low` and `high` are the 90 % band."""

    row: TableRow
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        """Whether the band contains the measurement."""
        return self.low <= self.measured <= self.high


def _of_models(found: Sequence[PredictedRun]) -> dict[str, list[PredictedRun]]:
    """The runs by model."""
    models: dict[str, list[PredictedRun]] = defaultdict(list)
    for run in found:
        models[str(run.row.model_name)].append(run)
    return models


def summary(found: Sequence[PredictedRun], kind: str) -> str:
    """All of them in a line of Markdown; `kind`: what they are, in the plural."""
    errors = np.abs([run.error for run in found])
    return (
        f"**{len(found)} {kind}: median error {np.median(errors):.1%}, mean {np.mean(errors):.1%}, largest "
        f"{np.max(errors):.1%}; {np.mean([run.inside for run in found]):.0%} in the 90 % band.**"
    )


def table_of_models(found: Sequence[PredictedRun], kind: str) -> str:
    """A Markdown table with a line for each model, in the order of the runs."""
    return "\n".join(
        [
            f"| model | {kind} | devices | median error | mean | largest | in the 90 % band |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *(_line(name, group) for name, group in _of_models(found).items()),
        ]
    )


def _line(name: str, group: Sequence[PredictedRun]) -> str:
    errors = np.abs([run.error for run in group])
    counts = sorted(run.row.num_gpus or 0 for run in group)
    return (
        f"| {name} | {len(group)} | {counts[0]:,} to {counts[-1]:,} | {np.median(errors):.1%} | {np.mean(errors):.1%} "
        f"| {np.max(errors):.1%} | {sum(run.inside for run in group)} |"
    )
