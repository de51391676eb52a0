"""Settings that data schedules cannot be combined with. Does not import torch, since the search reads it."""

from search_spaces.capability import Combination
from search_spaces.training.data_schedule import is_scheduled
from search_spaces.trial_config import TrialConfig

_SCHEDULES = ("curriculum_start_length", "random_ltd_start_tokens")


def _compiles_changing_shapes(config: TrialConfig, _: int) -> bool:
    return config.compile_blocks and is_scheduled(config)


def _has_both(config: TrialConfig, _: int) -> bool:
    return bool(config.curriculum_start_length and config.random_ltd_start_tokens)


def _drops_of_divided_sequences(config: TrialConfig, _: int) -> bool:
    divided = config.context_parallel_size > 1 or config.sequence_parallel
    return divided and config.random_ltd_start_tokens > 0


SCHEDULE_COMPILED = Combination(
    rule="schedule-compiled",
    reads=("compile_blocks", *_SCHEDULES),
    problem="blocks are recompiled for each shape of a data schedule, to kernels other than those of the steps that a trial "
    "measures",
    remedy="set compile_blocks=false, or curriculum_start_length=0 and random_ltd_start_tokens=0",
    holds=_compiles_changing_shapes,
)
RANDOM_LTD_CURRICULUM = Combination(
    rule="random-ltd-curriculum",
    reads=_SCHEDULES,
    problem="random-LTD selects tokens of whole sequences, and those of a curriculum are shortened",
    remedy="set random_ltd_start_tokens=0 or curriculum_start_length=0",
    holds=_has_both,
)
RANDOM_LTD_DIVIDED = Combination(
    rule="random-ltd-divided",
    reads=("random_ltd_start_tokens", "context_parallel_size", "sequence_parallel"),
    problem="random-LTD selects tokens of whole sequences, but each rank has only a part of them",
    remedy="set context_parallel_size=1 and sequence_parallel=false, or random_ltd_start_tokens=0",
    holds=_drops_of_divided_sequences,
)
