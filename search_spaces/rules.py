"""Which configurations are refused, by which rule, and what to do about it."""

from search_spaces import adapters, float8
from search_spaces.attention_kernels import verdict
from search_spaces.capability import ENGINE_HONOURS, HONOURS_REMEDY, Capability, Combination
from search_spaces.cluster import ClusterSpec, DeviceSpec
from search_spaces.command import CommandModel
from search_spaces.context import SpaceContext
from search_spaces.environment import ENVIRONMENT, ENVIRONMENT_RULE, environment_problem
from search_spaces.fused_kernels import DEVICE_RULE, FUSED_KERNELS, OFF, PACKAGE_RULE, PRECISION_RULE, REMEDIES
from search_spaces.graph_rules import GRAPHS_MODEL, GRAPHS_REMEDY, graphs_model
from search_spaces.kernel_rules import kernels_beside, kernels_device, kernels_model, kernels_package, kernels_precision
from search_spaces.layout_rules import layout_fits, layout_repeats
from search_spaces.model import FactoryModel, Model, ModelSpec
from search_spaces.packing_rules import DOCUMENT_RULES, PACKING_RULES
from search_spaces.pipeline import FOLDED_SCHEDULES, ONE_STAGE_SCHEDULES
from search_spaces.refusal import Refusal
from search_spaces.rule import Rule
from search_spaces.schedule_rules import (
    CURRICULUM,
    DIVIDES_REMEDY,
    LAYERS_REMEDY,
    MODEL_REMEDY,
    RANDOM_LTD,
    START_REMEDY,
    STEPS_REMEDY,
    TOKENS_REMEDY,
    curriculum_divides,
    ends,
    random_ltd_layers,
    schedule_model,
    schedule_tokens,
    starts,
)
from search_spaces.stage_layout import marks_offloading
from search_spaces.trial import Workload
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from search_spaces.windows import window_problem, windowed

_DEFAULTS = TrialConfig()

