"""What torchtitan does with its settings: TOML files of 0.1 to 0.2.2, options and recipes of 0.3.0."""

import math
from collections.abc import Iterator, Mapping

from autotune.frameworks.framework import Check, Framework, LintCase, Settings, unknown
from autotune.frameworks.torchtitan import (
    CHECKPOINTS,
    CONTEXT,
    EXPERT_TENSOR,
    EXPERTS,
    FORMAT,
    GLOBAL,
    LOCAL,
    MICRO,
    PIPELINE,
    RESHARD,
    SCHEDULE,
    SCHEDULES,
    SHARD,
    STAGE_LAYERS,
    TENSOR,
    TOKENS,
    from_torchtitan,
)
from search_spaces.finding import Effect, Finding
from search_spaces.knob import Value
from search_spaces.models.pipeline import ONE_STAGE_SCHEDULES

KNOWN: Mapping[str, frozenset[str]] = {
    "training": frozenset({
        "dataset", "dataset_path", "local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps",
        "enable_cpu_offload", "dtype", "mixed_precision_param", "mixed_precision_reduce", "gc_freq", "gc_debug", "dataloader",
        "seed", "deterministic", "debug_moe_force_load_balance", "compile", "disable_cuda_graphs",
    }),
    "parallelism": frozenset({
        "data_parallel_replicate_degree", "enable_compiled_autograd", "data_parallel_shard_degree",
        "fsdp_reshard_after_forward", "tensor_parallel_degree", "disable_loss_parallel", "enable_async_tensor_parallel",
        "pipeline_parallel_degree", "pipeline_parallel_split_points", "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size", "pipeline_parallel_expert_parallel_overlap", "context_parallel_degree",
        "context_parallel_load_balancer", "context_parallel_rotate_method", "context_parallel_ptrr_mask_key",
        "expert_parallel_degree", "expert_tensor_parallel_degree", "expert_parallel_comm_backend", "enable_fsdp_symm_mem",
        "enable_sequence_parallel", "spmd_backend",
    }),
    "activation_checkpoint": frozenset({
        "mode", "selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget",
        "visualize_memory_budget_pareto", "preserve_rng_state", "determinism_check", "debug",
    }),
    "compile": frozenset({"enable", "components", "backend", "enable_async_tensor_parallel"}),
}  # fmt: skip
"""Fields of the tables that decide a layout, of all versions. torchtitan refuses others, unless a module extends them."""
KV_HEADS: Mapping[str, tuple[int, int]] = {
    "qwen3_535ba3b": (16, 2), "qwen35_35b_a3b": (16, 2), "qwen3_5122ba10b": (32, 2), "qwen35_122b_a10b": (32, 2),
    "qwen3_5397ba17b": (32, 2), "qwen35_397b_a17b": (32, 2),
}  # fmt: skip
"""Recipes whose models have no shape here: attention heads and key-value heads (torchtitan/models/qwen3_5)."""
ASYNC = ("parallelism.enable_async_tensor_parallel", "compile.enable_async_tensor_parallel")
MOST = 1024
"""Largest count that a fix tries."""
GRAPHS = "training.disable_cuda_graphs"
SELECTIVE = "activation_checkpoint.selective_ac_option"
KEYS: Mapping[str, str] = {
    "tensor_parallel_size": TENSOR, "pipeline_parallel_size": PIPELINE, "context_parallel_size": CONTEXT,
    "expert_parallel_size": EXPERTS, "micro_batch_size": LOCAL, "pipeline_schedule": SCHEDULE,
    "activation_checkpointing": CHECKPOINTS, "hsdp_shard_size": SHARD,
    "offload_optimizer": "training.enable_cpu_offload",
    "reshard_after_forward": RESHARD, "sequence_parallel": "parallelism.enable_sequence_parallel",
    "global_batch_size": GLOBAL,
}  # fmt: skip


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    extended = any(case.get(key) for key in ("job.custom_config_module", "experimental.custom_args_module"))
    if extended or "model.name" not in case.imported.settings:
        return
    for key in case.imported.settings:
        table, _, name = key.partition(".")
        if name and table in KNOWN and name.split(".")[0] not in KNOWN[table]:
            yield unknown(case, key, [f"{table}.{field}" for field in KNOWN[table]], Effect.REFUSED)


def _degrees(case: LintCase) -> str | None:
    stated_ranks, ranks = case.imported.ranks, case.around.ranks or (case.around.cluster and case.around.cluster.world_size)
    if stated_ranks is None or ranks is None or stated_ranks == ranks:
        return None
    return f"the degrees multiply to {stated_ranks} ranks, and there are {ranks}"


def _batch_step(case: LintCase) -> int | None:
    return (case.imported.samples_per_rank or 0) * case.replicas if case.replicas else None


def _global_batch(case: LintCase) -> str | None:
    step, batch = _batch_step(case), case.around.global_batch_size or case.imported.global_batch_size
    if not step or batch is None or batch % step == 0:
        return None
    return f"{batch} is not a multiple of {step} ({case.imported.samples_per_rank} samples on each of {case.replicas} ranks)"


