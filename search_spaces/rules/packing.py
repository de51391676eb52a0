"""Rules of documents and packing: which engines and models support them, and what packing excludes."""

from search_spaces.context import SpaceContext
from search_spaces.errors import IllegalConfigError
from search_spaces.knobs.conditions import VIRTUAL_TOKENS
from search_spaces.models.model import ModelSpec
from search_spaces.rules.rule import Rule
from search_spaces.training.data_schedule import is_scheduled
from search_spaces.training.windows import window_of, windowed
from search_spaces.trial_config import TrialConfig

PACK, CONTEXT = "pack_sequences", "context_parallel_size"
SCHEDULES = ("curriculum_start_length", "random_ltd_start_tokens")
ENGINE_REMEDY = "leave document_lengths out, or use an engine that honours pack_sequences (native, ddp, fsdp2)"


def documents_model(_: TrialConfig, context: SpaceContext) -> str | None:
    """How a user's module or script processes its samples is unknown."""
    if not context.workload.document_lengths or isinstance(context.model, ModelSpec):
        return None
    return f"document_lengths apply to our own samples, not to those of {context.model.name}"


def documents_engine(_: TrialConfig, context: SpaceContext) -> str | None:
    """An engine that does not pack does not support padding either."""
    capability = context.capability
    if not context.workload.document_lengths or capability is None or PACK in capability.knobs:
        return None
    return f"the {capability.engine} engine supports only full-length samples, and document_lengths are shorter"


def documents_experts(config: TrialConfig, context: SpaceContext) -> str | None:
    """A balance loss would count padding; and expert capacity is counted per row, whatever documents share it.

    Capacity alone does not affect unpacked documents: earlier tokens have precedence, and padding is last.
    """
    model = context.model
    if not context.workload.document_lengths or not isinstance(model, ModelSpec) or not model.num_experts:
        return None
    if model.load_balance:
        return f"the load_balance of {model.name} counts all tokens of a row, including padding"
    if model.capacity_factor and config.pack_sequences:
        return f"the capacity_factor of {model.name} applies to whole rows, whose documents would take each other's capacity"
    return None


def documents_schedule(config: TrialConfig, context: SpaceContext) -> str | None:
    """Schedules cut and drop tokens of whole samples."""
    if not context.workload.document_lengths or not is_scheduled(config):
        return None
    name = "curriculum_start_length" if config.curriculum_start_length else "random_ltd_start_tokens"
    return f"{name}={getattr(config, name)} needs full-length samples, and document_lengths are shorter"


def pack_context(config: TrialConfig, _: SpaceContext) -> str | None:
    """Ranks that divide a sequence would cut documents."""
    if not config.pack_sequences or config.context_parallel_size == 1:
        return None
    return f"{config.context_parallel_size} context ranks divide rows without regard to the documents in them"


def pack_window(config: TrialConfig, context: SpaceContext) -> str | None:
    """The blocks of a window's mask span a whole row; chunks are documents of their own."""
    model = context.model
    if not config.pack_sequences or not isinstance(model, ModelSpec):
        return None
    window = window_of(windowed(model, config))
    hides = window.hides(context.workload.sequence_length) and not window.chunked
    return f"the window of {model.name} spans a whole row, not one document in it" if hides else None


def pack_tokens(config: TrialConfig, _: SpaceContext) -> str | None:
    """Virtual tokens precede a row, but each document would need its own."""
    token_knobs = [name for name in VIRTUAL_TOKENS if getattr(config, name)]
    if not config.pack_sequences or not token_knobs:
        return None
    return f"{token_knobs[0]}={getattr(config, token_knobs[0])} adds tokens before a row, not before each document in it"


def pack_compiled(config: TrialConfig, _: SpaceContext) -> str | None:
    """Shapes that change with every micro-batch would cause endless recompilation."""
    if not config.pack_sequences or not config.compile_blocks:
        return None
    return "blocks would be recompiled for the documents of every micro-batch"


DOCUMENT_RULES: tuple[Rule, ...] = (
    Rule("documents-model", (PACK,), "leave document_lengths out, or give a preset or a config.json", documents_model),
    Rule("documents-engine", (PACK,), ENGINE_REMEDY, documents_engine),
    Rule("documents-experts", (PACK,), "leave document_lengths out, or use a model without them", documents_experts),
)
"""Rules of all documents, packed or not."""
PACKING_RULES: tuple[Rule, ...] = (
    Rule(
        "documents-schedule",
        SCHEDULES,
        "leave document_lengths out, or set curriculum_start_length=0 and random_ltd_start_tokens=0",
        documents_schedule,
    ),
    Rule("pack-context", (PACK, CONTEXT), "set pack_sequences=false or context_parallel_size=1", pack_context),
    Rule(
        "pack-window",
        (PACK, "attention_window", "attention_global_tokens"),
        "set pack_sequences=false, or attention_window=0 with a model that has no window of its own",
        pack_window,
    ),
    Rule(
        "pack-tokens",
        (PACK, *VIRTUAL_TOKENS),
        "set pack_sequences=false, or prefix_length=0 and prompt_length=0",
        pack_tokens,
    ),
    Rule("pack-compiled", (PACK, "compile_blocks"), "set pack_sequences=false or compile_blocks=false", pack_compiled),
)
"""Rules of combinations with documents and with packing."""


def require_documents(context: SpaceContext) -> None:
    """Refuse documents that no configuration supports.

    Raises:
        IllegalConfigError: the engine or the model does not support them.
    """
    for rule in DOCUMENT_RULES:
        if (message := rule.check(TrialConfig(), context)) is not None:
            raise IllegalConfigError(rule.name, message, rule.remedy)
