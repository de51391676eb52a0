"""Settings that expert parallelism cannot be combined with. Does not import torch, since the search reads it."""

from search_spaces.capability import Combination
from search_spaces.knobs.conditions import METHODS
from search_spaces.training.adapters import adapts
from search_spaces.trial_config import TrialConfig


def _copies_shards(config: TrialConfig, _: int) -> bool:
    return config.expert_parallel_size > 1 and config.zero_stage == 3 and config.hsdp_shard_size > 0


def _compiles(config: TrialConfig, _: int) -> bool:
    return config.expert_parallel_size > 1 and config.compile_blocks


def _adapts(config: TrialConfig, _: int) -> bool:
    return config.expert_parallel_size > 1 and adapts(config)


EXPERTS_ADAPTERS = Combination(
    rule="experts-adapters",
    reads=("expert_parallel_size", *METHODS),
    problem="frozen parameters are sharded twice: over all data-parallel ranks, and over those with the same experts",
    remedy="leave adapters and virtual tokens at 0, or set expert_parallel_size=1",
    holds=_adapts,
)
EXPERTS_COPIES = Combination(
    rule="experts-copies",
    reads=("expert_parallel_size", "zero_stage", "hsdp_shard_size"),
    problem="HSDP copies need the same parameters on every data-parallel rank, but expert ranks hold different experts",
    remedy="leave hsdp_shard_size at 0, or set expert_parallel_size=1",
    holds=_copies_shards,
)
EXPERTS_COMPILED = Combination(
    rule="experts-compiled",
    reads=("expert_parallel_size", "compile_blocks"),
    problem="the number of tokens sent to experts on other ranks changes from step to step, and blocks are recompiled for each "
    "number: a trial would measure compilation",
    remedy="set compile_blocks=false, or expert_parallel_size=1",
    holds=_compiles,
)
