"""Rules of computation in a rank: activation checkpointing, data types, kernels, environment variables."""

from search_spaces.attention_kernels import BEST, verdict
from search_spaces.context import SpaceContext
from search_spaces.environment import ENVIRONMENT, ENVIRONMENT_RULE, environment_problem
from search_spaces.models.command import CommandModel
from search_spaces.models.model import ModelSpec
from search_spaces.rules import float8
from search_spaces.rules.parallelism import CP, ETP, METHOD, TP
from search_spaces.rules.rule import Rule
from search_spaces.training.windows import window_of, windowed
from search_spaces.trial_config import TrialConfig

_DEFAULTS = TrialConfig()
EVERY, WINDOW = "checkpoint_every_k", "attention_window"
KERNEL = ("attention_backend", "precision", WINDOW, CP, METHOD, "prefix_length")


def _checkpointed_layers(config: TrialConfig, context: SpaceContext) -> str | None:
    every, model = config.checkpoint_every_k, context.model
    if config.activation_checkpointing == "none" or not isinstance(model, ModelSpec) or every <= model.num_layers:
        return None
    return f"no {every}th layer exists among {model.num_layers}"


def _precision_supported(config: TrialConfig, context: SpaceContext) -> str | None:
    device = context.cluster.device
    if config.precision == float8.FLOAT8 or device.supports(config.precision):
        return None
    return f"{device.name} does not support {config.precision}"


def _attention_kernel(config: TrialConfig, context: SpaceContext) -> str | None:
    kernel, model = config.attention_backend, context.model
    if isinstance(model, CommandModel):
        return None
    if isinstance(model, ModelSpec) and model.changes_scores and kernel not in (BEST, "math"):
        return f"the kernel {kernel} cannot change scores, as {model.name} does"
    precision = "bf16" if config.precision == float8.FLOAT8 else config.precision
    length = context.workload.sequence_length
    window = windowed(model, config).sliding_window if isinstance(model, ModelSpec) else 0
    masked = 0 < window < length and not (isinstance(model, ModelSpec) and _has_whole_chunks(model, config, length))
    # Grouped heads are no obstacle: the engine repeats keys and values for a kernel that does not support them.
    problem = verdict(kernel, precision, 1, 1, context.cluster.device.kind, masked).problem
    return f"{problem}, which the window of {window} tokens needs" if problem and problem.endswith("mask") else problem


def _has_whole_chunks(model: ModelSpec, config: TrialConfig, length: int) -> bool:
    """Whether ranks attend to whole chunks, which need no mask."""
    if config.context_parallel_size > 1 and config.context_parallel_method == "gather":
        length //= 2 * config.context_parallel_size
    return window_of(model).has_whole_chunks(0, length) and not config.prefix_length


def _accumulation_type(config: TrialConfig, _: SpaceContext) -> str | None:
    summed = config.accumulation_dtype
    if summed in (_DEFAULTS.accumulation_dtype, config.precision):
        return None
    return f"gradients in {config.precision} would be summed in {summed}"


def _environment(config: TrialConfig, context: SpaceContext) -> str | None:
    return environment_problem(config.environment, context.cluster.device.kind)


COMPUTATION_RULES: tuple[Rule, ...] = (
    Rule("checkpoint-layers", ("activation_checkpointing", EVERY), "lower checkpoint_every_k", _checkpointed_layers),
    Rule("precision-supported", ("precision",), "choose a precision that the device computes in", _precision_supported),
    Rule("attention-kernel", KERNEL, "leave attention_backend at best", _attention_kernel),
    Rule("float8-device", ("precision",), float8.DEVICE_REMEDY, float8.float8_device),
    Rule("float8-model", ("precision",), float8.MODEL_REMEDY, float8.float8_model),
    Rule("float8-sizes", ("precision", TP, ETP), float8.SIZES_REMEDY, float8.float8_sizes),
    Rule("accumulation-type", ("accumulation_dtype", "precision"), "set it to fp32 or to the precision", _accumulation_type),
    Rule(ENVIRONMENT_RULE, (ENVIRONMENT,), "set variables of docs/environment.md that act here", _environment),
)
