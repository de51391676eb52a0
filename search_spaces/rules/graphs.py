"""The rule of CUDA graphs: which models have blocks that run identically in every step."""

from search_spaces.context import SpaceContext
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model, ModelSpec
from search_spaces.rules.rule import Rule
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
    hides = window_of(windowed(model, config)).hides(workload.sequence_length)
    return f"window attention of {model.name} is a kernel that torch compiles, which cannot be captured here" if hides else None


def graphs_model(config: TrialConfig, context: SpaceContext) -> str | None:
    """Only our own blocks, with the same shapes in every step, can be captured."""
    return graphs_problem(config, context.model, context.workload)


GRAPH_RULES: tuple[Rule, ...] = (
    Rule(GRAPHS_MODEL, ("cuda_graphs", "attention_window", "attention_global_tokens"), GRAPHS_REMEDY, graphs_model),
)
