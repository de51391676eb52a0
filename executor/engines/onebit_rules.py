"""Settings that 1-bit Adam cannot be combined with. Does not import torch, since the search reads it."""

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
    problem="every rank of 1-bit Adam needs the whole momentum and its own whole error: there is no state to shard",
    remedy="set zero_stage=0, or use optimizer=adamw with reduce_dtype=int8",
    holds=_shards,
)
ONEBIT_DIMENSIONS = Combination(
    rule="onebit-dimensions",
    reads=("optimizer", *DIMENSIONS),
    problem="copies of a parameter on tensor, pipeline or expert ranks would be in different blocks of signs and drift apart",
    remedy="use only data and context ranks, or optimizer=adamw with reduce_dtype=int8",
    holds=_divides_the_model,
)