def _nearest_batch(case: LintCase) -> Settings:
    step, batch = _batch_step(case), case.imported.global_batch_size
    return {GLOBAL: max((2 * batch + step) // (2 * step), 1) * step} if step and batch else {}


def _pipeline_batch(case: LintCase) -> str | None:
    micro, local = case.config.micro_batch_size, case.imported.samples_per_rank or 0
    if case.config.pipeline_parallel_size == 1 or local % micro == 0:
        return None
    return f"a local batch of {local} is not divided by micro-batches of {micro}"


def _nearest_micro(case: LintCase) -> Settings:
    local, micro = case.imported.samples_per_rank or 1, case.config.micro_batch_size
    return {MICRO: max(size for size in range(1, min(micro, local, MOST) + 1) if local % size == 0)}


def _recipe_name(case: LintCase) -> str:
    recipe = case.get("recipe")
    return str(recipe or f"{case.get('model.name', '')}{case.get('model.flavor', '')}").lower().replace("-", "")


def _kv_heads(case: LintCase) -> str | None:
    heads, tensor = KV_HEADS.get(_recipe_name(case)), case.config.tensor_parallel_size
    if case.model is not None or heads is None or not any(count % tensor for count in heads):
        return None
    return f"{tensor} ranks do not divide {heads[0]} attention heads and {heads[1]} key-value heads, which are not replicated"


def _fewer_tensor(case: LintCase) -> Settings:
    heads = KV_HEADS[_recipe_name(case)]
    return {TENSOR: math.gcd(math.gcd(*heads), case.config.tensor_parallel_size)}


def _sequence(case: LintCase) -> str | None:
    config = case.config
    divisor = config.tensor_parallel_size * (2 * config.context_parallel_size if config.context_parallel_size > 1 else 1)
    if not config.sequence_parallel and config.context_parallel_size == 1:
        return None
    if case.tokens is None or case.tokens % divisor == 0:
        return None
    return f"{case.tokens} tokens are not divided by {divisor} (tensor x 2 context)"


def _nearest_tokens(case: LintCase) -> Settings:
    config, tokens = case.config, case.tokens or 1
    divisor = config.tensor_parallel_size * (2 * config.context_parallel_size if config.context_parallel_size > 1 else 1)
    return {TOKENS: max(round(tokens / divisor), 1) * divisor}


def _expert_tensor(case: LintCase) -> int:
    value = case.get(EXPERT_TENSOR, 1)
    return value if isinstance(value, int) and value > 0 else 1


def _stage_layers(case: LintCase) -> tuple[int, int] | None:
    """Layers per stage as stated, and the stages that they make; None: not stated, or not known."""
    stage_layers, model = case.get(STAGE_LAYERS), case.model
    if case.config.pipeline_parallel_size == 1 or not isinstance(stage_layers, int) or model is None:
        return None
    less = sum(int(case.get(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1)) for end in ("first", "last"))
    return stage_layers, -(-(model.num_layers + less) // stage_layers)


def _uneven_stages(case: LintCase) -> str | None:
    division, ranks = _stage_layers(case), case.config.pipeline_parallel_size
    if division is None:
        return None
    stage_layers, stages = division
    if stages % ranks:
        return f"{stage_layers} layers a stage make {stages} stages, which {ranks} ranks do not divide"
    single = case.config.pipeline_schedule in ONE_STAGE_SCHEDULES
    if single != (stages == ranks):
        needs = "one stage" if single else "at least two stages"
        return f"{stage_layers} layers a stage make {stages // ranks} on each rank, and this schedule needs {needs}"
    return None


def _other_stage_layers(case: LintCase) -> Settings:
    division = _stage_layers(case)
    if division is None:
        return {}
    sizes = sorted(
        range(1, min(division[0] * case.config.pipeline_parallel_size, MOST) + 1),
        key=lambda size: abs(math.log(size / division[0])),
    )
    for size in sizes:
        if _uneven_stages(case.changed({STAGE_LAYERS: size})) is None:
            return {STAGE_LAYERS: size}
    return {}


CHECKS = (
    Check(
        name="ranks-product", key=SHARD, effect=Effect.REFUSED, problem=_degrees, fix=lambda _: {SHARD: -1},
        remedy="give -1, for the ranks that are left",
    ),
    Check(
        name="global-batch", key=GLOBAL, effect=Effect.REFUSED, problem=_global_batch, fix=_nearest_batch,
        remedy="give a multiple, or -1 for one pass",
    ),
    Check(
        name="local-batch", key=MICRO, effect=Effect.REFUSED, problem=_pipeline_batch, fix=_nearest_micro,
        remedy="give a divisor of the local batch",
    ),
    Check(
        name="kv-heads", key=TENSOR, effect=Effect.REFUSED, problem=_kv_heads, fix=_fewer_tensor,
        remedy="give a divisor of the key-value heads",
    ),
    Check(
        name="sequence-product", key=TOKENS, effect=Effect.REFUSED, problem=_sequence, fix=_nearest_tokens,
        remedy="give a multiple",
    ),
    Check(
        name="expert-tensor", key=EXPERT_TENSOR, effect=Effect.REFUSED, fix=lambda _: {EXPERT_TENSOR: 1},
        problem=lambda case: (
            f"{_expert_tensor(case)} is neither 1 nor the {case.config.tensor_parallel_size} tensor-parallel ranks"
            if case.config.expert_parallel_size > 1 and _expert_tensor(case) not in (1, case.config.tensor_parallel_size)
            else None
        ),
        remedy="give 1, or the tensor-parallel degree",
    ),
    Check(
        name="experts-of-a-dense-model", key=EXPERTS, effect=Effect.IGNORED, fix=lambda _: {EXPERTS: 1},
        problem=lambda case: (
            f"{case.model.name} has no experts"
            if case.model is not None and not case.model.num_experts and case.config.expert_parallel_size > 1
            else None
        ),
        remedy="leave it out",
    ),
    Check(
        name="async-tensor-compiled", key=ASYNC[0], effect=Effect.REFUSED,
        problem=lambda case: (
            "asynchronous tensor parallelism needs a compiled model"
            if any(map(case.on, ASYNC)) and case.config.tensor_parallel_size > 1 and not case.config.compile_blocks
            else None
        ),
        fix=lambda case: (
            {"compile.components": ["model", "loss"]} if case.on("compile.enable") else {"compile.enable": True}
        ),
        remedy="enable compile with the component model",
    ),
    Check(
        name="memory-budget-compiled", key=CHECKPOINTS, effect=Effect.REFUSED,
        problem=lambda case: (
            "a memory budget needs a compiled model"
            if case.get(CHECKPOINTS) == "memory_budget" and not case.config.compile_blocks
            else None
        ),
        fix=lambda _: {CHECKPOINTS: "selective"},
        remedy="enable compile, or use selective",
    ),
    Check(
        name="selective-option", key=SELECTIVE, effect=Effect.REFUSED, fix=lambda _: {SELECTIVE: "op"},
        problem=lambda case: (
            f"{case.get(SELECTIVE)!r} is neither op nor a number of layers"
            if case.get(SELECTIVE) is not None and case.get(SELECTIVE) != "op" and not str(case.get(SELECTIVE)).isdigit()
            and case.get(CHECKPOINTS, "selective") == "selective"
            else None
        ),
        remedy="give op, or a number",
    ),
    Check(
        name="graphs-in-a-pipeline", key=GRAPHS, effect=Effect.REFUSED, fix=lambda _: {GRAPHS: True},
        problem=lambda case: (
            "CUDA graphs, which are on, do not work with a pipeline"
            if case.config.pipeline_parallel_size > 1 and "model.name" not in case.imported.settings and not case.on(GRAPHS)
            else None
        ),
        remedy="switch them off",
    ),
    Check(
        name="tied-in-a-pipeline", key=PIPELINE, effect=Effect.REFUSED, fix=lambda _: {PIPELINE: 1},
        problem=lambda case: (
            f"the embeddings of {case.model.name} are tied, which a pipeline does not support"
            if case.model is not None and case.model.tied_embeddings and case.config.pipeline_parallel_size > 1
            else None
        ),
        remedy="use tensor or data parallelism instead",
    ),
    Check(
        name="stage-layers", key=STAGE_LAYERS, effect=Effect.REFUSED, problem=_uneven_stages, fix=_other_stage_layers,
        remedy="give layers that make whole stages",
    ),
)  # fmt: skip
"""What torchtitan asserts: ParallelDims, Trainer.Config, pipeline_parallel.py, decoder.py."""
RULES = frozenset({
    "world-divides", "tensor-divides", "tensor-head-norms", "pipeline-layers", "pipeline-micro-batches",
    "hsdp-shards",
})  # fmt: skip


def _write(case: LintCase, knob: str, value: Value) -> Settings:
    pipelined = case.config.pipeline_parallel_size > 1
    match knob:
        case "micro_batch_size":
            return {MICRO if pipelined else LOCAL: value}
        case "pipeline_schedule":
            return {SCHEDULE: SCHEDULES[str(value)]}
        case "reshard_after_forward":
            return {RESHARD: "always" if value else "never"}
        case "offload_optimizer":
            return {"training.enable_cpu_offload": value == "cpu"} if value in ("none", "cpu") else {}
        case "hsdp_shard_size" | "zero_stage" | "virtual_stages":
            return {}
        case "global_batch_size":
            return {GLOBAL: value}
        case "pipeline_parallel_size" if value != 1 and not pipelined:
            # Without a pipeline the local batch is one micro-batch; in one it is divided, one sample at a time.
            graphs = {} if "model.name" in case.imported.settings else {GRAPHS: True}
            return {PIPELINE: value, **graphs}
        case _:
            return {KEYS[knob]: value} if knob in KEYS else {}


TORCHTITAN = Framework(
    name=FORMAT, title="torchtitan", checked="0.3.0, TOML 0.2.2", read=from_torchtitan, checks=CHECKS, rules=RULES, keys=KEYS,
    write=_write,
    undeclared_findings=_unknown_fields, experts_borrow=True, expert_tensor=_expert_tensor, samples_per_pass=_batch_step,
)  # fmt: skip
