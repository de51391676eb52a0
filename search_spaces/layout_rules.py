"""What is wrong with a layout of pipeline stages, beyond what its text alone tells."""

from search_spaces.canonical import is_split
from search_spaces.context import SpaceContext
from search_spaces.model import FactoryModel, ModelSpec
from search_spaces.stage_layout import parse_layout, repeated
from search_spaces.trial_config import TrialConfig


def layout_fits(config: TrialConfig, context: SpaceContext) -> str | None:
    """Whether the layout has every stage and every layer of the model once."""
    text, model = config.pipeline_layout, context.model
    if not text or config.pipeline_parallel_size == 1:
        return None
    if isinstance(model, FactoryModel):
        return f"pipeline_layout={text} counts layers, which {model.name}, a module of your own, does not tell"
    counts = [stage.layers for stage in parse_layout(text)]
    stages = config.pipeline_parallel_size * config.virtual_stages
    if len(counts) != stages:
        return f"pipeline_layout={text} has {len(counts)} stages, and there are {stages} (ranks x virtual stages)"
    if isinstance(model, ModelSpec) and sum(counts) != model.num_layers:
        return f"pipeline_layout={text} has {sum(counts)} layers, and {model.name} has {model.num_layers}"
    return None


def layout_repeats(config: TrialConfig, context: SpaceContext) -> str | None:
    """Whether other knobs say the same: one configuration has one name."""
    text = config.pipeline_layout
    if not text or config.pipeline_parallel_size == 1:
        return None
    alike = repeated(parse_layout(text))
    if alike is not None:
        return f"with pipeline_layout={text} every stage {alike}"
    if is_split(text, config.replace({"pipeline_layout": "", "pipeline_split": "even"}), context):
        return f"pipeline_layout={text} is what pipeline_split=even gives"
    return None