TP, PP, CP = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"
EP, ZERO, EVERY = "expert_parallel_size", "zero_stage", "checkpoint_every_k"
METHOD, WINDOW = "context_parallel_method", "attention_window"
STAGES, SCHEDULE, LAYOUT = "virtual_stages", "pipeline_schedule", "pipeline_layout"
DEGREES = (TP, PP, CP)
SECONDARY = (*DEGREES, ZERO, "hsdp_shard_size", "secondary_shard_size")
OFFLOADS = ("offload_optimizer", ZERO, PP, LAYOUT)
FACTORY = (*DEGREES, EP, "sequence_parallel")
BATCH = ("micro_batch_size", *DEGREES)
ROUND_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules that run the micro-batches in rounds of equal length."""
SEQUENCE = (CP, TP, METHOD, "sequence_parallel", "prompt_length")
ONE_STAGE_EQUALS = {"interleaved_1f1b": "1f1b", "looped_bfs": "gpipe"}
"""Schedules of several stages a rank -> what they are with one."""


def check_config(config: TrialConfig, context: SpaceContext) -> list[Refusal]:
    """Every rule that refuses the configuration, in the order of `rules_of`; empty: it is legal."""
    found = ((rule, rule.check(config, context)) for rule in rules_of(context.capability))
    return [Refusal(rule.name, message, rule.remedy) for rule, message in found if message is not None]


def check_shapes(config: TrialConfig, model: Model, workload: Workload, world_size: int) -> list[Refusal]:
    """As `check_config`, by the rules of `SHAPES` alone: what an engine asks, which knows its ranks and no cluster."""
    device = DeviceSpec(name="any", kind="cpu", memory_bytes=1, peak_flops={})
    cluster = ClusterSpec(
        name="any", nodes=1, devices_per_node=world_size, device=device, intra_node_bandwidth=1, inter_node_bandwidth=1,
        host_memory_bytes=1, cores_per_node=1,
    )  # fmt: skip
    context = SpaceContext(model=model, cluster=cluster, workload=workload, world_size=world_size)
    return [refusal for refusal in check_config(config, context) if refusal.rule in SHAPES]


def _world_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    replica = config.model_parallel_size
    if context.world_size % replica == 0:
        return None
    return f"a replica takes {replica} ranks (tensor x pipeline x context), which does not divide {context.world_size}"


def _batch_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    replicas = max(config.data_parallel_size(context.world_size), 1)
    batch = context.workload.global_batch_size
    step = config.micro_batch_size * replicas
    if batch % step == 0:
        return None
    nearest = max((2 * batch + step) // (2 * step), 1) * step
    parts = f"micro_batch_size {config.micro_batch_size} on each of {replicas} replicas"
    return f"a global batch of {batch} is no multiple of {step} ({parts}), the nearest is {nearest}"


def _factory_shape(config: TrialConfig, context: SpaceContext) -> str | None:
    model = context.model
    if not isinstance(model, FactoryModel):
        return None
    if config.tensor_parallel_size > 1 and not model.tensor_divisor:
        return f"{model.name} has no tensor-parallel plan"
    if config.pipeline_parallel_size > 1 and model.pipeline_stages == 1:
        return f"{model.name} has no pipeline stages: {model.no_stages or 'its blocks are not known'}"
    for name in (CP, EP, "sequence_parallel"):
        if getattr(config, name) != getattr(_DEFAULTS, name):
            return f"{name}={getattr(config, name)} needs attention and experts of our own, not those of {model.name}"
    return None


def _tensor_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    model, size = context.model, config.tensor_parallel_size
    if isinstance(model, FactoryModel):
        divides = not model.tensor_divisor or model.tensor_divisor % size == 0
        return None if divides else f"{size} ranks do not divide {model.tensor_divisor}, as the plan of {model.name} needs"
    if not isinstance(model, ModelSpec):
        return None  # a script tells itself what it cannot divide
    sizes = {
        "attention heads": model.num_attention_heads,
        "key-value heads": model.num_key_value_heads,
        "an expert's width" if model.num_experts else "the MLP's width": model.ffn_hidden_size,
        "the vocabulary": model.vocab_size,
    }
    wrong = [f"{name} ({value})" for name, value in sizes.items() if value % size]
    return f"{size} ranks do not divide {', '.join(wrong)} of {model.name}" if wrong else None


def _tensor_in_node(config: TrialConfig, context: SpaceContext) -> str | None:
    size, devices = config.tensor_parallel_size, min(context.cluster.devices_per_node, context.world_size)
    if size <= devices and devices % size == 0:
        return None
    return f"{size} tensor-parallel ranks do not fit evenly into a node of {devices} devices"


def _sequence_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    """Where keys and values are gathered a context rank takes one chunk from the head and one from the tail, so that causal
    attention costs all ranks alike.
    """
    length, ranks = context.workload.sequence_length, config.context_parallel_size
    each = 2 if ranks > 1 and config.context_parallel_method == "gather" else 1
    if length % (each * ranks):
        told = f"{each * ranks} chunks, {'two' if each == 2 else 'one'} for each of {ranks} context ranks"
        return f"a sequence of {length} tokens is not divided into {told}"
    tensor = config.tensor_parallel_size if config.sequence_parallel else 1
    inside = length // ranks + config.prompt_length
    if inside % tensor:
        prompt = f", {config.prompt_length} of them of the prompt," if config.prompt_length else ""
        return f"{inside} tokens on a context rank{prompt} are not divided by {tensor} tensor-parallel ranks"
    return None


def _pipeline_layers(config: TrialConfig, context: SpaceContext) -> str | None:
    stages, model = config.pipeline_parallel_size * config.virtual_stages, context.model
    if config.pipeline_parallel_size == 1 or isinstance(model, CommandModel):
        return None
    most = model.num_layers if isinstance(model, ModelSpec) else model.pipeline_stages
    if stages <= most:
        return None
    what = "layers" if isinstance(model, ModelSpec) else "stages that the module can be cut into"
    return f"{stages} stages (ranks x virtual stages) are more than the {most} {what}"


def _virtual_stages(config: TrialConfig, _: SpaceContext) -> str | None:
    schedule, stages = config.pipeline_schedule, config.virtual_stages
    if config.pipeline_parallel_size == 1:
        return None
    if schedule in ONE_STAGE_SCHEDULES:
        return f"{schedule} runs one stage a rank, not {stages}" if stages != 1 else None
    if schedule in FOLDED_SCHEDULES:
        return f"{schedule} folds two stages into a rank, not {stages}" if stages != 2 else None
    # With one stage a rank the zero-bubble schedule is ZB-H1, which no other name gives.
    same = ONE_STAGE_EQUALS.get(schedule)
    return f"{schedule} with one stage a rank is {same}, it needs at least 2" if same and stages < 2 else None


def _pipeline_batches(config: TrialConfig, context: SpaceContext) -> str | None:
    """What the constructors of torch.distributed.pipelining ask for (2.13; tests hold this rule against them).

    Interleaved schedules run in max(1, micro-batches // ranks) rounds of equal length.
    """
    schedule, ranks = config.pipeline_schedule, config.pipeline_parallel_size
    if ranks == 1:
        return None
    count = config.gradient_accumulation_steps(context.workload.global_batch_size, context.world_size)
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    if count < least:
        return f"{schedule} on {ranks} ranks needs at least {least} micro-batches, not {count}"
    rounds = max(1, count // ranks)
    if schedule in ROUND_SCHEDULES and count % rounds:
        return f"{schedule} on {ranks} ranks runs {rounds} rounds, which do not divide {count} micro-batches"
    return None


def _experts_divide(config: TrialConfig, context: SpaceContext) -> str | None:
    size = config.expert_parallel_size
    if size == 1 or not isinstance(context.model, ModelSpec):
        return None
    if context.model.num_experts % size or not context.model.num_experts:
        return f"{size} ranks do not divide {context.model.num_experts} experts"
    replicas = config.data_parallel_size(context.world_size)
    return f"{size} does not divide the {replicas} data-parallel ranks" if replicas % size or not replicas else None


def _experts_context(config: TrialConfig, context: SpaceContext) -> str | None:
    """What is counted over a whole sequence no rank knows that has a part of it."""
    model, ranks = context.model, config.context_parallel_size
    if ranks == 1 or not isinstance(model, ModelSpec):
        return None
    counted = [name for name in ("capacity_factor", "load_balance") if model.num_experts and getattr(model, name)]
    if not counted:
        return None
    return f"the {' and the '.join(counted)} of {model.name} hold for whole sequences, which {ranks} context ranks divide"


def _hsdp_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    size, ranks = config.hsdp_shard_size, config.zero_ranks(context.world_size)
    if size == 0:
        return None
    if config.zero_stage != 3:
        return f"hsdp_shard_size={size} needs sharded parameters, but zero_stage is {config.zero_stage}"
    return f"{size} does not divide the {ranks} ranks of data x context" if ranks % size or size > ranks else None


def _secondary_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    size, ranks = config.secondary_shard_size, config.shard_ranks(context.world_size)
    if size == 0 or config.zero_stage != 3 or (size <= ranks and ranks % size == 0):
        return None
    return f"{size} does not divide the {ranks} ranks that share the parameters"


def _offload_optimizer_stage(config: TrialConfig, _: SpaceContext) -> str | None:
    if config.zero_stage >= 1:
        return None
    if config.pipeline_parallel_size > 1 and marks_offloading(config):
        return f"pipeline_layout={config.pipeline_layout} offloads the optimizer state of stages, but zero_stage is 0"
    if config.offload_optimizer == "none":
        return None
    return "the optimizer state is offloaded, but zero_stage is 0"


def _offload_param_stage(config: TrialConfig, _: SpaceContext) -> str | None:
    if config.offload_param == "none" or config.zero_stage == 3:
        return None
    return f"parameters are offloaded, but zero_stage is {config.zero_stage}"


def _nvme_path(config: TrialConfig, context: SpaceContext) -> str | None:
    if "nvme" not in (config.offload_optimizer, config.offload_param) or context.workload.nvme_path is not None:
        return None
    return "states are offloaded to files, but no folder is named for them"


def _checkpointed_layers(config: TrialConfig, context: SpaceContext) -> str | None:
    every, model = config.checkpoint_every_k, context.model
    if config.activation_checkpointing == "none" or not isinstance(model, ModelSpec) or every <= model.num_layers:
        return None
    return f"no {every}th layer exists among {model.num_layers}"


def _precision_supported(config: TrialConfig, context: SpaceContext) -> str | None:
    device = context.cluster.device
    if config.precision == float8.FLOAT8 or device.supports(config.precision):
        return None
    return f"{device.name} does not compute in {config.precision}"


def _accumulation_type(config: TrialConfig, _: SpaceContext) -> str | None:
    summed = config.accumulation_dtype
    if summed in (_DEFAULTS.accumulation_dtype, config.precision):
        return None
    return f"gradients in {config.precision} would be summed in {summed}"


def _attention_kernel(config: TrialConfig, context: SpaceContext) -> str | None:
    kernel, model = config.attention_backend, context.model
    if isinstance(model, CommandModel):
        return None
    precision = "bf16" if config.precision == float8.FLOAT8 else config.precision
    window = windowed(model, config).sliding_window if isinstance(model, ModelSpec) else 0
    masked = 0 < window < context.workload.sequence_length
    # Groups of heads are no reason: the engine repeats keys and values for a kernel that takes none.
    problem = verdict(kernel, precision, 1, 1, context.cluster.device.kind, masked).problem
    return f"{problem}, which the sliding window of {window} tokens needs" if problem and problem.endswith("mask") else problem


def _attention_window(config: TrialConfig, context: SpaceContext) -> str | None:
    return window_problem(config, context.model, context.workload.sequence_length)


def _ulysses_heads(config: TrialConfig, context: SpaceContext) -> str | None:
    """Every context rank has heads of its own for the whole sequence, after tensor ranks have taken theirs."""
    model, ranks = context.model, config.context_parallel_size * config.tensor_parallel_size
    if config.context_parallel_method != "ulysses" or config.context_parallel_size == 1 or not isinstance(model, ModelSpec):
        return None
    sizes = {"attention heads": model.num_attention_heads, "key-value heads": model.num_key_value_heads}
    wrong = [f"{name} ({value})" for name, value in sizes.items() if value % ranks]
    return f"{ranks} ranks of context x tensor do not divide {', '.join(wrong)} of {model.name}" if wrong else None


def _adapters(config: TrialConfig, context: SpaceContext) -> str | None:
    return adapters.adapters_problem(config, context.model)


def _adapters_together(config: TrialConfig, context: SpaceContext) -> str | None:
    return None if isinstance(context.model, CommandModel) else adapters.together_problem(config)


def _virtual_tokens(config: TrialConfig, context: SpaceContext) -> str | None:
    if isinstance(context.model, CommandModel):
        return None
    return adapters.tokens_problem(config, context.workload.sequence_length)


def _environment(config: TrialConfig, context: SpaceContext) -> str | None:
    return environment_problem(config.environment, context.cluster.device.kind)


def _engine_honours(config: TrialConfig, context: SpaceContext) -> str | None:
    return context.capability.refusal(config) if context.capability else None


HONOURS = Rule(ENGINE_HONOURS, KNOB_NAMES, HONOURS_REMEDY, _engine_honours)
"""The one rule that reads every knob; it judges knob by knob (`Capability.honours`)."""

RULES: tuple[Rule, ...] = (
    Rule("world-divides", DEGREES, "choose degrees whose product divides the ranks", _world_divides),
    Rule("tensor-divides", (TP,), "choose a tensor_parallel_size that divides all of them", _tensor_divides),
    Rule("tensor-in-node", (TP,), "choose a tensor_parallel_size that divides the devices of a node", _tensor_in_node),
    Rule("factory-shape", FACTORY, "leave these degrees at 1, or have the factory return a plan", _factory_shape),
    Rule("batch-divides", BATCH, "change micro_batch_size, or the global batch", _batch_divides),
    Rule("sequence-divides", SEQUENCE, "choose degrees that divide the sequence", _sequence_divides),
    Rule("pipeline-layers", (PP, STAGES), "use fewer pipeline ranks or virtual stages", _pipeline_layers),
    Rule("pipeline-layout", (PP, STAGES, LAYOUT), "write a count for each stage that sum to the layers", layout_fits),
    Rule("layout-repeats", (PP, STAGES, LAYOUT), "set that knob, and leave it out of pipeline_layout", layout_repeats),
    Rule("virtual-stages", (PP, STAGES, SCHEDULE), "set virtual_stages as the schedule needs", _virtual_stages),
    Rule("pipeline-micro-batches", (*BATCH, SCHEDULE), "change micro_batch_size, or the global batch", _pipeline_batches),
    Rule("experts-divide", (*DEGREES, EP), "choose a divisor of the experts and of the data-parallel ranks", _experts_divide),
    Rule("experts-context", (CP,), "set context_parallel_size=1, or use a model without them", _experts_context),
    Rule("hsdp-shards", (*DEGREES, ZERO, "hsdp_shard_size"), "use zero_stage=3 and a divisor of those ranks", _hsdp_divides),
    Rule("secondary-shards", SECONDARY, "choose a divisor of them, or 0", _secondary_divides),
    Rule("offload-optimizer-stage", OFFLOADS, "use zero_stage 1, 2 or 3", _offload_optimizer_stage),
    Rule("offload-param-stage", ("offload_param", ZERO), "use zero_stage=3", _offload_param_stage),
    Rule("nvme-path", ("offload_optimizer", "offload_param"), "name a folder with --nvme-path, or use cpu", _nvme_path),
    Rule("checkpoint-layers", ("activation_checkpointing", EVERY), "lower checkpoint_every_k", _checkpointed_layers),
    Rule("precision-supported", ("precision",), "choose a precision that the device computes in", _precision_supported),
    Rule("attention-kernel", ("attention_backend", "precision", WINDOW), "leave attention_backend at best", _attention_kernel),
    Rule("float8-device", ("precision",), float8.DEVICE_REMEDY, float8.float8_device),
    Rule("float8-model", ("precision",), float8.MODEL_REMEDY, float8.float8_model),
    Rule("float8-sizes", ("precision", TP), float8.SIZES_REMEDY, float8.float8_sizes),
    Rule("accumulation-type", ("accumulation_dtype", "precision"), "set it to fp32 or to the precision", _accumulation_type),
    Rule(ENVIRONMENT_RULE, (ENVIRONMENT,), "set variables of docs/environment.md that act here", _environment),
    Rule("adapters", (*adapters.METHODS, "lora_targets"), adapters.ADAPTERS_REMEDY, _adapters),
    Rule("adapters-together", adapters.METHODS, adapters.TOGETHER_REMEDY, _adapters_together),
    Rule("virtual-tokens", adapters.VIRTUAL_TOKENS, adapters.TOKENS_REMEDY, _virtual_tokens),
    Rule("ulysses-heads", (CP, TP, METHOD), "set context_parallel_method=gather, or use fewer ranks", _ulysses_heads),
    Rule("attention-window", (WINDOW, "attention_global_tokens"), "lower them, or set attention_window=0", _attention_window),
    Rule("curriculum-length", CURRICULUM[:1], START_REMEDY, starts(CURRICULUM[0])),
    Rule("curriculum-steps", CURRICULUM, STEPS_REMEDY, ends(*CURRICULUM)),
    Rule("curriculum-divides", (CURRICULUM[0], CP, TP, "sequence_parallel"), DIVIDES_REMEDY, curriculum_divides),
    Rule("random-ltd-tokens", RANDOM_LTD[:1], START_REMEDY, starts(RANDOM_LTD[0])),
    Rule("random-ltd-steps", RANDOM_LTD, STEPS_REMEDY, ends(*RANDOM_LTD)),
    Rule("random-ltd-layers", (RANDOM_LTD[0], WINDOW, "attention_global_tokens"), LAYERS_REMEDY, random_ltd_layers),
    Rule("schedule-tokens", (CURRICULUM[0], RANDOM_LTD[0], *adapters.VIRTUAL_TOKENS), TOKENS_REMEDY, schedule_tokens),
    Rule("schedule-model", (CURRICULUM[0], RANDOM_LTD[0]), MODEL_REMEDY, schedule_model),
    *DOCUMENT_RULES,
    *PACKING_RULES,
    Rule("fused-kernels-model", (FUSED_KERNELS,), OFF, kernels_model),
    Rule(DEVICE_RULE, (FUSED_KERNELS,), REMEDIES[DEVICE_RULE], kernels_device),
    Rule(PACKAGE_RULE, (FUSED_KERNELS,), REMEDIES[PACKAGE_RULE], kernels_package),
    Rule(PRECISION_RULE, (FUSED_KERNELS, "precision"), REMEDIES[PRECISION_RULE], kernels_precision),
    Rule(
        "fused-kernels-beside",
        (FUSED_KERNELS, "compile_blocks", "cuda_graphs"),
        f"{OFF}, or leave these out",
        kernels_beside,
    ),
    Rule(GRAPHS_MODEL, ("cuda_graphs", WINDOW, "attention_global_tokens"), GRAPHS_REMEDY, graphs_model),
    HONOURS,
)
"""The rules that hold for every engine, in the order in which refusals are listed."""

SHAPES = frozenset({
    "world-divides", "tensor-divides", "batch-divides", "sequence-divides", "pipeline-layers", "pipeline-layout",
    "virtual-stages", "pipeline-micro-batches", "experts-divide", "experts-context", "hsdp-shards", "secondary-shards",
    "ulysses-heads", "attention-window", "curriculum-divides",
})  # fmt: skip
"""The rules of how model, data and ranks divide each other. Whoever divides nevertheless trains a smaller model or batch."""


def rules_of(capability: Capability | None) -> tuple[Rule, ...]:
    """RULES, and one for each combination that the engine refuses; None: any engine, so that RULES alone refuse."""
    return RULES if capability is None else (*RULES, *map(_combination_rule, capability.combinations))


def _combination_rule(combination: Combination) -> Rule:
    def check(config: TrialConfig, context: SpaceContext) -> str | None:
        return combination.problem if combination.holds(config, context.world_size) else None

    return Rule(combination.rule, combination.reads, combination.remedy, check)
