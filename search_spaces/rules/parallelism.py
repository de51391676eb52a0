"""Rules of dividing and sharding: divisibility of model, sequence, batch and ranks; sharding and offloading of states."""

from search_spaces.capability import Rule, SpaceContext
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, HeadNorm, ModelSpec
from search_spaces.models.pipeline import (
    FOLDED_SCHEDULES,
    ONE_STAGE_SCHEDULES,
    is_split,
    marks_offloading,
    parse_layout,
    redundancy,
)
from search_spaces.trial_config import TrialConfig

_DEFAULTS = TrialConfig()
TP, PP, CP = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"
EP, ETP, METHOD = "expert_parallel_size", "expert_tensor_parallel_size", "context_parallel_method"
STAGES, SCHEDULE, LAYOUT = "virtual_stages", "pipeline_schedule", "pipeline_layout"
DEGREES = (TP, PP, CP)
BATCH = ("micro_batch_size", *DEGREES)
ONE_STAGE_EQUALS = {"interleaved_1f1b": "1f1b", "looped_bfs": "gpipe"}
"""Schedule for several stages per rank -> the equivalent schedule with one stage per rank."""


def _world_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    replica = config.model_parallel_size
    if context.world_size % replica == 0:
        return None
    return f"a replica takes {replica} ranks (tensor x pipeline x context), which does not divide {context.world_size}"


def _tensor_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    model, size = context.model, config.tensor_parallel_size
    if isinstance(model, FactoryModel):
        divides = not model.tensor_divisor or model.tensor_divisor % size == 0
        return None if divides else f"{size} ranks do not divide {model.tensor_divisor}, as the plan of {model.name} needs"
    if not isinstance(model, ModelSpec):
        return None  # a script reports by itself what it cannot divide
    sizes = {
        "attention heads": model.num_attention_heads,
        "key-value heads": model.num_key_value_heads,
        # That of an expert is divided by the ranks of `_expert_slices`.
        "the MLP's width": 0 if model.num_experts else model.ffn_hidden_size,
        "the dense layers' MLP": model.dense_ffn_size,
        "the shared experts' width": model.shared_expert_size,
        "the vocabulary": model.vocab_size,
    }
    wrong = [f"{name} ({value})" for name, value in sizes.items() if value % size]
    return f"{size} ranks do not divide {', '.join(wrong)} of {model.name}" if wrong else None


def _tensor_head_norms(config: TrialConfig, context: SpaceContext) -> str | None:
    """A rank that has some heads cannot norm all of them together."""
    model, size = context.model, config.tensor_parallel_size
    if size == 1 or not isinstance(model, ModelSpec) or model.head_norm is not HeadNorm.WIDTH:
        return None
    return f"the norms of queries and keys of {model.name} span all heads, which {size} ranks would divide"


def _tensor_in_node(config: TrialConfig, context: SpaceContext) -> str | None:
    """Within the devices that the fast link joins, so that no group of consecutive ranks lies in two link domains."""
    size, devices = config.tensor_parallel_size, min(context.cluster.linked_devices, context.world_size)
    if size <= devices and devices % size == 0:
        return None
    return f"{size} tensor-parallel ranks do not fit evenly into a {context.cluster.link_domain_text} of {devices} devices"


def _factory_shape(config: TrialConfig, context: SpaceContext) -> str | None:
    model = context.model
    if not isinstance(model, FactoryModel):
        return None
    if config.tensor_parallel_size > 1 and not model.tensor_divisor:
        return f"{model.name} has no tensor-parallel plan"
    if config.pipeline_parallel_size > 1 and model.pipeline_stages == 1:
        return f"{model.name} has no pipeline stages: {model.no_stages or 'its blocks are unknown'}"
    for name in (CP, EP, ETP, "sequence_parallel"):
        if getattr(config, name) != getattr(_DEFAULTS, name):
            return f"{name}={getattr(config, name)} needs our own attention and experts, not those of {model.name}"
    return None


