"""Every knob, and how a value for it is read and checked."""

import re
from collections.abc import Mapping

from search_spaces.adapters import METHODS, adapts
from search_spaces.compression import INT8
from search_spaces.context import SpaceContext
from search_spaces.documents import packs
from search_spaces.environment import ENVIRONMENT, environment_text
from search_spaces.errors import KnobValueError
from search_spaces.fused_kernels import FUSED_KERNELS, KERNEL_CHOICES
from search_spaces.knob import Applies, Condition, Kind, Knob, Numerics
from search_spaces.optimizers import KERNELS, OPTIMIZERS
from search_spaces.preset_files import unknown_name
from search_spaces.stage_layout import layout_text, marks_offloading, marks_recomputation, parse_layout
from search_spaces.trial_config import TrialConfig, Value


def _at_stages(*stages: int) -> Condition:
    text = f"zero_stage is {' or '.join(str(stage) for stage in stages)}"
    return Condition(text, ("zero_stage",), lambda config, _: config.zero_stage in stages)


def _accumulates(config: TrialConfig, context: SpaceContext) -> bool:
    workload = context.workload
    return config.gradient_accumulation_steps(workload.global_batch_size, context.world_size) > 1


PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
STAGE_3 = _at_stages(3)
STAGES_1_2 = _at_stages(1, 2)
GATHERS_UPDATED = Condition(
    "zero_stage is 1 or 2 and data x context ranks > 1",
    ("zero_stage", *PARALLEL_SIZES),
    lambda config, context: config.zero_stage in (1, 2) and config.zero_ranks(context.world_size) > 1,
)
DEFERS = Condition(
    "zero_stage is 2 and gradient_accumulation_steps > 1",
    ("zero_stage", "micro_batch_size", *PARALLEL_SIZES),
    lambda config, context: config.zero_stage == 2 and _accumulates(config, context),
)
OFFLOADS = Condition(
    "offload_optimizer is not none", ("offload_optimizer",), lambda config, _: config.offload_optimizer != "none"
)
TENSOR_PARALLEL = Condition(
    "tensor_parallel_size > 1", ("tensor_parallel_size",), lambda config, _: config.tensor_parallel_size > 1
)
PIPELINED = Condition(
    "pipeline_parallel_size > 1", ("pipeline_parallel_size",), lambda config, _: config.pipeline_parallel_size > 1
)
SPLITS = Condition(
    "pipeline_parallel_size > 1 and pipeline_layout is empty",
    ("pipeline_parallel_size", "pipeline_layout"),
    lambda config, _: config.pipeline_parallel_size > 1 and not config.pipeline_layout,
)
RECOMPUTES_ALIKE = Condition(
    "pipeline_layout marks no recomputation", ("pipeline_layout",), lambda config, _: not marks_recomputation(config)
)
OFFLOADS_ALIKE = Condition(
    "pipeline_layout marks no offloading", ("pipeline_layout",), lambda config, _: not marks_offloading(config)
)
CHECKPOINTS = Condition(
    "activation_checkpointing is not none",
    ("activation_checkpointing",),
    lambda config, _: config.activation_checkpointing != "none",
)
LOW_RANK = Condition("lora_rank > 0", ("lora_rank",), lambda config, _: config.lora_rank > 0)
ADAPTED = Condition(f"{', '.join(METHODS[:-1])} or {METHODS[-1]} > 0", METHODS, lambda config, _: adapts(config))
CONTEXT_PARALLEL = Condition(
    "context_parallel_size > 1", ("context_parallel_size",), lambda config, _: config.context_parallel_size > 1
)
WINDOWED = Condition("attention_window > 0", ("attention_window",), lambda config, _: config.attention_window > 0)
LENGTHENS = Condition(
    "curriculum_start_length > 0", ("curriculum_start_length",), lambda config, _: config.curriculum_start_length > 0
)
DROPS_TOKENS = Condition(
    "random_ltd_start_tokens > 0", ("random_ltd_start_tokens",), lambda config, _: config.random_ltd_start_tokens > 0
)
DATA_AND_PIPELINE = Condition(
    "pipeline_parallel_size > 1 and data-parallel degree > 1",
    PARALLEL_SIZES,
    lambda config, context: config.pipeline_parallel_size > 1 and config.data_parallel_size(context.world_size) > 1,
)
ACCUMULATES = Condition("gradient_accumulation_steps > 1", ("micro_batch_size", *PARALLEL_SIZES), _accumulates)
HAS_KERNEL = Condition(f"optimizer is {' or '.join(KERNELS)}", ("optimizer",), lambda config, _: config.optimizer in KERNELS)
ONEBIT = Condition("optimizer is onebit_adam", ("optimizer",), lambda config, _: config.optimizer == "onebit_adam")
GATHERS_AGAIN = Condition(
    "zero_stage is 3 and reshard_after_forward",
    ("zero_stage", "reshard_after_forward"),
    lambda config, _: config.zero_stage == 3 and config.reshard_after_forward,
)
ON_CUDA = Condition("on CUDA devices", (), lambda _, context: context.cluster.device.kind == "cuda")
GROWS_SEGMENTS = Condition(
    "on CUDA devices, cuda_graphs is false",
    ("cuda_graphs",),
    lambda config, context: ON_CUDA.holds(config, context) and not config.cuda_graphs,
)

