"""The strategy that a request names, with the predictor that it uses."""

from typing import TYPE_CHECKING

from autotune.objective.ranking import Ranking
from autotune.request.request import JobRequest, Objective
from autotune.request.strategy_names import PREDICTING
from autotune.strategies.fronts import FrontStrategy, at_share
from autotune.strategies.registry import make_strategy
from autotune.strategies.strategy import Strategy
from search_spaces.models.model import Model
from search_spaces.space import SearchSpace

if TYPE_CHECKING:
    from autotune.strategies.guided.prior import Prior


def strategy_of(
    request: JobRequest, space: SearchSpace, model: Model, ranking: Ranking, prior: "Prior | None" = None
) -> Strategy:
    """Build the strategy that the request names. Predicting strategies use `prior`; None: the shipped coefficients."""
    if request.objective is Objective.PARETO:
        return FrontStrategy(lambda share: _one_strategy(request, space, model, at_share(ranking, share), prior))
    return _one_strategy(request, space, model, ranking, prior)


def _one_strategy(request: JobRequest, space: SearchSpace, model: Model, ranking: Ranking, prior: "Prior | None") -> Strategy:
    if request.strategy not in PREDICTING:
        return make_strategy(request.strategy, ranking.score)
    # NumPy and the equations are loaded only for strategies that predict.
    from autotune.strategies.guided.described import Guide
    from autotune.strategies.guided.prior import shipped_prior
    from autotune.strategies.guided.setting import setting_of
    from autotune.strategies.guided.space_forecaster import SpaceForecaster

    setting = setting_of(model, space, request.engine, ranking, request.fidelity)
    forecaster = SpaceForecaster(setting, prior or shipped_prior(space.cluster, request.engine))
    return make_strategy(request.strategy, ranking.score, Guide(forecaster=forecaster, value=ranking.value))