def _batch_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    replicas = max(config.data_parallel_size(context.world_size), 1)
    batch = context.workload.global_batch_size
    step = config.micro_batch_size * replicas
    if batch % step == 0:
        return None
    nearest = max((2 * batch + step) // (2 * step), 1) * step
    parts = f"micro_batch_size {config.micro_batch_size} on each of {replicas} replicas"
    return f"a global batch of {batch} is not a multiple of {step} ({parts}), the nearest is {nearest}"


def _sequence_divides(config: TrialConfig, context: SpaceContext) -> str | None:
    """With gathered keys and values, a context rank takes one chunk from the start and one from the end, so that causal
    attention costs the same on all ranks.
    """
    length, ranks = context.workload.sequence_length, config.context_parallel_size
    rank_chunks = 2 if ranks > 1 and config.context_parallel_method == "gather" else 1
    if length % (rank_chunks * ranks):
        chunks = f"{rank_chunks * ranks} chunks, {'two' if rank_chunks == 2 else 'one'} for each of {ranks} context ranks"
        return f"a sequence of {length} tokens is not divided into {chunks}"
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
    noun = "layers" if isinstance(model, ModelSpec) else "stages that the module can be cut into"
    return f"{stages} stages (ranks x virtual stages) are more than the {most} {noun}"


def _layout_fits(config: TrialConfig, context: SpaceContext) -> str | None:
    """The layout must have every stage and every layer of the model."""
    text, model = config.pipeline_layout, context.model
    if not text or config.pipeline_parallel_size == 1:
        return None
    if isinstance(model, FactoryModel):
        return f"pipeline_layout={text} counts layers, but the layers of {model.name}, a module of your own, are unknown"
    counts = [stage.layers for stage in parse_layout(text)]
    stages = config.pipeline_parallel_size * config.virtual_stages
    if len(counts) != stages:
        return f"pipeline_layout={text} has {len(counts)} stages, and there are {stages} (ranks x virtual stages)"
    if isinstance(model, ModelSpec) and sum(counts) != model.num_layers:
        return f"pipeline_layout={text} has {sum(counts)} layers, and {model.name} has {model.num_layers}"
    return None


def _layout_repeats(config: TrialConfig, context: SpaceContext) -> str | None:
    """Refuse a layout that other knobs express, so that each configuration has one representation."""
    text = config.pipeline_layout
    if not text or config.pipeline_parallel_size == 1:
        return None
    alike = redundancy(parse_layout(text))
    if alike is not None:
        return f"with pipeline_layout={text} every stage {alike}"
    even = config.replace({"pipeline_layout": "", "pipeline_split": "even"})
    if is_split(text, even, context.model, context.workload.sequence_length):
        return f"pipeline_layout={text} is the same as pipeline_split=even"
    return None


def _virtual_stages(config: TrialConfig, _: SpaceContext) -> str | None:
    schedule, stages = config.pipeline_schedule, config.virtual_stages
    if config.pipeline_parallel_size == 1:
        return None
    if schedule in ONE_STAGE_SCHEDULES:
        return f"{schedule} runs one stage per rank, not {stages}" if stages != 1 else None
    if schedule in FOLDED_SCHEDULES:
        return f"{schedule} folds two stages into a rank, not {stages}" if stages != 2 else None
    # With one stage per rank the zero-bubble schedule is ZB-H1, which no other name gives.
    same = ONE_STAGE_EQUALS.get(schedule)
    return f"{schedule} with one stage per rank is {same}, it needs at least 2" if same and stages < 2 else None


def _pipeline_batches(config: TrialConfig, context: SpaceContext) -> str | None:
    """Requirements of the constructors of torch.distributed.pipelining (2.13; tests compare this rule with them).

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
    # These schedules run the micro-batches in rounds of equal length.
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and count % rounds:
        return f"{schedule} on {ranks} ranks runs {rounds} rounds, which do not divide {count} micro-batches"
    return None


def _experts_divide(config: TrialConfig, context: SpaceContext) -> str | None:
    size = config.expert_parallel_size
    if size == 1 or not isinstance(context.model, ModelSpec):
        return None
    if context.model.num_experts % size or not context.model.num_experts:
        return f"{size} ranks do not divide {context.model.num_experts} experts"
    ranks = config.expert_ranks(context.world_size)
    beside = "data x context" if config.expert_slices == config.tensor_parallel_size else "tensor x data x context"
    return f"{size} does not divide the {ranks} ranks of {beside} with the same slice" if ranks % size or not ranks else None


def _expert_slices(config: TrialConfig, context: SpaceContext) -> str | None:
    """The ranks that divide each expert divide its tensor group, and an expert's width."""
    model, size, tensor = context.model, config.expert_slices, config.tensor_parallel_size
    if size == 1 or not isinstance(model, ModelSpec) or not model.num_experts:
        return None
    if tensor % size:
        return f"{size} ranks for each expert do not divide the {tensor} tensor-parallel ranks"
    if model.ffn_hidden_size % size:
        return f"{size} ranks do not divide an expert's width ({model.ffn_hidden_size}) of {model.name}"
    return None


def _expert_tokens(config: TrialConfig, context: SpaceContext) -> str | None:
    """Tensor ranks that do not divide each expert have different tokens there, and each counts its own."""
    model, ranks = context.model, config.tensor_parallel_size
    if config.expert_slices >= ranks or not isinstance(model, ModelSpec) or not model.num_experts:
        return None
    if model.capacity_factor:
        return (
            f"the capacity_factor of {model.name} applies to whole sequences, which {ranks} tensor ranks divide at its experts"
        )
    tokens = context.workload.sequence_length // config.context_parallel_size
    return f"{tokens} tokens on a context rank are not divided by {ranks} tensor-parallel ranks" if tokens % ranks else None


def _experts_context(config: TrialConfig, context: SpaceContext) -> str | None:
    """A rank with a part of a sequence cannot count over the whole sequence."""
    model, ranks = context.model, config.context_parallel_size
    if ranks == 1 or not isinstance(model, ModelSpec):
        return None
    counted = [name for name in ("capacity_factor", "load_balance") if model.num_experts and getattr(model, name)]
    if not counted:
        return None
    return f"the {' and the '.join(counted)} of {model.name} apply to whole sequences, which {ranks} context ranks divide"


def _ulysses_heads(config: TrialConfig, context: SpaceContext) -> str | None:
    """Tensor and context ranks together divide the heads; each context rank has its heads for the whole sequence."""
    model, ranks = context.model, config.context_parallel_size * config.tensor_parallel_size
    if config.context_parallel_method != "ulysses" or config.context_parallel_size == 1 or not isinstance(model, ModelSpec):
        return None
    sizes = {"attention heads": model.num_attention_heads, "key-value heads": model.num_key_value_heads}
    wrong = [f"{name} ({value})" for name, value in sizes.items() if value % ranks]
    return f"{ranks} ranks of context x tensor do not divide {', '.join(wrong)} of {model.name}" if wrong else None


PARALLELISM_RULES: tuple[Rule, ...] = (
    Rule("world-divides", DEGREES, "choose degrees whose product divides the ranks", _world_divides),
    Rule("tensor-divides", (TP,), "choose a tensor_parallel_size that divides all of them", _tensor_divides),
    Rule("tensor-head-norms", (TP,), "set tensor_parallel_size=1", _tensor_head_norms),
    Rule(
        "tensor-in-node",
        (TP,),
        "choose a tensor_parallel_size that divides the devices of a node, or link domain",
        _tensor_in_node,
    ),
    Rule(
        "factory-shape",
        (*DEGREES, EP, ETP, "sequence_parallel"),
        "leave these degrees at 1, or have the factory return a plan",
        _factory_shape,
    ),
    Rule("batch-divides", BATCH, "change micro_batch_size, or the global batch", _batch_divides),
    Rule(
        "sequence-divides",
        (CP, TP, METHOD, "sequence_parallel", "prompt_length"),
        "choose degrees that divide the sequence",
        _sequence_divides,
    ),
    Rule("pipeline-layers", (PP, STAGES), "use fewer pipeline ranks or virtual stages", _pipeline_layers),
    Rule(
        "pipeline-layout", (PP, STAGES, LAYOUT), "write one count for each stage; they must add up to the layers", _layout_fits
    ),
    Rule("layout-repeats", (PP, STAGES, LAYOUT), "set that knob, and leave it out of pipeline_layout", _layout_repeats),
    Rule("virtual-stages", (PP, STAGES, SCHEDULE), "set virtual_stages as the schedule needs", _virtual_stages),
    Rule("pipeline-micro-batches", (*BATCH, SCHEDULE), "change micro_batch_size, or the global batch", _pipeline_batches),
    Rule("experts-divide", (*DEGREES, EP, ETP), "choose a divisor of the experts and of these ranks", _experts_divide),
    Rule("expert-slices", (TP, ETP), "choose an expert_tensor_parallel_size that divides both", _expert_slices),
    Rule("expert-tokens", (CP, TP, ETP), "leave expert_tensor_parallel_size at 0, or choose other degrees", _expert_tokens),
    Rule("experts-context", (CP,), "set context_parallel_size=1, or use a model without them", _experts_context),
    Rule("ulysses-heads", (CP, TP, METHOD), "set context_parallel_method=gather, or use fewer ranks", _ulysses_heads),
)


ZERO = "zero_stage"


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
    return f"{size} does not divide the {ranks} ranks that shard the parameters"


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
    return "states are offloaded to files, but no folder is given for them"


ZERO_RULES: tuple[Rule, ...] = (
    Rule("hsdp-shards", (*DEGREES, ZERO, "hsdp_shard_size"), "use zero_stage=3 and a divisor of those ranks", _hsdp_divides),
    Rule(
        "secondary-shards",
        (*DEGREES, ZERO, "hsdp_shard_size", "secondary_shard_size"),
        "choose a divisor of them, or 0",
        _secondary_divides,
    ),
    Rule(
        "offload-optimizer-stage", ("offload_optimizer", ZERO, PP, LAYOUT), "use zero_stage 1, 2 or 3", _offload_optimizer_stage
    ),
    Rule("offload-param-stage", ("offload_param", ZERO), "use zero_stage=3", _offload_param_stage),
    Rule("nvme-path", ("offload_optimizer", "offload_param"), "name a folder with --nvme-path, or use cpu", _nvme_path),
)
