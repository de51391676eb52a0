"""The names of the strategies, without importing the strategies."""

from search_spaces.plugins import Group, plugin_names

STRATEGIES = (
    "guided", "tpe", "random", "grid", "tpe-predicted", "gp", "nsga2", "smac", "deepspeed", "paddle", "expert", "roofline",
)  # fmt: skip
"""Strategies of this package, the default first."""
PREDICTING = frozenset({"guided", "tpe-predicted"})
"""Strategies that use predictions."""
GAIN_PREDICTING = frozenset({"guided"})
"""Strategies that predict the gain of further trials."""


def strategy_names() -> tuple[str, ...]:
    """All strategies, those of plug-ins last."""
    return (*STRATEGIES, *plugin_names(Group.STRATEGIES))
