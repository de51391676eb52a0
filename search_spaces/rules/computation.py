"""Rules of computation in a rank: checkpointing, data types, float8, kernels, CUDA graphs, environment variables."""

from collections.abc import Iterator

from search_spaces.capability import Combination, Rule, SpaceContext
from search_spaces.environment import ENVIRONMENT, ENVIRONMENT_RULE, environment_problem
from search_spaces.kernels import (
    BEST,
    DEVICE_RULE,
    FUSED_KERNELS,
    LIGER,
    NONE,
    OFF,
    PACKAGE_RULE,
    PRECISION_RULE,
    REMEDIES,
    device_problem,
    package_problem,
    precision_problem,
    verdict,
)
from search_spaces.knob_values import value_text
from search_spaces.knobs.computation import MXFP8
from search_spaces.models.command import CommandModel
from search_spaces.models.model import ON_BLOCKS, FactoryModel, Model, ModelSpec
from search_spaces.rules.parallelism import CP, ETP, METHOD, TP
from search_spaces.training.data_schedule import is_scheduled
from search_spaces.training.windows import window_of, windowed
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

_DEFAULTS = TrialConfig()
EVERY, WINDOW = "checkpoint_every_k", "attention_window"


def _on_called_blocks(config: TrialConfig, context: SpaceContext) -> str | None:
    model = context.model
    for name, reason in model.refused_knobs if isinstance(model, FactoryModel) else ():
        if (value := getattr(config, name)) not in ("none", False):
            return f"{name}={value_text(value)} does not apply to {model.name}: {reason}"
    return None


def _checkpointed_layers(config: TrialConfig, context: SpaceContext) -> str | None:
    every, model = config.checkpoint_every_k, context.model
    if config.activation_checkpointing == "none" or not isinstance(model, ModelSpec) or every <= model.num_layers:
        return None
    return f"no {every}th layer exists among {model.num_layers}"


def _precision_supported(config: TrialConfig, context: SpaceContext) -> str | None:
    device = context.cluster.device
    if config.precision == FLOAT8 or device.supports(config.precision):
        return None
    return f"{device.name} does not support {config.precision}"


def _attention_kernel(config: TrialConfig, context: SpaceContext) -> str | None:
    kernel, model = config.attention_backend, context.model
    if isinstance(model, CommandModel):
        return None
    if isinstance(model, ModelSpec) and model.changes_scores and kernel not in (BEST, "math"):
        return f"the kernel {kernel} cannot change scores, as {model.name} does"
    precision = "bf16" if config.precision == FLOAT8 else config.precision
    length = context.workload.sequence_length
    window = windowed(model, config).sliding_window if isinstance(model, ModelSpec) else 0
    masked = 0 < window < length
    if masked and isinstance(model, ModelSpec):
        divides = config.context_parallel_size > 1 and config.context_parallel_method == "gather"
        rank_length = length // (2 * config.context_parallel_size) if divides else length
        # Ranks that attend to whole chunks need no mask.
        masked = not window_of(model).has_whole_chunks(0, rank_length) or config.prefix_length != 0
    # Grouped heads are no obstacle: the engine repeats keys and values for a kernel that does not support them.
    problem = verdict(kernel, precision, 1, 1, context.cluster.device.kind, masked).problem
    return f"{problem}, which the window of {window} tokens needs" if problem and problem.endswith("mask") else problem


def _accumulation_type(config: TrialConfig, _: SpaceContext) -> str | None:
    summed = config.accumulation_dtype
    if summed in (_DEFAULTS.accumulation_dtype, config.precision):
        return None
    return f"gradients in {config.precision} would be summed in {summed}"


def _environment(config: TrialConfig, context: SpaceContext) -> str | None:
    return environment_problem(config.environment, context.cluster.device.kind)


FLOAT8 = "fp8"
"""The value of `precision` that selects them."""
MODEL_REMEDY = "use precision=bf16; the factory may convert its linear layers itself (torchao.float8)"


def float8_device(config: TrialConfig, context: SpaceContext) -> str | None:
    device = context.cluster.device
    if config.precision != FLOAT8 or device.supports(FLOAT8):
        return None
    return (
        f"{device.name} does not support float8 products, which need compute capability 8.9 or newer (Ada, Hopper, Blackwell)"
    )


