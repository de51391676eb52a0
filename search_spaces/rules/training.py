"""Rules of training: adapters, virtual tokens, attention windows, multi-token prediction and data schedules."""

from search_spaces.context import SpaceContext
from search_spaces.knobs.conditions import METHODS, VIRTUAL_TOKENS
from search_spaces.models.command import CommandModel
from search_spaces.models.model import ModelSpec
from search_spaces.rules.parallelism import CP, ETP, TP
from search_spaces.rules.rule import Check, Rule
from search_spaces.training import adapters, token_prediction
from search_spaces.training.data_schedule import GRANULARITY, UNSCHEDULED_LAYERS, is_scheduled
from search_spaces.training.windows import window_of, window_problem, windowed
from search_spaces.trial_config import TrialConfig

WINDOW, MODULES, BIAS = "attention_window", "mtp_layers", "router_bias_update_rate"
SCHEDULES = ("curriculum_start_length", "random_ltd_start_tokens")


def _virtual_tokens(config: TrialConfig, context: SpaceContext) -> str | None:
    if isinstance(context.model, CommandModel):
        return None
    return adapters.tokens_problem(config, context.workload.sequence_length)


def _router_bias_padding(config: TrialConfig, context: SpaceContext) -> str | None:
    if not config.router_bias_update_rate or not context.workload.document_lengths:
        return None
    return "loads of experts, which the biases of routers follow, would count the padding of documents"


TRAINING_RULES: tuple[Rule, ...] = (
    Rule(
        "adapters",
        (*METHODS, "lora_targets"),
        adapters.ADAPTERS_REMEDY,
        lambda config, context: adapters.adapters_problem(config, context.model),
    ),
    Rule(
        "adapters-together",
        METHODS,
        adapters.TOGETHER_REMEDY,
        lambda config, context: None if isinstance(context.model, CommandModel) else adapters.together_problem(config),
    ),
    Rule("virtual-tokens", VIRTUAL_TOKENS, adapters.TOKENS_REMEDY, _virtual_tokens),
    Rule(
        "attention-window",
        (WINDOW, "attention_global_tokens"),
        "lower them, or set attention_window=0",
        lambda config, context: window_problem(config, context.model, context.workload.sequence_length),
    ),
    Rule(
        "mtp-model",
        (MODULES,),
        token_prediction.MODEL_REMEDY,
        lambda config, context: token_prediction.prediction_problem(config, context.model),
    ),
    Rule(
        "router-bias-padding", (BIAS,), f"set {BIAS}=0, or train on whole samples (no document_lengths)", _router_bias_padding
    ),
    Rule(
        "mtp-together",
        (MODULES, *METHODS, *SCHEDULES),
        token_prediction.TOGETHER_REMEDY,
        lambda config, context: None if isinstance(context.model, CommandModel) else token_prediction.together_problem(config),
    ),
)


CURRICULUM = ("curriculum_start_length", "curriculum_steps")
RANDOM_LTD = ("random_ltd_start_tokens", "random_ltd_steps")
START_REMEDY = f"set it to a multiple of {GRANULARITY} below --sequence-length, or to 0 for none"
STEPS_REMEDY = "state the run's steps (--training-steps), and set it to at least 1 and to fewer than those"
TOKENS_REMEDY = "set prefix_length=0 and prompt_length=0, or schedule nothing"
MODEL_REMEDY = "set it to 0, or give a preset or a config.json"


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
    Rule("schedule-tokens", (CURRICULUM[0], RANDOM_LTD[0], *VIRTUAL_TOKENS), TOKENS_REMEDY, schedule_tokens),
    Rule("schedule-model", (CURRICULUM[0], RANDOM_LTD[0]), MODEL_REMEDY, schedule_model),
)
