"""Strategies by name. Each is imported when it is asked for: optimizers take long to load, and some are not installed."""

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from autotune.errors import RequestError
from autotune.request.strategy_names import PREDICTING, STRATEGIES
from autotune.strategies.strategy import Score, Strategy

if TYPE_CHECKING:
    from autotune.strategies.guided.described import Guide

BUILT_IN: Mapping[str, str] = {
    "guided": "autotune.strategies.guided.strategy:make_guided",
    "tpe": "autotune.strategies.tpe:TpeStrategy",
    "random": "autotune.strategies.random:RandomStrategy",
    "grid": "autotune.strategies.grid:GridStrategy",
    "tpe-predicted": "autotune.strategies.guided.predicted_first:make_tpe_predicted",
    "gp": "autotune.strategies.gp:GpStrategy",
    "nsga2": "autotune.strategies.nsga2:Nsga2Strategy",
    "smac": "autotune.evaluation.tuners.smac:SmacStrategy",
    "deepspeed": "autotune.evaluation.tuners.deepspeed:DeepSpeedStrategy",
    "paddle": "autotune.evaluation.tuners.paddle:PaddleStrategy",
    "expert": "autotune.evaluation.tuners.expert:ExpertStrategy",
}
"""Name -> module:attribute of what makes it: called with the score, and with a `Guide` where the name is in `PREDICTING`."""


def make_strategy(name: str, score: Score, guide: "Guide | None" = None, choices: Collection[str] = STRATEGIES) -> Strategy:
    """Return the strategy of that name.

    Args:
        name: which.
        score: what it maximises.
        guide: for those that predict.
        choices: what a refusal lists.

    Raises:
        RequestError: the name is unknown, its package is not installed, or it predicts and there is no guide.
    """
    if name not in BUILT_IN:
        raise RequestError("strategy", f"{name!r} is not known", f"use one of {', '.join(choices)}")
    if name in PREDICTING and guide is None:
        raise RequestError("strategy", f"{name} has nothing to predict with", "use tpe")
    module, _, attribute = BUILT_IN[name].partition(":")
    make = getattr(import_module(module), attribute)
    made: Strategy = make(score, guide) if name in PREDICTING else make(score)
    return made
