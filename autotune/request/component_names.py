"""The names of strategies and trackers, those of plug-ins included. Imports neither of them."""

from collections.abc import Collection, Mapping

from autotune.errors import MissingPackageError
from autotune.installed import has, install_line
from search_spaces.plugins import PluginGroup, load_plugin, plugin_names

STRATEGIES: Mapping[str, str] = {
    "guided": "autotune.strategies.guided.strategy:GuidedStrategy",
    "tpe": "autotune.strategies.optuna_samplers:TpeStrategy",
    "random": "autotune.strategies.walks:RandomStrategy",
    "grid": "autotune.strategies.walks:GridStrategy",
    "gp": "autotune.strategies.optuna_samplers:GpStrategy",
    "nsga2": "autotune.strategies.optuna_samplers:Nsga2Strategy",
}
"""Strategies of this package, the default first -> module:attribute of the factory. It is called with the score, and with a
`Guide` if the name is in `PREDICTING`."""
DEFAULT_STRATEGY = "guided"
PREDICTING = frozenset({"guided"})
"""Strategies that use predictions, and predict the gain of further trials."""


def strategy_names() -> tuple[str, ...]:
    """All strategies, those of plug-ins last."""
    return (*STRATEGIES, *plugin_names(PluginGroup.STRATEGIES))


TRACKERS = ("wandb", "mlflow", "tensorboard")
"""Trackers of this package. Each is also the name of its library's module, and of the extra that installs it."""


def tracker_names() -> tuple[str, ...]:
    """All trackers, those of plug-ins last."""
    return (*TRACKERS, *plugin_names(PluginGroup.TRACKERS))


def require_installed(names: Collection[str]) -> None:
    """Refuse trackers that cannot be used in this process.

    Raises:
        MissingPackageError: a library is not installed; the remedy is the line to type.
        PluginError: the plug-in of that name cannot be loaded.
    """
    for name in names:
        if name not in TRACKERS:
            load_plugin(PluginGroup.TRACKERS, name)
        elif not has(name):
            raise MissingPackageError(f"tracker {name}", "is not installed", install_line(name))
