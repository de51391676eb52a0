"""What torchtitan does with its settings: TOML files of 0.1 to 0.2.2, options and recipes of 0.3.0 and of b5bcd76c."""

import math
from collections.abc import Iterator, Mapping

from autotune.frameworks.framework import BATCH, MOST, Check, Framework, LintCase, Settings, unknown
from autotune.frameworks.torchtitan import (
    ASYNC,
    CHECKPOINTS,
    COMPILE,
    COMPONENTS,
    EXPERT_TENSOR,
    EXPERTS,
    GLOBAL,
    GRAPHS,
    LESS_LAYERS,
    LOCAL,
    MICRO,
    OLD_COMPILE,
    OPTIONS,
    PIPELINE,
    REPLICATE,
    SELECTIVE,
    SHARD,
    STAGE_LAYERS,
    STEP_TOKENS,
    TENSOR,
    TOKENS,
    UNREAD,
    counts_tokens,
    from_torchtitan,
    in_tokens,
)
from search_spaces.errors import Effect, Finding
from search_spaces.knob import Value
from search_spaces.models.pipeline import ONE_STAGE_SCHEDULES
from search_spaces.trial_config import TrialConfig

KNOWN = {key for option in OPTIONS for key in (option.key, option.after) if key}
KV_HEADS: Mapping[str, tuple[int, int]] = {
    "qwen3_535ba3b": (16, 2), "qwen35_35b_a3b": (16, 2), "qwen3_5122ba10b": (32, 2), "qwen35_122b_a10b": (32, 2),
    "qwen3_5397ba17b": (32, 2), "qwen35_397b_a17b": (32, 2),
}  # fmt: skip
"""Recipes whose models have no shape here: attention heads and key-value heads (torchtitan/models/qwen3_5)."""


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    extended = any(case.get(key) for key in ("job.custom_config_module", "experimental.custom_args_module"))
    if extended or "model.name" not in case.imported.settings:
        return
    tables = {key.partition(".")[0] for key in KNOWN}
    for key in case.imported.settings:
        table, *names = key.split(".")
        if names and table in tables and f"{table}.{names[0]}" not in KNOWN:
            yield unknown(case, key, [known for known in KNOWN if known.startswith(f"{table}.")], Effect.REFUSED)


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
    return _spelled(case, {GLOBAL: max((2 * batch + step) // (2 * step), 1) * step}) if step and batch else {}


def _spelled(case: LintCase, settings: Settings, micro: int | None = None) -> Settings:
    """Settings of 0.3 in the spelling of the case's version; `micro`: samples of a micro-batch; None: the case's."""
    if not counts_tokens(case.imported.settings):
        return settings
    return in_tokens(settings, case.tokens or 2048, micro or case.config.micro_batch_size)


def _pipeline_batch(case: LintCase) -> str | None:
    micro, local = case.config.micro_batch_size, case.imported.samples_per_rank or 0
    if case.config.pipeline_parallel_size == 1 or local % micro == 0:
        return None
    return f"a local batch of {local} is not divided by micro-batches of {micro}"


def _few_passes(case: LintCase) -> str | None:
    """Schedules of one stage a rank need a micro-batch for each; with known ranks a rule says so."""
    passes, stages = (case.imported.samples_per_rank or 0) // case.config.micro_batch_size, case.config.pipeline_parallel_size
    if case.replicas is not None or case.config.pipeline_schedule not in ONE_STAGE_SCHEDULES or passes >= stages:
        return None
    return f"{passes} micro-batches are fewer than {stages} stages"


def _lower_micro(case: LintCase) -> Settings:
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


def _divisor(case: LintCase) -> int:
    """What has to divide the tokens of a sample."""
    tensor, context = case.config.tensor_parallel_size, case.config.context_parallel_size
    return tensor * (2 * context if context > 1 else 1)


def _sequence(case: LintCase) -> str | None:
    config, divisor = case.config, _divisor(case)
    if not config.sequence_parallel and config.context_parallel_size == 1:
        return None
    if case.tokens is None or case.tokens % divisor == 0:
        return None
    return f"{case.tokens} tokens are not divided by {divisor} (tensor x 2 context)"


def _expert_tensor(case: LintCase) -> int:
    value = case.get(EXPERT_TENSOR, 1)
    return value if isinstance(value, int) and value > 0 else 1


def _stage_layers(case: LintCase) -> tuple[int, int] | None:
    """Layers per stage as stated, and the stages that they make; None: not stated, or not known."""
    stage_layers, model = case.get(STAGE_LAYERS), case.model
    if case.config.pipeline_parallel_size == 1 or not isinstance(stage_layers, int) or model is None:
        return None
    less = sum(int(case.get(key, 1)) for key in LESS_LAYERS)
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
        name="ranks-product", key=SHARD, effect=Effect.REFUSED, problem=_degrees, fix={SHARD: -1},
        remedy="give -1, for the ranks that are left",
    ),
    Check(
        name="global-batch", key=GLOBAL, effect=Effect.REFUSED, problem=_global_batch, fix=_nearest_batch,
        remedy="give a multiple, or -1 for one pass",
    ),
    Check(
        name="local-batch", key=MICRO, effect=Effect.REFUSED, problem=_pipeline_batch, fix=_lower_micro,
        remedy="give a divisor of the local batch",
    ),
    Check(
        name="few-passes", key=MICRO, effect=Effect.FAILS, problem=_few_passes, remedy="give a larger local batch",
        fix=lambda case: _spelled(case, {LOCAL: case.config.micro_batch_size * case.config.pipeline_parallel_size}),
    ),
    Check(
        name="kv-heads", key=TENSOR, effect=Effect.REFUSED, problem=_kv_heads,
        fix=lambda case: {TENSOR: math.gcd(*KV_HEADS[_recipe_name(case)], case.config.tensor_parallel_size)},
        remedy="give a divisor of the key-value heads",
    ),
    Check(
        name="sequence-product", key=TOKENS, effect=Effect.REFUSED, problem=_sequence,
        fix=lambda case: _spelled(case, {TOKENS: max(round((case.tokens or 1) / _divisor(case)), 1) * _divisor(case)}),
        remedy="give a multiple",
    ),
    Check(
        name="expert-tensor", key=EXPERT_TENSOR, effect=Effect.REFUSED, fix={EXPERT_TENSOR: 1},
        problem=lambda case: (
            f"{_expert_tensor(case)} is neither 1 nor the {case.config.tensor_parallel_size} tensor-parallel ranks"
        ),
        holds=lambda case: case.config.expert_parallel_size > 1
        and _expert_tensor(case) not in (1, case.config.tensor_parallel_size), remedy="give 1, or the tensor-parallel degree",
    ),
    Check(
        name="experts-of-a-dense-model", key=EXPERTS, effect=Effect.IGNORED, fix={EXPERTS: 1},
        problem=lambda case: f"{case.model.name} has no experts" if case.model and not case.model.num_experts else None,
        holds=lambda case: case.config.expert_parallel_size > 1, remedy="leave it out",
    ),
    Check(
        name="two-versions", key=OLD_COMPILE, effect=Effect.REFUSED, fix={OLD_COMPILE: None, COMPILE: True},
        problem="0.1 alone has it, and the table compile is of later versions", remedy="use one of them",
        holds=lambda case: OLD_COMPILE in case.imported.settings
        and any(key.startswith("compile.") for key in case.imported.settings),
    ),
    Check(
        name="async-tensor-compiled", key=ASYNC[0], effect=Effect.REFUSED,
        problem="asynchronous tensor parallelism needs a compiled model",
        holds=lambda case: any(map(case.on, ASYNC)) and case.config.tensor_parallel_size > 1 and not case.config.compile_blocks,
        fix=lambda case: {COMPONENTS: ["model", "loss"]} if case.on(COMPILE)
        else {OLD_COMPILE if OLD_COMPILE in case.imported.settings else COMPILE: True},
        remedy="enable compile with the component model",
    ),
    Check(
        name="memory-budget-compiled", key=CHECKPOINTS, effect=Effect.REFUSED, problem="a memory budget needs a compiled model",
        holds=lambda case: case.get(CHECKPOINTS) == "memory_budget" and not case.config.compile_blocks,
        fix={CHECKPOINTS: "selective"}, remedy="enable compile, or use selective",
    ),
    Check(
        name="selective-option", key=SELECTIVE, effect=Effect.REFUSED, fix={SELECTIVE: "op"},
        problem=lambda case: f"{case.get(SELECTIVE)!r} is neither op nor a number of layers",
        holds=lambda case: case.get(SELECTIVE, "op") != "op" and not str(case.get(SELECTIVE)).isdigit()
        and case.get(CHECKPOINTS, "selective") == "selective", remedy="give op, or a number",
    ),
    Check(
        name="graphs-in-a-pipeline", key=GRAPHS, effect=Effect.REFUSED, fix={GRAPHS: True},
        problem="CUDA graphs, which are on, do not work with a pipeline",
        holds=lambda case: case.config.pipeline_parallel_size > 1 and "model.name" not in case.imported.settings
        and not case.on(GRAPHS), remedy="switch them off",
    ),
    Check(
        name="tied-in-a-pipeline", key=PIPELINE, effect=Effect.REFUSED, fix={PIPELINE: 1},
        problem=lambda case: (
            f"the embeddings of {case.model.name} are tied, which a pipeline does not support"
            if case.model and case.model.tied_embeddings else None
        ),
        holds=lambda case: case.config.pipeline_parallel_size > 1, remedy="use tensor or data parallelism instead",
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


def _rewrite(case: LintCase, knob: str, value: Value) -> Settings | None:
    pipelined = case.config.pipeline_parallel_size > 1
    if knob == "micro_batch_size" and (pipelined or counts_tokens(case.imported.settings)):
        return _spelled(case, {MICRO: value})
    if knob == BATCH:
        return _spelled(case, {GLOBAL: value})
    if knob == "activation_checkpointing" and "model.name" in case.imported.settings:
        return {CHECKPOINTS: value, SELECTIVE: "op" if value == "selective" else None}
    if knob == "checkpoint_every_k":
        return {CHECKPOINTS: "selective", SELECTIVE: str(value)} if "model.name" in case.imported.settings else {}
    if knob == "pipeline_parallel_size" and value != 1 and not pipelined:
        # Without a pipeline the local batch is one micro-batch; in one it is divided, one sample at a time.
        return {PIPELINE: value, **({} if "model.name" in case.imported.settings else {GRAPHS: True})}
    return None


def _sizes(case: LintCase, config: TrialConfig, batch: int) -> Settings:
    """Without a pipeline torchtitan accumulates local batches to the global one; a pipeline splits the local batch."""
    assert case.ranks is not None
    data_ranks, replicas = case.ranks // (config.tensor_parallel_size * config.pipeline_parallel_size), case.replicas or 1
    settings: dict[str, object] = {}
    stated_shards = case.get(SHARD, -1)
    if config.hsdp_shard_size and config.zero_stage == 3:
        shards = config.hsdp_shard_size // config.context_parallel_size
        settings |= {SHARD: shards, REPLICATE: max(replicas // max(shards, 1), 1)}
    elif config.zero_stage == 0 and stated_shards == 1:
        settings[REPLICATE] = replicas
    else:
        settings[SHARD] = -1 if stated_shards == -1 else data_ranks // config.context_parallel_size
        if case.get(REPLICATE, 1) != 1:
            settings[REPLICATE] = 1
    local = config.micro_batch_size
    if config.pipeline_parallel_size > 1:
        local = settings[LOCAL] = max(batch // replicas, 1)
    stated_batch = case.get(STEP_TOKENS if counts_tokens(case.imported.settings) else GLOBAL)
    if stated_batch not in (None, -1) or local * replicas != batch:
        settings[GLOBAL] = batch
    return _spelled(case, settings, config.micro_batch_size)


TORCHTITAN = Framework(
    name="torchtitan", title="torchtitan", checked="0.3.0, TOML 0.2.2", options=OPTIONS, read=from_torchtitan, checks=CHECKS,
    rules=RULES, rewrite=_rewrite, sizes=_sizes, undeclared_findings=_unknown_fields, experts_borrow=True,
    expert_tensor=_expert_tensor, samples_per_pass=_batch_step,
    prefixes=("recipe", "model.", "training.", "optimizer.", "parallelism.", "activation_checkpoint.", "compile.", *UNREAD),
)  # fmt: skip
