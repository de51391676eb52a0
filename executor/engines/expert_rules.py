"""What experts on different ranks are refused with. Imports no torch: the search reads it."""

from search_spaces.adapters import METHODS, adapts
from search_spaces.capability import Combination
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
    problem="frozen parameters are shared out twice: over every data-parallel rank, and over those with the same experts",
    remedy="leave adapters and virtual tokens at 0, or set expert_parallel_size=1",
    holds=_adapts,
)
EXPERTS_COPIES = Combination(
    rule="experts-copies",
    reads=("expert_parallel_size", "zero_stage", "hsdp_shard_size"),
    problem="copies of the sharded states are made of what every data-parallel rank holds, and of experts each holds its own",
    remedy="leave hsdp_shard_size at 0, or set expert_parallel_size=1",
    holds=_copies_shards,
)
EXPERTS_COMPILED = Combination(
    rule="experts-compiled",
    reads=("expert_parallel_size", "compile_blocks"),
    problem="how many tokens travel to the experts of another rank changes from step to step, and blocks are compiled anew for "
    "other numbers: a trial would measure compilation",
    remedy="set compile_blocks=false, or expert_parallel_size=1",
    holds=_compiles,
)
