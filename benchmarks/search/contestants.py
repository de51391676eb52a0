"""Strategies that compete with each other: the product's own, and baselines that only serve to measure it."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from autotune.errors import RequestError
from autotune.strategies import make_strategy
from autotune.strategies.guided.described import Guide
from autotune.strategies.guided.prior import learn_prior, setting_of
from autotune.strategies.guided.space_forecaster import SpaceForecaster
from autotune.strategies.strategy import Score, Strategy

if TYPE_CHECKING:
    from autotune.session.session import Session
    from storage.store import Store

BASELINES: Mapping[str, str] = {
    "tpe-predicted": "predicted_first:PredictedFirst",
    "smac": "smac:SmacStrategy",
    "deepspeed": "deepspeed:DeepSpeedStrategy",
    "paddle": "paddle:PaddleStrategy",
    "expert": "expert:ExpertStrategy",
    "roofline": "roofline:RooflineStrategy",
}
"""Name -> module:class in `benchmarks.search.baselines`. Each is imported on first use: SMAC3 may not be installed."""
CONTESTANTS = (
    "guided", "tpe", "random", "grid", "tpe-predicted", "gp", "nsga2", "smac", "deepspeed", "paddle", "expert", "roofline",
)  # fmt: skip
"""All of them, in the order of tables."""
SEEDLESS = frozenset({"guided", "grid"})
"""Those whose proposals do not depend on the seed."""
SLOW = frozenset({"gp", "smac"})
"""Those whose decision takes seconds."""
PREDICTING = "tpe-predicted"
"""The baseline that gets predictions."""


def make_contestant(name: str, score: Score, guide: Guide) -> Strategy:
    """Create the strategy or baseline of that name.

    Raises:
        RequestError: the name is unknown, or its package is not installed.
    """
    if name not in CONTESTANTS:
        raise RequestError("strategy", f"{name!r} is not known", f"use one of {', '.join(CONTESTANTS)}")
    if name not in BASELINES:
        return make_strategy(name, score, guide)
    module, _, attribute = BASELINES[name].partition(":")
    make = getattr(import_module(f"benchmarks.search.baselines.{module}"), attribute)
    strategy: Strategy = make(score, guide) if name == PREDICTING else make(score)
    return strategy


def with_contestant(session: "Session", name: str, store: "Store") -> "Session":
    """The session of a job that a baseline plays; a strategy of the product is named by the request itself."""
    if name not in BASELINES:
        return session
    request, ranking = session.request, session.ranking
    setting = setting_of(session.model, session.space, request.engine, ranking, request.fidelity)
    forecaster = SpaceForecaster(setting, learn_prior(store, session.cluster, request.engine))
    return replace(session, strategy=make_contestant(name, ranking.score, Guide(forecaster=forecaster, value=ranking.value)))
