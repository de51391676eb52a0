"""Strategies by name. Each is imported on first use: optimizers take long to load, and some are not installed."""

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from autotune.errors import RequestError
from autotune.request.component_names import PREDICTING, strategy_names
from autotune.strategies.strategy import Score, Strategy
from search_spaces.plugins import PluginGroup, load_plugin

if TYPE_CHECKING:
    from autotune.strategies.guided.described import Guide

BUILT_IN: Mapping[str, str] = {
    "guided": "autotune.strategies.guided.strategy:make_guided",
    "tpe": "autotune.strategies.optuna_samplers:TpeStrategy",
    "random": "autotune.strategies.walks:RandomStrategy",
    "grid": "autotune.strategies.walks:GridStrategy",
    "tpe-predicted": "autotune.strategies.guided.predicted_first:make_tpe_predicted",
    "gp": "autotune.strategies.optuna_samplers:GpStrategy",
    "nsga2": "autotune.strategies.optuna_samplers:Nsga2Strategy",
    "smac": "autotune.strategies.smac:SmacStrategy",
    "deepspeed": "autotune.strategies.deepspeed:DeepSpeedStrategy",
    "paddle": "autotune.strategies.paddle:PaddleStrategy",
    "expert": "autotune.strategies.expert:ExpertStrategy",
    "roofline": "autotune.strategies.roofline:RooflineStrategy",
}
"""Name -> module:attribute of the factory: called with the score, and with a `Guide` if the name is in `PREDICTING`."""


def make_strategy(name: str, score: Score, guide: "Guide | None" = None, choices: Collection[str] = ()) -> Strategy:
    """Return the strategy of that name.

    Args:
        name: of the strategy.
        score: what it maximises.
        guide: for strategies that predict.
        choices: names listed in the error message.

    Raises:
        RequestError: the name is unknown, its package is not installed, or it predicts and no guide is given.
    """
    if name not in strategy_names():
        raise RequestError("strategy", f"{name!r} is not known", f"use one of {', '.join(choices or strategy_names())}")
    if name in PREDICTING and guide is None:
        raise RequestError("strategy", f"{name} has nothing to predict with", "use tpe")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        make = getattr(import_module(module), attribute)
    else:
        make = load_plugin(PluginGroup.STRATEGIES, name)
    strategy: Strategy = make(score, guide) if name in PREDICTING else make(score)
    return strategy