PACKS = Condition("two of the workload's documents fit into a row", (), lambda _, context: packs(context.workload))
HAS_NUMA_NODES = Condition("a machine has several NUMA nodes", (), lambda _, context: context.cluster.numa_nodes != 1)

_INT, _BOOL, _FLOAT, _CHOICE = Kind.INT, Kind.BOOL, Kind.FLOAT, Kind.CHOICE
_EXACT, _REORDERS, _CHANGES = Numerics.EXACT, Numerics.REORDERS, Numerics.CHANGES
_STEP, _REBUILD, _GROUP, _PROCESS = Applies.STEP, Applies.REBUILD, Applies.PROCESS_GROUP, Applies.PROCESS
_BOTH: tuple[Value, ...] = (False, True)
_DTYPES: tuple[Value, ...] = ("fp32", "bf16", "fp16")


def _knob(
    name: str, unit: str, kind: Kind, numerics: Numerics, applies: Applies, description: str,
    choices: tuple[Value, ...] = (), minimum: float = 0, maximum: float | None = None, condition: Condition | None = None,
) -> Knob:  # fmt: skip
    return Knob(
        name=name, description=description, unit=unit, kind=kind, numerics=numerics, applies=applies, choices=choices,
        minimum=minimum, maximum=maximum, condition=condition,
    )  # fmt: skip


