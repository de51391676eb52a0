"""Rules of training: documents and packing, adapters, virtual tokens, windows, multi-token prediction [DeepSeek-AI 2024,
DeepSeek-V3, 2.2] and data schedules."""

from search_spaces.capability import Check, Rule, SpaceContext
from search_spaces.knob import METHODS, VIRTUAL_TOKENS
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.rules.parallelism import CP, ETP, TP
from search_spaces.training import adapters
from search_spaces.training.adapters import adapts
from search_spaces.training.data_schedule import GRANULARITY, UNSCHEDULED_LAYERS, is_scheduled
from search_spaces.training.windows import window_of, window_problem, windowed
from search_spaces.trial_config import TrialConfig

SCHEDULES = ("curriculum_start_length", "random_ltd_start_tokens")


def prediction_problem(config: TrialConfig, model: Model) -> str | None:
    """Why the model cannot have the configuration's modules, in a clause; None: it can, or needs none."""
    if not config.mtp_layers or isinstance(model, CommandModel):  # a script has its own
        return None
    if isinstance(model, FactoryModel):
        return f"mtp_layers={config.mtp_layers} adds modules to our own models, not to {model.name}"
    return model.mtp_problem or None


def together_problem(config: TrialConfig) -> str | None:
    """The problem of other training methods beside the modules, in a clause; None: there is none."""
    if not config.mtp_layers:
        return None
    if adapts(config):
        return f"mtp_layers={config.mtp_layers} trains new modules, and adapters freeze all that is not an adapter"
    return f"mtp_layers={config.mtp_layers} needs whole samples, which data schedules cut" if is_scheduled(config) else None


PACK, CONTEXT = "pack_sequences", "context_parallel_size"
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
        "pack-tokens", (PACK, *VIRTUAL_TOKENS), "set pack_sequences=false, or prefix_length=0 and prompt_length=0", pack_tokens
    ),
    Rule("pack-compiled", (PACK, "compile_blocks"), "set pack_sequences=false or compile_blocks=false", pack_compiled),
)
"""Rules of combinations with documents and with packing."""


WINDOW, MODULES, BIAS = "attention_window", "mtp_layers", "router_bias_update_rate"


def _router_bias_padding(config: TrialConfig, context: SpaceContext) -> str | None:
    if not config.router_bias_update_rate or not context.workload.document_lengths:
        return None
    return "loads of experts, which the biases of routers follow, would count the padding of documents"


TRAINING_RULES: tuple[Rule, ...] = (
    Rule(
        "adapters",
        (*METHODS, "lora_targets"),
        "give our own model smaller adapters, or leave these knobs at 0 for a module that brings its own (as PEFT's)",
        lambda config, context: adapters.adapters_problem(config, context.model),
    ),
    Rule(
        "adapters-together",
        METHODS,
        "set one of them, and leave the others at 0",
        lambda config, context: None if isinstance(context.model, CommandModel) else adapters.together_problem(config),
    ),
    Rule(
        "virtual-tokens",
        VIRTUAL_TOKENS,
        "give fewer virtual tokens, or longer samples",
        lambda config, context: (
            None
            if isinstance(context.model, CommandModel)
            else adapters.tokens_problem(config, context.workload.sequence_length)
        ),
    ),
    Rule(
        "attention-window",
        (WINDOW, "attention_global_tokens"),
        "lower them, or set attention_window=0",
        lambda config, context: window_problem(config, context.model, context.workload.sequence_length),
    ),
    Rule(
        "mtp-model",
        (MODULES,),
        "set mtp_layers=0, or give a model with rotary positions",
        lambda config, context: prediction_problem(config, context.model),
    ),
    Rule(
        "router-bias-padding", (BIAS,), f"set {BIAS}=0, or train on whole samples (no document_lengths)", _router_bias_padding
    ),
    Rule(
        "mtp-together",
        (MODULES, *METHODS, *SCHEDULES),
        "set mtp_layers=0, or leave adapters and data schedules out",
        lambda config, context: None if isinstance(context.model, CommandModel) else together_problem(config),
    ),
)


CURRICULUM = ("curriculum_start_length", "curriculum_steps")
RANDOM_LTD = ("random_ltd_start_tokens", "random_ltd_steps")
START_REMEDY = f"set it to a multiple of {GRANULARITY} below --sequence-length, or to 0 for none"
STEPS_REMEDY = "state the run's steps (--training-steps), and set it to at least 1 and to fewer than those"


