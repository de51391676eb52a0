"""What 1-bit Adam is refused with. Imports no torch: the search reads it."""

from search_spaces.capability import Combination
from search_spaces.trial_config import TrialConfig

DIMENSIONS = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")


def _is_onebit(config: TrialConfig) -> bool:
    return config.optimizer == "onebit_adam"


def _shards(config: TrialConfig, _: int) -> bool:
    return _is_onebit(config) and config.zero_stage > 0


def _divides_the_model(config: TrialConfig, _: int) -> bool:
    return _is_onebit(config) and any(getattr(config, name) > 1 for name in DIMENSIONS)


ONEBIT_STAGE = Combination(
    rule="onebit-stage",
    reads=("optimizer", "zero_stage"),
    problem="every rank of 1-bit Adam needs all of the momentum and of what it has not sent yet: there is no state to share",
    remedy="set zero_stage=0, or use optimizer=adamw with reduce_dtype=int8",
    holds=_shards,
)
ONEBIT_DIMENSIONS = Combination(
    rule="onebit-dimensions",
    reads=("optimizer", *DIMENSIONS),
    problem="copies of one parameter on tensor, pipeline or expert ranks lie in other blocks of signs, and would drift apart",
    remedy="use data and context ranks alone, or optimizer=adamw with reduce_dtype=int8",
    holds=_divides_the_model,
)
