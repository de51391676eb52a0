"""What CUDA graphs are refused with. Imports no torch: the search reads it."""

from search_spaces.capability import Combination
from search_spaces.data_schedule import is_scheduled
from search_spaces.trial_config import TrialConfig

_COLLECTIVES = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size")


def _gathers_parameters(config: TrialConfig, _: int) -> bool:
    return config.cuda_graphs and config.zero_stage == 3


def _communicates_in_blocks(config: TrialConfig, _: int) -> bool:
    return config.cuda_graphs and any(getattr(config, name) > 1 for name in _COLLECTIVES)


def _has_several_in_flight(config: TrialConfig, _: int) -> bool:
    return config.cuda_graphs and config.pipeline_parallel_size > 1


def _computes_again(config: TrialConfig, _: int) -> bool:
    return config.cuda_graphs and config.activation_checkpointing != "none"


def _offloads_activations(config: TrialConfig, _: int) -> bool:
    return config.cuda_graphs and config.offload_activations


def _compiles(config: TrialConfig, _: int) -> bool:
    return config.cuda_graphs and config.compile_blocks


def _changes_shapes(config: TrialConfig, _: int) -> bool:
    return config.cuda_graphs and is_scheduled(config)


GRAPHED = (
    Combination(
        rule="graphs-stage-3",
        reads=("cuda_graphs", "zero_stage"),
        problem="stage 3 gathers parameters into memory that it releases again, and a graph reads them where they were at its "
        "capture",
        remedy="set cuda_graphs=false, or use zero_stage 0, 1 or 2",
        holds=_gathers_parameters,
    ),
    Combination(
        rule="graphs-collectives",
        reads=("cuda_graphs", *_COLLECTIVES),
        problem="tensor, context and expert parallelism communicate inside of blocks, and no graph here holds a collective",
        remedy="set cuda_graphs=false, or tensor_parallel_size, context_parallel_size and expert_parallel_size to 1",
        holds=_communicates_in_blocks,
    ),
    Combination(
        rule="graphs-pipeline",
        reads=("cuda_graphs", "pipeline_parallel_size"),
        problem="a pipeline has several micro-batches in flight, and a graph keeps what one of them needs for its backward",
        remedy="set cuda_graphs=false or pipeline_parallel_size=1",
        holds=_has_several_in_flight,
    ),
    Combination(
        rule="graphs-checkpointing",
        reads=("cuda_graphs", "activation_checkpointing"),
        problem="the host runs a block again in backward, from a state of random numbers that it has read, and a graph runs by "
        "itself",
        remedy="set cuda_graphs=false or activation_checkpointing=none",
        holds=_computes_again,
    ),
    Combination(
        rule="graphs-offloading",
        reads=("cuda_graphs", "offload_activations"),
        problem="what blocks save is moved by the host while they run, which a graph leaves out",
        remedy="set cuda_graphs=false or offload_activations=false",
        holds=_offloads_activations,
    ),
    Combination(
        rule="graphs-compiled",
        reads=("cuda_graphs", "compile_blocks"),
        problem="compiled blocks check their guards on the host at each call, and torch.compile has graphs of its own",
        remedy="set cuda_graphs=false or compile_blocks=false",
        holds=_compiles,
    ),
    Combination(
        rule="graphs-schedule",
        reads=("cuda_graphs", "curriculum_start_length", "random_ltd_start_tokens"),
        problem="a schedule of the data changes the shapes of blocks, and those of a graph are fixed",
        remedy="set cuda_graphs=false, or curriculum_start_length=0 and random_ltd_start_tokens=0",
        holds=_changes_shapes,
    ),
)