# fmt: off
_TABLE = (
    _knob("zero_stage", "stage", _INT, _REORDERS, _REBUILD,
          "What data-parallel ranks divide: 1 the optimizer state, 2 the gradients too, 3 the parameters too.",
          choices=(0, 1, 2, 3)),
    _knob("micro_batch_size", "samples", _INT, _REORDERS, _STEP,
          "Samples that a rank runs at once; gradient accumulation follows from the global batch.", minimum=1),
    _knob("reduce_bucket_size", "elements", _INT, _REORDERS, _REBUILD,
          "Gradients that one reduction carries. The default is Megatron-LM's: models of 100 million parameters have several, "
          "so that all but the last run beside backward.", minimum=1),
    _knob("allgather_bucket_size", "elements", _INT, _EXACT, _REBUILD,
          "Updated parameters that one all-gather carries.", minimum=1, condition=STAGES_1_2),
    _knob("prefetch_bucket_size", "elements", _INT, _EXACT, _REBUILD,
          "Parameters gathered ahead and not used yet, at most; 0 gathers none ahead.", condition=STAGE_3),
    _knob("param_persistence_threshold", "elements", _INT, _REORDERS, _REBUILD,
          "Parameters smaller than this stay whole on every rank.", condition=STAGE_3),
    _knob("max_live_parameters", "elements", _INT, _EXACT, _REBUILD,
          "Gathered parameters that may be held at once.", minimum=1, condition=STAGE_3),
    _knob("overlap_comm", "", _BOOL, _EXACT, _REBUILD,
          "Whether communication runs beside computation.", choices=_BOTH),
    _knob("contiguous_gradients", "", _BOOL, _EXACT, _REBUILD,
          "Whether gradients are copied into one buffer as they are made.", choices=_BOTH),
    _knob("defer_gradient_reduction", "", _BOOL, _REORDERS, _REBUILD,
          "Whether gradients are reduced once a step instead of once a micro-batch; whole gradients are then held.",
          choices=_BOTH, condition=DEFERS),
    _knob("reduce_dtype", "dtype", _CHOICE, _CHANGES, _REBUILD,
          "Type in which gradients are sent between ranks; int8: blocks of integers, summed in fp32 (qgZ of ZeRO++).",
          choices=(*_DTYPES, INT8)),
    _knob("hsdp_shard_size", "ranks", _INT, _REORDERS, _GROUP,
          "Ranks that share one copy of the sharded states, copies kept in step by all-reduce; 0: all data-parallel ranks."),
    _knob("reshard_after_forward", "", _BOOL, _EXACT, _REBUILD,
          "Whether gathered parameters are released after forward and gathered again for backward.",
          choices=_BOTH, condition=STAGE_3),
    _knob("offload_optimizer", "place", _CHOICE, _REORDERS, _REBUILD,
          "Where optimizer state is kept and updated.", choices=("none", "cpu", "nvme"), condition=OFFLOADS_ALIKE),
    _knob("offload_param", "place", _CHOICE, _EXACT, _REBUILD,
          "Where sharded parameters are kept.", choices=("none", "cpu", "nvme")),
    _knob("offload_ratio", "share", _FLOAT, _REORDERS, _REBUILD,
          "Share of the optimizer state that is offloaded.", maximum=1, condition=OFFLOADS),
    _knob("tensor_parallel_size", "ranks", _INT, _REORDERS, _GROUP,
          "Ranks that divide each matrix.", minimum=1),
    _knob("sequence_parallel", "", _BOOL, _REORDERS, _REBUILD,
          "Whether tensor-parallel ranks divide the norms' sequence too.", choices=_BOTH, condition=TENSOR_PARALLEL),
    _knob("pipeline_parallel_size", "ranks", _INT, _REORDERS, _GROUP,
          "Ranks that divide the layers.", minimum=1),
    _knob("virtual_stages", "stages a rank", _INT, _REORDERS, _REBUILD,
          "Pipeline stages that each rank holds.", minimum=1, condition=PIPELINED),
    _knob("pipeline_schedule", "name", _CHOICE, _REORDERS, _REBUILD,
          "Order in which a rank runs the micro-batches of its stages.", condition=PIPELINED,
          choices=("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")),
    _knob("pipeline_split", "name", _CHOICE, _REORDERS, _REBUILD,
          "How layers are shared out over stages: in equal numbers, or in equal FLOPs with the output projection counted in.",
          choices=("even", "balanced"), condition=SPLITS),
    _knob("context_parallel_size", "ranks", _INT, _REORDERS, _GROUP,
          "Ranks that divide each sequence.", minimum=1),
    _knob("expert_parallel_size", "ranks", _INT, _REORDERS, _GROUP,
          "Data-parallel ranks that divide the experts.", minimum=1),
    _knob("activation_checkpointing", "policy", _CHOICE, _EXACT, _REBUILD,
          "Which activations are computed again in backward instead of kept.", choices=("none", "selective", "full"),
          condition=RECOMPUTES_ALIKE),
    _knob("checkpoint_every_k", "layers", _INT, _EXACT, _REBUILD,
          "Every which layer is checkpointed.", minimum=1, condition=CHECKPOINTS),
    _knob("precision", "dtype", _CHOICE, _CHANGES, _REBUILD,
          "Type of parameters and activations in forward and backward.", choices=(*_DTYPES, "fp64", "fp8")),
    _knob("attention_backend", "name", _CHOICE, _REORDERS, _REBUILD,
          "Kernel of scaled dot-product attention; best lets torch choose.",
          choices=("best", "flash", "efficient", "cudnn", "math")),
    _knob("loss_chunk_size", "tokens", _INT, _REORDERS, _REBUILD,
          "Tokens whose logits are held at once; 0: all."),
    _knob("fused_optimizer", "", _BOOL, _REORDERS, _REBUILD,
          "Whether the update is one kernel instead of one an operation.", choices=_BOTH, condition=HAS_KERNEL),
    _knob("rank_order", "mesh order", _CHOICE, _REORDERS, _PROCESS,
          "Which dimension's ranks are neighbours, innermost first.", choices=("tp-cp-dp-pp", "tp-cp-pp-dp"),
          condition=DATA_AND_PIPELINE),
    _knob("expandable_segments", "", _BOOL, _EXACT, _PROCESS,
          "Whether the CUDA allocator grows its segments instead of adding new ones.", choices=_BOTH,
          condition=GROWS_SEGMENTS),
    _knob("script", "NAME=VALUE pairs", _CHOICE, _CHANGES, _PROCESS,
          "Knobs of a user's own script and its environment variables (engine `command` alone)."),
    _knob("compile_blocks", "", _BOOL, _REORDERS, _REBUILD,
          "Whether torch.compile makes kernels of each block's own; they are made in the first step.", choices=_BOTH),
    _knob("pipeline_layout", "layers a stage", _CHOICE, _REORDERS, _REBUILD,
          "Layers of every pipeline stage, such as 6-7f3-7s-4o, marked where a stage computes its first layers again (f in "
          "full, s selectively) or offloads its optimizer state (o); empty: as pipeline_split says.", condition=PIPELINED),
    _knob("accumulation_dtype", "dtype", _CHOICE, _CHANGES, _REBUILD,
          "Type in which gradients of micro-batches are summed: fp32, or the precision's own.", choices=_DTYPES,
          condition=ACCUMULATES),
    _knob("optimizer", "name", _CHOICE, _CHANGES, _REBUILD,
          "What turns gradients into updates, and keeps state for it; adamw8bit is AdamW with its moments in 8 bits, "
          "onebit_adam AdamW whose ranks send signs of momenta.",
          choices=OPTIMIZERS),
    _knob("lora_rank", "columns", _INT, _CHANGES, _REBUILD,
          "Rank of low-rank adapters beside frozen matrices, all that is trained then; 0: every parameter is trained."),
    _knob("lora_targets", "name", _CHOICE, _CHANGES, _REBUILD,
          "Which matrices of each layer have an adapter.", choices=("attention", "mlp", "both"), condition=LOW_RANK),
    _knob("frozen_dtype", "dtype", _CHOICE, _CHANGES, _REBUILD,
          "What frozen matrices of layers are kept in: the precision, blocks of 8-bit integers or of 4-bit NormalFloats.",
          choices=("same", "int8", "nf4"), condition=ADAPTED),
    _knob(ENVIRONMENT, "NAME=VALUE pairs", _CHOICE, _REORDERS, _PROCESS,
          "Variables that the ranks' processes are started with; measured on the best layout alone (environment_settings)."),
    _knob("adapter_size", "columns", _INT, _CHANGES, _REBUILD,
          "Columns of the bottlenecks behind attention and MLP of each layer, all that is trained then; 0: none."),
    _knob("prefix_length", "tokens", _INT, _CHANGES, _REBUILD,
          "Trained keys and values before those of the tokens in each layer, all that is trained then; 0: none."),
    _knob("prompt_length", "tokens", _INT, _CHANGES, _REBUILD,
          "Trained embeddings before those of the tokens, all that is trained then; 0: none."),
    _knob("context_parallel_method", "name", _CHOICE, _REORDERS, _REBUILD,
          "How ranks that divide a sequence attend to all of it: gather brings every rank's keys and values together, ulysses "
          "exchanges tokens for heads and back.", choices=("gather", "ulysses"), condition=CONTEXT_PARALLEL),
    _knob("attention_window", "tokens", _INT, _CHANGES, _REBUILD,
          "Tokens that a token sees back, itself included; 0: all, or as many as the model's own window."),
    _knob("attention_global_tokens", "tokens", _INT, _CHANGES, _REBUILD,
          "First tokens of a sequence that every token sees besides its window; 0: none.", condition=WINDOWED),
    _knob("gc_interval", "steps", _INT, _EXACT, _STEP,
          "Steps between two collections of reference cycles, at the same step on every rank; 0: Python collects by itself."),
    _knob("overlap_param_gather", "", _BOOL, _EXACT, _REBUILD,
          "Whether updated parameters are gathered beside the next step's forward instead of at the end of a step.",
          choices=_BOTH, condition=GATHERS_UPDATED),
    _knob("offload_activations", "", _BOOL, _EXACT, _REBUILD,
          "Whether what blocks save for backward waits in host memory.", choices=_BOTH),
    _knob("numa_binding", "", _BOOL, _EXACT, _PROCESS,
          "Whether each rank runs on the cores and in the memory of the NUMA node that its device is connected to.",
          choices=_BOTH, condition=HAS_NUMA_NODES),
    _knob("curriculum_start_length", "tokens", _INT, _CHANGES, _REBUILD,
          "Length of the first steps' samples, which grows linearly to whole ones; 0: all samples are whole."),
    _knob("curriculum_steps", "steps", _INT, _CHANGES, _REBUILD,
          "Steps of the run until samples are whole.", condition=LENGTHENS),
    _knob("random_ltd_start_tokens", "tokens", _INT, _CHANGES, _REBUILD,
          "Tokens, chosen at random, that layers but the first and the last see in the first steps (random-LTD), which grow "
          "linearly to all; 0: all."),
    _knob("random_ltd_steps", "steps", _INT, _CHANGES, _REBUILD,
          "Steps of the run until every layer sees every token.", condition=DROPS_TOKENS),
    _knob("gather_dtype", "dtype", _CHOICE, _CHANGES, _REBUILD,
          "What gathers of parameters carry: the precision, or blocks of 8-bit integers (qwZ of ZeRO++).",
          choices=("same", INT8), condition=STAGE_3),
    _knob("secondary_shard_size", "ranks", _INT, _EXACT, _GROUP,
          "Neighbours that share a second copy of the parameters, from which they are gathered again within a step (hpZ of "
          "ZeRO++); 0: there is none.", condition=GATHERS_AGAIN),
    _knob("onebit_warmup_steps", "steps", _INT, _CHANGES, _REBUILD,
          "First steps of onebit_adam, in which it is AdamW and sends whole gradients; a trial measures the steps after them.",
          minimum=1, condition=ONEBIT),
    _knob("async_tensor_parallel", "", _BOOL, _REORDERS, _REBUILD,
          "Whether sums of tensor-parallel products travel part by part beside them, and those of input gradients beside the "
          "weights' gradients.", choices=_BOTH, condition=TENSOR_PARALLEL),
    _knob("pack_sequences", "", _BOOL, _CHANGES, _REBUILD,
          "Whether several documents share a row, each with attention and positions of its own, instead of padding.",
          choices=_BOTH, condition=PACKS),
    _knob(FUSED_KERNELS, "name", _CHOICE, _REORDERS, _REBUILD,
          "Whose kernels compute norms and, of Liger, rotations, SiLU gates and the output projection with its loss; none: "
          "operators of torch.", choices=KERNEL_CHOICES),
    _knob("cuda_graphs", "", _BOOL, _REORDERS, _REBUILD,
          "Whether each block's forward and backward are captured as CUDA graphs after two steps, and replayed from then on.",
          choices=_BOTH, condition=ON_CUDA),
)
# fmt: on

