"""Parity of a project's module with the plain module, in a rank where the project's packages have our names."""

from collections.abc import Mapping

from benchmarks.correctness.parity_cases import PROJECT, Case
from benchmarks.correctness.parity_rank import compare, reference_weights
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig


def difference(rank: int, ranks: int, knobs: Mapping[str, Value]) -> float:
    """Largest difference of a loss, a gradient norm or a weight after three steps. Every rank must call it."""
    case = Case(engine="native", ranks=ranks, model=PROJECT, config=TrialConfig(**knobs))
    report = compare(rank, case)
    return report.off if report.weights == reference_weights(case) else float("inf")
