"""The rules of CUDA graphs: which models have blocks that run identically in every step, and which knobs prevent a capture."""

from search_spaces.capability import Combination
from search_spaces.context import SpaceContext
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model, ModelSpec
from search_spaces.rules.rule import Rule
from search_spaces.training.data_schedule import is_scheduled
from search_spaces.training.windows import window_of, windowed
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

GRAPHS_MODEL = "graphs-model"
GRAPHS_REMEDY = "set cuda_graphs=false, or use a preset or a config.json without experts, a window or document_lengths"


def graphs_problem(config: TrialConfig, model: Model, workload: Workload) -> str | None:
    """Why blocks of this model cannot be captured; None: they can."""
    if not config.cuda_graphs or isinstance(model, CommandModel):
        return None
    if not isinstance(model, ModelSpec):
        return f"the arguments of the blocks of {model.name}, and whether they read tensor values on the host, are unknown"
    if model.num_experts:
        return f"how many tokens the experts of {model.name} get changes from step to step, but a graph has fixed shapes"
    if workload.document_lengths:
        return "the attention mask depends on the documents of each row, but a graph replays the captured one"
    if model.changes_scores:
        return (
            f"attention of {model.name}, which changes scores, is a kernel that torch compiles, which cannot be captured here"
        )
    hides = window_of(windowed(model, config)).hides(workload.sequence_length)
    return f"window attention of {model.name} is a kernel that torch compiles, which cannot be captured here" if hides else None


def graphs_model(config: TrialConfig, context: SpaceContext) -> str | None:
    """Only our own blocks, with the same shapes in every step, can be captured."""
    return graphs_problem(config, context.model, context.workload)


GRAPH_RULES: tuple[Rule, ...] = (
    Rule(GRAPHS_MODEL, ("cuda_graphs", "attention_window", "attention_global_tokens"), GRAPHS_REMEDY, graphs_model),
)


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


GRAPHED: tuple[Combination, ...] = (
    Combination(
        rule="graphs-stage-3",
        reads=("cuda_graphs", "zero_stage"),
        problem="stage 3 gathers parameters into memory that it releases again, but a graph reads them at the addresses of its "
        "capture",
        remedy="set cuda_graphs=false, or use zero_stage 0, 1 or 2",
        holds=_gathers_parameters,
    ),
    Combination(
        rule="graphs-collectives",
        reads=("cuda_graphs", *_COLLECTIVES),
        problem="tensor, context and expert parallelism communicate inside blocks, and captured graphs contain no collectives",
        remedy="set cuda_graphs=false, or tensor_parallel_size, context_parallel_size and expert_parallel_size to 1",
        holds=_communicates_in_blocks,
    ),
    Combination(
        rule="graphs-pipeline",
        reads=("cuda_graphs", "pipeline_parallel_size"),
        problem="a pipeline has several micro-batches in flight, but a graph keeps the saved tensors of only one of them",
        remedy="set cuda_graphs=false or pipeline_parallel_size=1",
        holds=_has_several_in_flight,
    ),
    Combination(
        rule="graphs-checkpointing",
        reads=("cuda_graphs", "activation_checkpointing"),
        problem="the host recomputes a block in backward from a random-number state that it has read, and a graph runs without "
        "the host",
        remedy="set cuda_graphs=false or activation_checkpointing=none",
        holds=_computes_again,
    ),
    Combination(
        rule="graphs-offloading",
        reads=("cuda_graphs", "offload_activations"),
        problem="the host moves the saved tensors of blocks while they run, which a graph does not capture",
        remedy="set cuda_graphs=false or offload_activations=false",
        holds=_offloads_activations,
    ),
    Combination(
        rule="graphs-compiled",
        reads=("cuda_graphs", "compile_blocks"),
        problem="compiled blocks check their guards on the host at each call, and torch.compile captures its own graphs",
        remedy="set cuda_graphs=false or compile_blocks=false",
        holds=_compiles,
    ),
    Combination(
        rule="graphs-schedule",
        reads=("cuda_graphs", "curriculum_start_length", "random_ltd_start_tokens"),
        problem="a data schedule changes the input shapes of blocks, but those of a graph are fixed",
        remedy="set cuda_graphs=false, or curriculum_start_length=0 and random_ltd_start_tokens=0",
        holds=_changes_shapes,
    ),
)