KNOBS: Mapping[str, Knob] = {knob.name: knob for knob in _TABLE}
"""Every knob by its name, in the order of TrialConfig's fields."""

_TRUE = ("true", "on", "yes")
_FALSE = ("false", "off", "no")
_WHOLE = re.compile(r"[+-]?\d+(_\d+)*")
_NUMBER = re.compile(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d+)?")


def knob(name: str) -> Knob:
    """The knob of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in KNOBS:
        raise unknown_name("knob", name, KNOBS)
    return KNOBS[name]


def parse_value(name: str, text: str) -> Value:
    """The value that a user wrote for a knob: 5e8, 1_000_000, true, off, bf16.

    Raises:
        UnknownNameError: there is no such knob.
        KnobValueError: the text is no value of its domain.
    """
    spelled = text.strip()
    kind = knob(name).kind
    if kind is Kind.BOOL and spelled.lower() in _TRUE + _FALSE:
        return spelled.lower() in _TRUE
    if kind in (Kind.INT, Kind.FLOAT) and _NUMBER.fullmatch(spelled):
        return check_value(name, int(spelled) if _WHOLE.fullmatch(spelled) else float(spelled))
    return check_value(name, spelled.lower() if kind is Kind.CHOICE and knob(name).choices else spelled)


def check_value(name: str, value: object) -> Value:
    """`value` in the knob's own type (5e8 becomes 500000000 for whole numbers).

    Raises:
        UnknownNameError: there is no such knob.
        KnobValueError: the value is not in its domain.
    """
    the_knob = knob(name)
    checked = _typed(the_knob, value)
    if the_knob.choices and checked not in the_knob.choices:
        raise _refused(the_knob, value)
    if isinstance(checked, int | float) and not the_knob.choices and not the_knob.holds(checked):
        raise _refused(the_knob, value)
    if name == ENVIRONMENT:
        return environment_text(str(checked))
    return layout_text(parse_layout(str(checked))) if name == "pipeline_layout" else checked


def domain_text(the_knob: Knob) -> str:
    """The domain in words: `0, 1, 2 or 3`; `a whole number of elements, at least 1`."""
    if the_knob.kind is Kind.BOOL:
        return "true or false"
    if the_knob.choices:
        *others, last = (str(choice) for choice in the_knob.choices)
        return f"{', '.join(others)} or {last}"
    if the_knob.kind is Kind.CHOICE:
        return the_knob.unit
    what = f"a whole number of {the_knob.unit}" if the_knob.kind is Kind.INT else f"a {the_knob.unit}"
    if the_knob.maximum is not None:
        return f"{what} from {the_knob.minimum:g} to {the_knob.maximum:g}"
    return f"{what}, at least {the_knob.minimum:g}"


def value_text(value: object) -> str:
    """A knob's value as it can be given back with --pin."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(the_knob: Knob, value: object) -> Value:
    kind = the_knob.kind
    if isinstance(value, bool):
        if kind is Kind.BOOL:
            return value
    elif isinstance(value, str):
        if kind is Kind.CHOICE:
            return value
    elif isinstance(value, int | float):
        if kind is Kind.FLOAT:
            return float(value)
        if kind is Kind.INT and (isinstance(value, int) or value.is_integer()):
            return int(value)
    raise _refused(the_knob, value)


def _refused(the_knob: Knob, value: object) -> KnobValueError:
    return KnobValueError(the_knob.name, f"{value!r} is not in its domain", f"give {domain_text(the_knob)}")
