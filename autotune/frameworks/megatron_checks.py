"""What Megatron-LM and Megatron-Bridge do with their settings (checked with d98e8a64 and 067f987d).

Both build the same TransformerConfig, so that one table serves both; a check that only one of them makes says so.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from itertools import chain

from autotune.frameworks.framework import BATCH, MOST, Check, Framework, LintCase, Settings, unknown
from autotune.frameworks.megatron import (
    ARGUMENTS,
    BRIDGE,
    FULLY_RECOMPUTED,
    LM,
    OF_FORKS,
    Dialect,
    from_megatron,
    layer_pattern,
    layout_stages,
    memory_arguments,
    names_in,
    options_of,
)
from autotune.frameworks.megatron_parser_checks import PARSER_CHECKS
from autotune.frameworks.shell import ENVIRONMENT, LAUNCHER
from search_spaces.errors import Effect, Finding
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

QUEUES = f"{ENVIRONMENT}CUDA_DEVICE_MAX_CONNECTIONS"
ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
RECOMPUTED = frozenset({
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out", "gdp_in_proj",
    "gdp_qkv", "mhc",
})  # fmt: skip
"""Modules that selective recomputation knows."""


def _checks(dialect: Dialect) -> tuple[Check, ...]:
    """The table, as one of the frameworks spells it."""
    key = dialect.key
    script = dialect.format == LM
    fsdp, strategy, distributed = (
        key("use_megatron_fsdp"),
        key("data_parallel_sharding_strategy"),
        key("use_distributed_optimizer"),
    )
    granularity, method, layers = key("recompute_granularity"), key("recompute_method"), key("recompute_num_layers")
    sequence, gather, reduce = key("sequence_parallel"), key("overlap_param_gather"), key("overlap_grad_reduce")
    pipeline, experts = (key(f"{name}_model_parallel_size") for name in ("pipeline", "expert"))
    tokens, positions, batch = key("seq_length"), key("max_position_embeddings"), key("global_batch_size")
    fsdp2, checkpoints = key("use_torch_fsdp2"), key("ckpt_format")
    latent, experts_key, layout = key("multi_latent_attention"), key("num_moe_experts"), key("pipeline_model_parallel_layout")

    def layers_of(case: LintCase) -> int | None:
        # Recipes of Megatron-Bridge state neither layers nor their layout: both are in the recipes that they begin with.
        layers = case.get(key("num_layers"))
        return layers if isinstance(layers, int) else None

    # Settings with which stages have different numbers of layers.
    uneven = ("pipeline_model_parallel_layout", *ENDS, "hybrid_layer_pattern", "hybrid_override_pattern")

    def uneven_layers(case: LintCase) -> str | None:
        count, ranks = layers_of(case), case.config.pipeline_parallel_size
        if count is None or ranks == 1 or case.on("--deepspeed"):  # DeepSpeed's pipelines have stages of any sizes
            return None
        if case.get(layout):
            layers = sum(stage.count("t") for stage in layout_stages(case.get(layout)))
            return f"the layout has {layers} layers, the model {count}" if layers != count else None
        ends = [case.get(key(name)) for name in ENDS if isinstance(case.get(key(name)), int)]
        if ends and len(ends) < ranks and (count - sum(ends)) % (ranks - len(ends)):
            return f"the {ranks - len(ends)} other ranks do not divide {count - sum(ends)} layers"
        if any(case.get(key(name)) for name in uneven):
            return None
        return f"{ranks} ranks do not divide {count + halves(case)} layers" if (count + halves(case)) % ranks else None

    def halves(case: LintCase) -> int:
        """The embedding and the loss, as far as they count as layers."""
        return sum(case.on(key(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))

    def fewer_ranks(case: LintCase) -> Settings:
        count, ranks = layers_of(case) or 1, case.config.pipeline_parallel_size
        if any(case.get(key(name)) for name in uneven):
            return {}
        options = [
            size for size in range(1, min(count, MOST) + 1) if count % size == 0 and (not case.ranks or case.ranks % size == 0)
        ]
        return {pipeline: min(options, key=lambda size: abs(math.log(size / ranks)))}

    def uneven_virtual(case: LintCase) -> str | None:
        count, ranks = layers_of(case), case.config.pipeline_parallel_size
        stage_layers = case.get(key("num_layers_per_virtual_pipeline_stage"))
        stages = case.get(key("virtual_pipeline_model_parallel_size"))
        if count is None or ranks == 1 or (count + halves(case)) % ranks:
            return None
        count += halves(case)
        if isinstance(stage_layers, int) and (count // ranks) % stage_layers:
            return f"{stage_layers} layers a virtual stage do not divide the {count // ranks} layers of a rank"
        plain = not any(case.get(key(name)) for name in (*ENDS, "pipeline_model_parallel_layout"))
        if plain and isinstance(stages, int) and (count // ranks) % stages:
            return f"{stages} virtual stages do not divide the {count // ranks} layers of a rank"
        return None

    def virtual_fix(case: LintCase) -> Settings:
        count, ranks = layers_of(case) or 1, case.config.pipeline_parallel_size
        for name in ("num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size"):
            present = case.get(key(name))
            if isinstance(present, int):
                divisors = [size for size in range(1, min(count // ranks, MOST) + 1) if (count // ranks) % size == 0]
                return {key(name): min(divisors, key=lambda size: abs(math.log(size / present)))}
        return {}

    def stages_stated(case: LintCase) -> list[str]:
        names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
                 "virtual_pipeline_model_parallel_size")  # fmt: skip
        return [key(name) for name in names if isinstance(case.get(key(name)), int) and case.get(key(name)) > 0]

    def round_batches(case: LintCase) -> str | None:
        ranks, config = case.config.pipeline_parallel_size, case.config
        if ranks == 1 or config.virtual_stages == 1 or case.batch is None or not case.replicas:
            return None
        if case.batch % (case.replicas * config.micro_batch_size):
            return None  # another check says so, and what is a multiple of it
        count = config.gradient_accumulation_steps(case.batch, case.ranks or 1)
        group = case.get(key("microbatch_group_size_per_vp_stage"), ranks)
        if not isinstance(group, int):
            return None
        if group < ranks or count < group:
            return f"interleaved stages need groups of {ranks} micro-batches or more, up to the {count} of a step, not {group}"
        if 0 < count % group < ranks:
            return f"the last group of micro-batches has {count % group} of {count}, fewer than the {ranks} pipeline ranks"
        return None

    def round_fix(case: LintCase) -> Settings:
        step = case.config.pipeline_parallel_size * case.config.micro_batch_size * (case.replicas or 1)
        return {batch: max(round((case.batch or step) / step), 1) * step}

    def queues(case: LintCase) -> str | None:
        launched = any(name.startswith(LAUNCHER) for name in case.imported.settings)
        divided = case.config.tensor_parallel_size > 1 or case.config.context_parallel_size > 1
        sharded = case.on(fsdp) or case.on(fsdp2)
        cluster = case.around.cluster
        # Beginnings of the names of devices of architecture 9 and before.
        before_blackwell = ("v100", "a100", "h100", "h200", "h800", "h20", "gh200", "l40", "a10", "a40", "t4")
        if case.on("--deepspeed") or (cluster and not cluster.device.name.lower().startswith(before_blackwell)):
            return None
        if not (script and launched and divided) or sharded or case.on("--overlap-moe-expert-parallel-comm"):
            return None
        return None if case.get(QUEUES) == 1 else "tensor and context parallelism need it to be 1 before Blackwell"

    def recomputed_modules(case: LintCase) -> str | None:
        modules = names_in(case.get(key("recompute_modules")))
        if str(case.get(granularity)) != "selective" and not case.on("--recompute-activations"):
            return None
        if unknown_modules := set(modules) - RECOMPUTED:
            return f"{', '.join(sorted(unknown_modules))} is none of {', '.join(sorted(RECOMPUTED))}"
        if "moe_act" in modules and script and not case.on("--moe-grouped-gemm"):
            return "moe_act needs grouped matrix products of experts (moe-grouped-gemm)"
        if "mla_up_proj" in modules and script and not case.on(latent):
            return "mla_up_proj needs latent attention"
        shared = case.get(key("moe_shared_expert_intermediate_size")) and case.on(key("moe_shared_expert_overlap"))
        return (
            "shared_experts overlap the exchange, so they are not recomputed"
            if "shared_experts" in modules and shared
            else None
        )

    def layers_with_experts(case: LintCase) -> str | None:
        count, value = layers_of(case), case.get(key("moe_layer_freq"))
        pattern = layer_pattern(value, count or 1) if value is not None and case.get(experts_key) else None
        wrong = count is not None and pattern is not None and len(pattern) != count
        return f"{value} has {len(pattern)} layers, not {count}" if wrong and pattern is not None else None

    def without_fsdp2(name: str, feature: str, holds: Callable[[LintCase], bool], fix: Settings) -> Check:
        return Check(
            name=f"torch-fsdp2-{name}",
            key=fsdp2,
            effect=Effect.REFUSED,
            problem=f"torch's FSDP2 does not work with {feature}",
            holds=lambda case: case.on(fsdp2) and holds(case),
            fix=fix,
            remedy=f"leave {feature} out",
        )

    return (
        Check(
            name="layers-divide", key=pipeline, effect=Effect.REFUSED, problem=uneven_layers, fix=fewer_ranks,
            remedy="give a divisor of the layers, or a layout",
        ),
        Check(
            name="virtual-stages-divide", key=key("virtual_pipeline_model_parallel_size") if not script
            else key("num_layers_per_virtual_pipeline_stage"), effect=Effect.REFUSED, problem=uneven_virtual, fix=virtual_fix,
            remedy="give a divisor of a rank's layers",
        ),
        Check(
            name="virtual-stages-twice", key=key("num_layers_per_virtual_pipeline_stage"), effect=Effect.REFUSED,
            problem=lambda case: f"{' and '.join(stages_stated(case))} state the same",
            holds=lambda case: len(stages_stated(case)) > 1,
            fix=lambda case: dict.fromkeys(stages_stated(case)[1:]), remedy="state one of them",
        ),
        Check(
            name="virtual-without-pipeline", key=pipeline, effect=Effect.REFUSED,
            problem="virtual stages need a pipeline of several ranks",
            holds=lambda case: case.config.pipeline_parallel_size == 1
            and any(case.get(name) != 1 for name in stages_stated(case)),
            fix=lambda case: dict.fromkeys(stages_stated(case)), remedy="leave the virtual stages out",
        ),
        Check(
            name="virtual-stages-on-two", key=pipeline, effect=Effect.REFUSED,
            problem="without overlapped communication, virtual stages need more than 2 pipeline ranks",
            holds=lambda case: case.config.virtual_stages > 1 and case.config.pipeline_parallel_size == 2
            and case.on("--no-overlap-p2p-communication"),
            fix={"--no-overlap-p2p-communication": None}, remedy="overlap the communication",
        ),
        Check(
            name="interleaved-micro-batches", key=batch, effect=Effect.FAILS, problem=round_batches, fix=round_fix,
            remedy="give a batch of whole rounds",
        ),
        Check(
            name="positions", key=positions, effect=Effect.REFUSED,
            problem=lambda case: f"{case.get(tokens)} tokens are more than {case.get(positions)} positions",
            holds=lambda case: isinstance(case.get(tokens), int) and isinstance(case.get(positions), int)
            and case.get(tokens) > case.get(positions),
            fix=lambda case: {positions: case.get(tokens)}, remedy="give at least the sequence length",
        ),
        Check(
            name="hardware-queues", key=QUEUES, effect=Effect.REFUSED, problem=queues, fix={QUEUES: 1},
            remedy="export CUDA_DEVICE_MAX_CONNECTIONS=1",
        ),
        Check(
            name="queues-of-sharding", key=QUEUES, effect=Effect.REFUSED,
            problem="sharded parameters need more than one hardware queue",
            holds=lambda case: (case.on(fsdp) or case.on(fsdp2)) and case.get(QUEUES) == 1,
            fix={QUEUES: None}, remedy="leave CUDA_DEVICE_MAX_CONNECTIONS out",
        ),
        Check(
            name="sequence-without-tensor", key=sequence, effect=Effect.IGNORED if script else Effect.REFUSED,
            problem="sequence parallelism needs several tensor-parallel ranks",
            holds=lambda case: case.on(sequence) and case.config.tensor_parallel_size == 1,
            fix={sequence: None}, remedy="leave it out",
        ),
        Check(
            name="experts-need-sequence", key=sequence, effect=Effect.FAILS,
            problem="experts with tensor parallelism train with sequence parallelism only",
            holds=lambda case: case.config.expert_parallel_size > 1 and case.config.tensor_parallel_size > 1
            and not case.on(sequence),
            fix={sequence: True}, remedy="switch it on",
        ),
        Check(
            name="no-experts", key=experts, effect=Effect.REFUSED,
            problem="the model has no experts",
            holds=lambda case: case.config.expert_parallel_size > 1 and case.model is not None and not case.model.num_experts,
            fix={experts: 1}, remedy="leave it out, or state the experts",
        ),
        Check(
            name="gather-needs-optimizer", key=gather, effect=Effect.REFUSED,
            problem="only the distributed optimizer gathers parameters",
            holds=lambda case: case.on(gather) and not case.on(fsdp)
            and (not case.on(distributed) if script else case.get(distributed) is False),
            fix={distributed: True}, remedy="switch the distributed optimizer on",
        ),
        Check(
            name="gather-needs-reduce", key=gather, effect=Effect.REFUSED,
            problem="overlapped gathers need overlapped reductions",
            holds=lambda case: case.on(gather) and (not case.on(reduce) if script else case.get(reduce) is False),
            fix={reduce: True}, remedy="overlap the reductions too",
        ),
        Check(
            name="full-recompute-method", key=granularity, effect=Effect.REFUSED,
            problem="full recomputation needs a method and a number of layers",
            holds=lambda case: case.get(granularity) == "full" and (case.get(method) is None or case.get(layers) is None),
            fix=lambda case: {
                **({} if case.get(method) else {method: "uniform"}), **({} if case.get(layers) else {layers: 1}),
            }, remedy="state both",
        ),
        Check(
            name="selective-recompute-method", key=granularity, effect=Effect.REFUSED,
            problem="selective recomputation has neither a method nor a number of layers",
            holds=lambda case: case.config.activation_checkpointing == "selective"
            and (case.get(method) is not None or case.get(layers) is not None),
            fix=lambda case: {name: None for name in (method, layers) if case.get(name) is not None},
            remedy="leave both out",
        ),
        Check(
            name="overlap-needs-sequence", key=key("tp_comm_overlap"), effect=Effect.REFUSED,
            problem="overlapped tensor-parallel communication needs sequence parallelism",
            holds=lambda case: case.on(key("tp_comm_overlap")) and script and not case.on(sequence),
            fix=lambda case: {sequence: True} if case.config.tensor_parallel_size > 1 else {key("tp_comm_overlap"): None},
            remedy="switch sequence parallelism on",
        ),
        Check(
            name="two-precisions", key=key("fp16"), effect=Effect.REFUSED,
            problem="bf16 and fp16 exclude each other",
            holds=lambda case: case.on(key("bf16")) and case.on(key("fp16")),
            fix={key("fp16"): None}, remedy="state one of them",
        ),
        Check(
            name="fsdp-checkpoints", key=checkpoints, effect=Effect.REFUSED,
            problem="Megatron-FSDP writes checkpoints as fsdp_dtensor only",
            holds=lambda case: case.on(fsdp) and case.get(checkpoints) != "fsdp_dtensor"
            and (script or case.get("checkpoint.save") or case.get("checkpoint.load")),
            fix={checkpoints: "fsdp_dtensor"}, remedy="state fsdp_dtensor",
        ),
        Check(
            name="strategy-without-fsdp", key=strategy, effect=Effect.IGNORED,
            problem="only Megatron-FSDP reads the sharding strategy",
            holds=lambda case: case.get(strategy) not in (None, "no_shard") and not case.on(fsdp),
            fix={fsdp: True, **({checkpoints: "fsdp_dtensor"} if script else {})}, remedy="switch Megatron-FSDP on",
        ),
        Check(
            name="fsdp-shards-nothing", key=strategy, effect=Effect.CHANGED,
            problem="without a sharding strategy Megatron-FSDP shards nothing",
            holds=lambda case: script and case.on(fsdp) and case.get(strategy) in (None, "no_shard"),
            fix={strategy: "optim_grads_params"}, remedy="state a strategy",
        ),
        without_fsdp2("pipeline", "a pipeline", lambda case: case.config.pipeline_parallel_size > 1, {pipeline: 1}),
        without_fsdp2("experts", "expert parallelism", lambda case: case.config.expert_parallel_size > 1, {experts: 1}),
        without_fsdp2("optimizer", "the distributed optimizer", lambda case: case.on(distributed), {distributed: None}),
        without_fsdp2("fp16", "fp16", lambda case: case.on(key("fp16")), {key("fp16"): None, key("bf16"): True}),
        Check(
            name="offload-needs-precision-aware", key=key("optimizer_cpu_offload"), effect=Effect.REFUSED,
            problem="offloaded optimizer states need the precision-aware optimizer",
            holds=lambda case: case.on(key("optimizer_cpu_offload")) and not case.on(key("use_precision_aware_optimizer")),
            fix={key("use_precision_aware_optimizer"): True}, remedy="switch it on",
        ),
        Check(
            name="two-lengths-of-training", key=key("train_samples"), effect=Effect.REFUSED,
            problem="train_iters and train_samples exclude each other",
            holds=lambda case: case.get(key("train_samples")) and case.get(key("train_iters")),
            fix={key("train_samples"): None}, remedy="state one of them",
        ),
        Check(
            name="head-sizes", key=key("hidden_size"), effect=Effect.REFUSED,
            problem=lambda case: f"{case.get(key('num_attention_heads'))} heads do not divide {case.get(key('hidden_size'))}",
            holds=lambda case: isinstance(case.get(key("hidden_size")), int)
            and isinstance(case.get(key("num_attention_heads")), int) and not case.get(key("kv_channels"))
            and case.get(key("hidden_size")) % case.get(key("num_attention_heads")),
            remedy="correct the sizes, or state kv-channels",
        ),
        Check(
            name="query-groups", key=key("num_query_groups"), effect=Effect.REFUSED, remedy="give a multiple or a divisor",
            problem=lambda case: f"{case.get(key('num_query_groups'))} groups of queries are no multiple or divisor of "
            f"{case.config.tensor_parallel_size} tensor-parallel ranks",
            # Of a model whose sizes fit together, a rule finds it.
            holds=lambda case: case.model is None and isinstance(groups := case.get(key("num_query_groups")), int) and groups
            and (not script or case.on(key("group_query_attention"))) and groups % case.config.tensor_parallel_size
            and case.config.tensor_parallel_size % groups,
        ),
        Check(
            name="layout-divides", key=layout, effect=Effect.REFUSED, remedy="give a multiple of the ranks",
            problem=lambda case: f"{len(layout_stages(case.get(layout)))} stages on {case.config.pipeline_parallel_size} ranks",
            holds=lambda case: len(layout_stages(case.get(layout))) % case.config.pipeline_parallel_size,
        ),
        Check(
            name="uneven-twice", key=key(ENDS[0]), effect=Effect.REFUSED, remedy="state one of the two",
            problem="layers of the first or last stage exclude the embedding and the loss as layers",
            holds=lambda case: halves(case) and any(case.get(key(name)) for name in ENDS),
            fix={key(f"account_for_{end}_in_pipeline_split"): None for end in ("embedding", "loss")},
        ),
        Check(
            name="recompute-modules", key=key("recompute_modules"), effect=Effect.REFUSED, problem=recomputed_modules,
            remedy="name modules that the model has",
        ),
        Check(
            name="layers-with-experts", key=key("moe_layer_freq"), effect=Effect.REFUSED, problem=layers_with_experts,
            remedy="give a value for each layer",
        ),
        Check(
            name="dispatcher-backend", key=key("moe_flex_dispatcher_backend"), effect=Effect.IGNORED,
            problem="only the flex dispatcher has backends",
            holds=lambda case: case.get(key("moe_flex_dispatcher_backend")) is not None
            and case.get(key("moe_token_dispatcher_type")) in ("alltoall", "allgather"),
            fix={key("moe_token_dispatcher_type"): "flex"}, remedy="use the flex dispatcher",
        ),
    )  # fmt: skip


def _misspelled(case: LintCase) -> Iterator[Finding]:
    dialect = Dialect(case.framework.name)
    known_keys = {dialect.key(argument.name) for argument in ARGUMENTS if argument.guarded}
    effect = Effect.REFUSED if dialect.format == LM else Effect.IGNORED
    accepted_keys = {
        "--context-parallel-sizes",
        *chain(*OF_FORKS.values()),
        *(dialect.key(argument.name) for argument in ARGUMENTS),
    }
    for key in case.imported.settings:
        if key in accepted_keys or not key.startswith(("--", "model.", "train.", "ddp.")):
            continue
        # Likeness from which an unknown option is a misspelling of a known one: Megatron-LM has options that are not listed
        # here.
        finding = unknown(case, key, known_keys, effect, cutoff=0.94)
        if finding.remedy.startswith("did you mean"):
            yield finding


def _as_run(model: ModelSpec, config: TrialConfig) -> ModelSpec:
    """Megatron replicates key-value heads over more tensor-parallel ranks, and pads the vocabulary."""
    size, heads = config.tensor_parallel_size, model.num_key_value_heads
    if model.latent is None and size % heads == 0 and model.num_attention_heads % size == 0:
        heads = max(heads, size)
    step = 128 * size  # Megatron's default of make-vocab-size-divisible-by, times the tensor-parallel ranks
    vocabulary = -(-model.vocab_size // step) * step
    return dataclasses.replace(model, num_key_value_heads=heads, vocab_size=vocabulary)


def _rewrite(case: LintCase, knob: str, value: Value) -> Settings | None:
    key = Dialect(case.framework.name).key
    match knob:
        case "activation_checkpointing":
            method, layers = ("uniform", 1) if value == "full" else (None, None)
            return {
                **{option: None for option in FULLY_RECOMPUTED if case.get(option) is not None},
                key("recompute_granularity"): None if value == "none" else value,
                key("recompute_method"): method, key("recompute_num_layers"): layers,
            }  # fmt: skip
        case "tensor_parallel_size":
            # Experts need sequence parallelism beside tensor parallelism, and it saves memory in any model.
            on = {} if value == 1 or case.config.tensor_parallel_size > 1 else {key("sequence_parallel"): True}
            off = {key("sequence_parallel"): None} if value == 1 and case.on(key("sequence_parallel")) else {}
            return {key("tensor_model_parallel_size"): value, **on, **off}
        case "offload_optimizer":
            both = (key("optimizer_cpu_offload"), key("use_precision_aware_optimizer"))
            return dict.fromkeys(both, True) if value == "cpu" else {}
        case "zero_stage" if case.on("--deepspeed"):
            return {"--zero-stage": value}
        case "zero_stage":
            return {key("use_distributed_optimizer"): True} if value == 1 else {}
        case _:
            return None


def _expert_tensor(case: LintCase) -> int:
    dialect = Dialect(case.framework.name)
    size = case.get(dialect.key("expert_tensor_parallel_size"))
    if isinstance(size, int) and size > 0:
        return size
    # Megatron-Bridge's recipes of models with experts begin with ones that state 1.
    return case.config.tensor_parallel_size if dialect.format == LM else 1


def _hybrid(case: LintCase) -> str | None:
    dialect = Dialect(case.framework.name)
    hybrid = str(case.get(dialect.key("moe_flex_dispatcher_backend"))).lower() == "hybridep"
    flex = case.get(dialect.key("moe_token_dispatcher_type"), "flex") == "flex"
    cluster, recipe = case.around.cluster, str(case.get("recipe", ""))
    device = cluster.device.name.lower() if cluster else "".join(re.findall(r"_(b[23]00)(?:_|$)", recipe))
    # Megatron-Bridge #6043: topology errors on B200; recipes of H100 and GB200 do exchange between domains.
    if not (hybrid and flex and device.startswith(("b200", "b300"))):
        return None
    return f"HybridEP on {device.upper()} exchanges tokens within a link domain only"


def _framework(dialect: Dialect, title: str, checked: str) -> Framework:
    return Framework(
        name=dialect.format, title=title, checked=checked, options=options_of(dialect),
        checks=(*_checks(dialect), *(PARSER_CHECKS if dialect.format == LM else ())),
        read=lambda settings, source: from_megatron(settings, source, dialect), rewrite=_rewrite,
        sizes=lambda case, _config, batch: {case.key_of(BATCH): batch},
        prefixes=("--",) if dialect.format == LM
        else ("recipe", "dataset.", "scheduler.", "tokenizer.", *sorted({f"{argument.table}." for argument in ARGUMENTS})),
        rules=frozenset({"world-divides", "tensor-divides", "batch-divides", "sequence-divides", "pipeline-layers"}),
        as_run=_as_run, undeclared_findings=_misspelled, experts_borrow=True, expert_tensor=_expert_tensor,
        spans_domains=_hybrid, variables=(QUEUES,) if dialect.format == LM else (),
        memory_arguments=lambda settings: memory_arguments(settings, dialect),
        # Its layers are Transformer Engine's, whose fused norms, rotations and gates are as fast as these kernels.
        predicted={"fused_kernels": "liger"},
    )  # fmt: skip


MEGATRON = _framework(Dialect(LM), "Megatron-LM", "d98e8a64")
MEGATRON_BRIDGE = _framework(Dialect(BRIDGE), "Megatron-Bridge", "067f987d")
