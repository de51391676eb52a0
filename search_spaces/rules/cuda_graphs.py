"""The rule of CUDA graphs: which models have blocks that do the same in every step."""

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
    """Why blocks of this model are not captured; None: they are."""
    if not config.cuda_graphs or isinstance(model, CommandModel):
        return None
    if not isinstance(model, ModelSpec):
        return f"what the blocks of {model.name} are called with, and whether they ask for values, is not known"
    if model.num_experts:
        return f"how many tokens the experts of {model.name} get changes from step to step, and shapes of a graph are fixed"
    if workload.document_lengths:
        return "which tokens attention hides follows the documents of each row, and a graph reads what it was captured with"
    hides = window_of(windowed(model, config)).hides(workload.sequence_length)
    return (
        f"attention to a window of {model.name} is a kernel that torch compiles, which no graph here holds" if hides else None
    )


def graphs_model(config: TrialConfig, context: SpaceContext) -> str | None:
    """Blocks are our own, and their shapes are those of every step."""
    return graphs_problem(config, context.model, context.workload)


GRAPH_RULES: tuple[Rule, ...] = (
    Rule(GRAPHS_MODEL, ("cuda_graphs", "attention_window", "attention_global_tokens"), GRAPHS_REMEDY, graphs_model),
)
