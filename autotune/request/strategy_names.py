"""The names of the strategies, for all that list them: no strategy is imported with them."""

from search_spaces.plugins import Group, plugin_names

STRATEGIES = ("guided", "tpe", "random", "grid", "tpe-predicted", "gp", "nsga2", "smac", "deepspeed", "paddle", "expert")
"""Those of this package, the default first."""
PREDICTING = frozenset({"guided", "tpe-predicted"})
"""Those that predict."""
FORESEEING = frozenset({"guided"})
"""Those that predict the gain of further trials."""


def strategy_names() -> tuple[str, ...]:
    """All of them, those of plug-ins last."""
    return (*STRATEGIES, *plugin_names(Group.STRATEGIES))
