"""The names of the strategies, for all that list them: nothing else is imported with them."""

STRATEGIES = ("tpe", "random", "grid", "gp", "nsga2", "smac", "deepspeed", "paddle", "expert")
"""The default first. `make_strategy` makes each."""
