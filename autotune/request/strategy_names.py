"""The names of the strategies, for all that list them: nothing else is imported with them."""

STRATEGIES = ("guided", "tpe", "random", "grid", "tpe-predicted", "gp", "nsga2", "smac", "deepspeed", "paddle", "expert")
"""The default first. `make_strategy` makes each."""
PREDICTING = frozenset({"guided", "tpe-predicted"})
"""Those that predict."""
FORESEEING = frozenset({"guided"})
"""Those that can tell what further trials may bring."""