def float8_recipe(config: TrialConfig, context: SpaceContext) -> str | None:
    device = context.cluster.device
    if config.precision != FLOAT8 or config.fp8_recipe != MXFP8 or float8_device(config, context) or device.supports(MXFP8):
        return None
    return f"{device.name} has no products of blocks of 32 numbers, which need a Blackwell of data centres (peak_flops.{MXFP8})"


def float8_model(config: TrialConfig, context: SpaceContext) -> str | None:
    if config.precision != FLOAT8 or not isinstance(context.model, FactoryModel) or float8_device(config, context):
        return None
    return f"it is unknown which products of {context.model.name} could be in float8"


def float8_sizes(config: TrialConfig, context: SpaceContext) -> str | None:
    """Check the sizes of a rank's slices of a layer's matrices."""
    if config.precision != FLOAT8 or not isinstance(context.model, ModelSpec) or float8_device(config, context):
        return None
    # Both dimensions of a matrix must be multiples of this, as cuBLASLt's float8 products and their blocks require.
    multiple = 32 if config.fp8_recipe == MXFP8 else 16
    wrong = [f"{name} ({size})" for name, size in _sizes(context.model, config) if size % multiple]
    return f"a rank's {', '.join(wrong)} of {context.model.name} are not multiples of {multiple}" if wrong else None


def _sizes(model: ModelSpec, config: TrialConfig) -> Iterator[tuple[str, int]]:
    ranks = config.tensor_parallel_size
    yield "hidden size", model.hidden_size
    yield "queries", model.num_attention_heads * model.head_dim // ranks
    yield "keys", model.num_key_value_heads * model.head_dim // ranks
    yield "MLP's width", model.ffn_hidden_size // (config.expert_slices if model.num_experts else ranks)
    yield "dense layers' MLP", model.dense_ffn_size // ranks
    yield "shared experts' width", model.shared_expert_size // ranks
    if model.latent is not None:
        yield "values", model.num_attention_heads * model.latent.value_size // ranks
        yield "latent keys and values", model.latent.key_value_rank
        yield "latent queries", model.latent.query_rank


def kernels_model(config: TrialConfig, context: SpaceContext) -> str | None:
    if config.fused_kernels == NONE or not isinstance(context.model, FactoryModel):
        return None
    return f"fused kernels replace operators of our own modules, not those of {context.model.name}"


def kernels_untested(config: TrialConfig, context: SpaceContext) -> str | None:
    """Liger's loss reads tensor values on the host, which a CUDA graph cannot; others and padding are untested."""
    if config.fused_kernels == NONE:
        return None
    untested = {
        "compile_blocks": config.compile_blocks and config.fused_kernels != LIGER,
        "cuda_graphs": config.cuda_graphs,
        "document_lengths": bool(context.workload.document_lengths),
    }
    features = [name for name, is_used in untested.items() if is_used]
    return f"kernels of {config.fused_kernels} are untested with {' and '.join(features)}" if features else None


COMPUTATION_RULES: tuple[Rule, ...] = (
    Rule("called-blocks", ON_BLOCKS, "leave it out, or call the blocks as modules", _on_called_blocks),
    Rule("checkpoint-layers", ("activation_checkpointing", EVERY), "lower checkpoint_every_k", _checkpointed_layers),
    Rule("precision-supported", ("precision",), "choose a precision that the device computes in", _precision_supported),
    Rule(
        "attention-kernel",
        ("attention_backend", "precision", WINDOW, CP, METHOD, "prefix_length"),
        "leave attention_backend at best",
        _attention_kernel,
    ),
    Rule("float8-device", ("precision",), "use precision=bf16, or such a device", float8_device),
    Rule("float8-recipe", ("precision", "fp8_recipe"), "use fp8_recipe=tensorwise or rowwise", float8_recipe),
    Rule("float8-model", ("precision",), MODEL_REMEDY, float8_model),
    Rule(
        "float8-sizes",
        ("precision", "fp8_recipe", TP, ETP),
        "use precision=bf16, or a tensor_parallel_size whose slices are",
        float8_sizes,
    ),
    Rule("accumulation-type", ("accumulation_dtype", "precision"), "set it to fp32 or to the precision", _accumulation_type),
    Rule(ENVIRONMENT_RULE, (ENVIRONMENT,), "set variables of docs/performance.md that act here", _environment),
)