def starts(knob: str) -> Check:
    """The schedule must start below the full length, at a multiple of its increment."""

    def check(config: TrialConfig, context: SpaceContext) -> str | None:
        start, whole = getattr(config, knob), context.workload.sequence_length
        if not start:
            return None
        if start >= whole:
            return f"{knob}={start} is not shorter than the samples of {whole} tokens"
        return f"{knob}={start} is not a multiple of {GRANULARITY} tokens" if start % GRANULARITY else None

    return check


def ends(start: str, knob: str) -> Check:
    """The schedule must reach the full length within the run."""

    def check(config: TrialConfig, context: SpaceContext) -> str | None:
        steps, run = getattr(config, knob), context.workload.training_steps
        if not getattr(config, start):
            return None
        if run is None:
            return f"{start}={getattr(config, start)} needs the training_steps of the run, which are not stated"
        if steps < 1:
            return f"{knob} is {steps}, so that {start}={getattr(config, start)} is never trained on"
        return f"{knob}={steps} leaves no full-length steps in a run of {run} training_steps" if steps >= run else None

    return check


def schedule_model(config: TrialConfig, context: SpaceContext) -> str | None:
    """How a user's module processes its samples is unknown."""
    if not is_scheduled(config) or isinstance(context.model, ModelSpec):
        return None
    name = "curriculum_start_length" if config.curriculum_start_length else "random_ltd_start_tokens"
    return f"{name}={getattr(config, name)} applies to our own samples and layers, not to those of {context.model.name}"


def schedule_tokens(config: TrialConfig, _: SpaceContext) -> str | None:
    """Virtual tokens precede those of the samples, and schedules do not count them."""
    if not is_scheduled(config):
        return None
    token_knobs = [name for name in VIRTUAL_TOKENS if getattr(config, name)]
    return f"{token_knobs[0]}={getattr(config, token_knobs[0])} adds tokens before scheduled samples" if token_knobs else None


def curriculum_divides(config: TrialConfig, _: SpaceContext) -> str | None:
    """The ranks that divide a sequence must divide every length of the schedule."""
    ranks = config.context_parallel_size
    if not config.curriculum_start_length:
        return None
    chunks = 2 * ranks if ranks > 1 else 1
    divides = config.sequence_parallel or config.expert_slices < config.tensor_parallel_size
    tensor = config.tensor_parallel_size if divides else 1
    if GRANULARITY % chunks == 0 and GRANULARITY // ranks % tensor == 0:
        return None
    divided = f"{ranks} context x {tensor} tensor ranks do not divide"
    return f"lengths of a curriculum are multiples of {GRANULARITY} tokens, which {divided}"


def random_ltd_layers(config: TrialConfig, context: SpaceContext) -> str | None:
    """There must be layers between the first and the last, without experts that count over whole sequences."""
    model = context.model
    if not config.random_ltd_start_tokens or not isinstance(model, ModelSpec):
        return None
    if model.num_layers <= UNSCHEDULED_LAYERS:
        return f"{model.name} has {model.num_layers} layers, and the first and the last process every token"
    if model.num_experts:
        return f"the experts of {model.name} are routed over whole sequences"
    hides = window_of(windowed(model, config)).hides(context.workload.sequence_length)
    return f"the window of {model.name} assumes neighbouring tokens, which the kept tokens are not" if hides else None


SCHEDULE_RULES: tuple[Rule, ...] = (
    Rule("curriculum-length", CURRICULUM[:1], START_REMEDY, starts(CURRICULUM[0])),
    Rule("curriculum-steps", CURRICULUM, STEPS_REMEDY, ends(*CURRICULUM)),
    Rule(
        "curriculum-divides",
        (CURRICULUM[0], CP, TP, ETP, "sequence_parallel"),
        f"choose degrees that divide {GRANULARITY} tokens, or set curriculum_start_length=0",
        curriculum_divides,
    ),
    Rule("random-ltd-tokens", RANDOM_LTD[:1], START_REMEDY, starts(RANDOM_LTD[0])),
    Rule("random-ltd-steps", RANDOM_LTD, STEPS_REMEDY, ends(*RANDOM_LTD)),
    Rule(
        "random-ltd-layers",
        (RANDOM_LTD[0], "attention_window", "attention_global_tokens"),
        f"set random_ltd_start_tokens=0, or use a model of more than {UNSCHEDULED_LAYERS} layers without experts or a window",
        random_ltd_layers,
    ),
    Rule(
        "schedule-tokens",
        (CURRICULUM[0], RANDOM_LTD[0], *VIRTUAL_TOKENS),
        "set prefix_length=0 and prompt_length=0, or schedule nothing",
        schedule_tokens,
    ),
    Rule("schedule-model", (CURRICULUM[0], RANDOM_LTD[0]), "set it to 0, or give a preset or a config.json", schedule_model),
)