KERNEL_RULES: tuple[Rule, ...] = (
    Rule("fused-kernels-model", (FUSED_KERNELS,), OFF, kernels_model),
    Rule(
        DEVICE_RULE,
        (FUSED_KERNELS,),
        REMEDIES[DEVICE_RULE],
        lambda config, context: device_problem(config.fused_kernels, context.cluster.device.kind, context.cluster.device.name),
    ),
    Rule(
        PACKAGE_RULE,
        (FUSED_KERNELS,),
        REMEDIES[PACKAGE_RULE],
        lambda config, context: package_problem(
            config.fused_kernels, context.cluster.kernel_packages if context.cluster.device.kind == "cuda" else None
        ),
    ),
    Rule(
        PRECISION_RULE,
        (FUSED_KERNELS, "precision"),
        REMEDIES[PRECISION_RULE],
        lambda config, _: precision_problem(config.fused_kernels, config.precision),
    ),
    Rule(
        "fused-kernels-beside", (FUSED_KERNELS, "compile_blocks", "cuda_graphs"), f"{OFF}, or leave these out", kernels_untested
    ),
)


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


GRAPH_RULES: tuple[Rule, ...] = (
    Rule(
        GRAPHS_MODEL,
        ("cuda_graphs", "attention_window", "attention_global_tokens"),
        GRAPHS_REMEDY,
        # Only our own blocks, with the same shapes in every step, can be captured.
        lambda config, context: graphs_problem(config, context.model, context.workload),
    ),
)


_COLLECTIVES = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size")


GRAPHED: tuple[Combination, ...] = (
    Combination(
        rule="graphs-stage-3",
        reads=("cuda_graphs", "zero_stage"),
        problem="stage 3 gathers parameters into memory that it releases again, but a graph reads them at the addresses of its "
        "capture",
        remedy="set cuda_graphs=false, or use zero_stage 0, 1 or 2",
        holds=lambda config, _: config.cuda_graphs and config.zero_stage == 3,
    ),
    Combination(
        rule="graphs-collectives",
        reads=("cuda_graphs", *_COLLECTIVES),
        problem="tensor, context and expert parallelism communicate inside blocks, and captured graphs contain no collectives",
        remedy="set cuda_graphs=false, or tensor_parallel_size, context_parallel_size and expert_parallel_size to 1",
        holds=lambda config, _: config.cuda_graphs and any(getattr(config, name) > 1 for name in _COLLECTIVES),
    ),
    Combination(
        rule="graphs-pipeline",
        reads=("cuda_graphs", "pipeline_parallel_size"),
        problem="a pipeline has several micro-batches in flight, but a graph keeps the saved tensors of only one of them",
        remedy="set cuda_graphs=false or pipeline_parallel_size=1",
        holds=lambda config, _: config.cuda_graphs and config.pipeline_parallel_size > 1,
    ),
    Combination(
        rule="graphs-checkpointing",
        reads=("cuda_graphs", "activation_checkpointing"),
        problem="the host recomputes a block in backward from a random-number state that it has read, and a graph runs without "
        "the host",
        remedy="set cuda_graphs=false or activation_checkpointing=none",
        holds=lambda config, _: config.cuda_graphs and config.activation_checkpointing != "none",
    ),
    Combination(
        rule="graphs-offloading",
        reads=("cuda_graphs", "offload_activations"),
        problem="the host moves the saved tensors of blocks while they run, which a graph does not capture",
        remedy="set cuda_graphs=false or offload_activations=false",
        holds=lambda config, _: config.cuda_graphs and config.offload_activations,
    ),
    Combination(
        rule="graphs-compiled",
        reads=("cuda_graphs", "compile_blocks"),
        problem="compiled blocks check their guards on the host at each call, and torch.compile captures its own graphs",
        remedy="set cuda_graphs=false or compile_blocks=false",
        holds=lambda config, _: config.cuda_graphs and config.compile_blocks,
    ),
    Combination(
        rule="graphs-schedule",
        reads=("cuda_graphs", "curriculum_start_length", "random_ltd_start_tokens"),
        problem="a data schedule changes the input shapes of blocks, but those of a graph are fixed",
        remedy="set cuda_graphs=false, or curriculum_start_length=0 and random_ltd_start_tokens=0",
        holds=lambda config, _: config.cuda_graphs and is_scheduled(config),
    ),
)
