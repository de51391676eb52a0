"""torchtitan's options: TOML files (0.1 to 0.2), options and Python (0.3 and after) read, and its command line written."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.best_config import Stated, Winner
from autotune.frameworks.export import (
    Checkpoints,
    Export,
    ExportTarget,
    header,
    marks_note,
    remarks,
    spelled,
    spelled_words,
    unplaced_notes,
    unstated_note,
)
from autotune.frameworks.framework import BATCH, Option, knobs_of
from autotune.frameworks.fsdp2 import fsdp2_notes, state_copies
from autotune.frameworks.imported import FlatTable, Imported, flat, model_named
from autotune.frameworks.launch import environment, torchrun_words
from search_spaces.knobs.computation import MXFP8, TENSORWISE
from search_spaces.models.model import ModelSpec
from search_spaces.models.pipeline import FOLDED_SCHEDULES, ONE_STAGE_SCHEDULES, split_layers

TRAIN, SPLIT = "training.", "parallelism."
LOCAL, GLOBAL, TOKENS = f"{TRAIN}local_batch_size", f"{TRAIN}global_batch_size", f"{TRAIN}seq_len"
PRECISION, OFFLOAD, GRAPHS = f"{TRAIN}mixed_precision_param", f"{TRAIN}enable_cpu_offload", f"{TRAIN}disable_cuda_graphs"
REPLICATE, SHARD = f"{SPLIT}data_parallel_replicate_degree", f"{SPLIT}data_parallel_shard_degree"
TENSOR, CONTEXT = f"{SPLIT}tensor_parallel_degree", f"{SPLIT}context_parallel_degree"
PIPELINE, EXPERTS = f"{SPLIT}pipeline_parallel_degree", f"{SPLIT}expert_parallel_degree"
EXPERT_TENSOR, SEQUENCE = f"{SPLIT}expert_tensor_parallel_degree", f"{SPLIT}enable_sequence_parallel"
SCHEDULE, MICRO = f"{SPLIT}pipeline_parallel_schedule", f"{SPLIT}pipeline_parallel_microbatch_size"
RESHARD, STAGE_LAYERS = f"{SPLIT}fsdp_reshard_after_forward", f"{SPLIT}pipeline_parallel_layers_per_stage"
LESS_LAYERS = tuple(f"{SPLIT}pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
CHECKPOINTS, SELECTIVE = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
COMPILE, COMPONENTS, OLD_COMPILE = "compile.enable", "compile.components", f"{TRAIN}compile"
ASYNC = (f"{SPLIT}enable_async_tensor_parallel", "compile.enable_async_tensor_parallel")
SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
OPTIONS = (
    Option(LOCAL, "micro_batch_size", before=("training.batch_size",),
           after="training.num_tokens_per_microbatch_per_dp_rank"),
    Option(GLOBAL, BATCH, after="training.num_tokens_per_train_step"),
    Option(TOKENS, after="training.max_context_length"),
    Option(TENSOR, "tensor_parallel_size", before=("training.tensor_parallel_degree",)),
    Option(SHARD, "hsdp_shard_size", changes=False,
           before=("training.data_parallel_degree", "training.data_parallel_shard_degree")),
    Option(REPLICATE, before=("training.data_parallel_replicate_degree",)),
    Option(PIPELINE, "pipeline_parallel_size", before=("experimental.pipeline_parallel_degree",)),
    Option(CONTEXT, "context_parallel_size", before=("experimental.context_parallel_degree",)),
    Option(SCHEDULE, "pipeline_schedule", words=SCHEDULES, before=("experimental.pipeline_parallel_schedule",)),
    Option(MICRO, after="parallelism.num_pp_microbatches"),
    Option(EXPERTS, "expert_parallel_size"),
    Option(SEQUENCE, "sequence_parallel"),
    Option(RESHARD, "reshard_after_forward", words={True: "always", False: "never"}),
    Option(CHECKPOINTS, "activation_checkpointing"),
    Option(OFFLOAD, "offload_optimizer", words={"none": False, "cpu": True}),
    Option(PRECISION, "precision", changes=False),
    Option(COMPILE, "compile_blocks", changes=False), Option(OLD_COMPILE, "compile_blocks", changes=False),
    *(Option(key, "async_tensor_parallel", changes=False) for key in ASYNC),
    *map(Option, (GRAPHS, EXPERT_TENSOR, STAGE_LAYERS, *LESS_LAYERS, SELECTIVE, COMPONENTS, f"{TRAIN}max_norm")),
    *(Option(f"{TRAIN}{name}") for name in (
        "dataset", "dataset_path", "steps", "dtype", "mixed_precision_reduce", "gc_freq", "gc_debug", "dataloader", "seed",
        "deterministic", "debug_moe_force_load_balance",
    )),
    *(Option(f"{SPLIT}{name}") for name in (
        "enable_compiled_autograd", "disable_loss_parallel", "pipeline_parallel_split_points", "module_fqns_per_model_part",
        "pipeline_parallel_schedule_csv", "pipeline_parallel_expert_parallel_overlap", "context_parallel_load_balancer",
        "context_parallel_rotate_method", "context_parallel_ptrr_mask_key", "expert_parallel_comm_backend",
        "enable_fsdp_symm_mem", "spmd_backend",
    )),
    *(Option(f"activation_checkpoint.{name}") for name in (
        "per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget", "visualize_memory_budget_pareto",
        "preserve_rng_state", "determinism_check", "debug",
    )),
    Option("compile.backend"),
)  # fmt: skip
"""Every field of the tables that decide a layout, of 0.1 to 0.3; torchtitan refuses others, unless a module extends them.
`before`: keys before 0.1; `after`: keys after 0.3 (b5bcd76c), which count tokens instead of samples."""
AFTER = {option.key: option.after for option in OPTIONS if option.after}
LOCAL_TOKENS, STEP_TOKENS, PASSES = AFTER[LOCAL], AFTER[GLOBAL], AFTER[MICRO]
UNREAD = ("job.", "profiling.", "metrics.", "checkpoint.", "comm.", "validation.", "debug.", "lr_scheduler.", "quantize.",
          "memory_estimation.", "fault_tolerance.", "experimental.", "float8.", "mx.", "launcher.", "env.",
          "dataloader.")  # fmt: skip
"""Tables about how a run is started, watched and saved."""
TARGET = ExportTarget(
    format="torchtitan",
    name="torchtitan's command line",
    expressed=knobs_of(OPTIONS) | spelled("torchtitan") | {
        "zero_stage", "offload_param", "virtual_stages", "pipeline_split", "pipeline_layout", "reduce_dtype",
        "expandable_segments", "environment", "fp8_recipe",
    },
    elsewhere={
        "fused_kernels": "torchtitan has no option for them: --compile.enable fuses norms, rotations and gates",
        "context_parallel_method": "torchtitan gathers or rotates keys and values, and exchanges no heads",
        "rank_order": "torchtitan's mesh is pp, dp, cp, tp; put the pipeline outermost",
        "pack_sequences": "its loaders always join documents, cut them where a row ends, and mask attention between them",
        "router_bias_update_rate": "give it as load_balance_coeff of your model's MoE arguments",
        "optimizer": "name it in the param_groups of the OptimizersContainer.Config of your registry function",
    },
)  # fmt: skip
DEBUG = "llama3_debugmodel"


def export_torchtitan(winner: Winner) -> Export:
    """Return the command as a shell script."""
    notes = remarks(winner, _notes(winner), Checkpoints.DISTRIBUTED)
    program = ["-m torchtitan.train", "--module llama3", f"--config {_registry(winner)}"]
    # The activation checkpointing mode is a subcommand, so arguments that the user adds must precede it.
    last = ['"$@"', f"activation-checkpoint:{winner.config.activation_checkpointing}"]
    words = [*torchrun_words(winner), *program, *_pipeline(winner), *_overrides(winner), *last]
    start = f"#!/bin/bash\n{header(winner, 'torchtitan', notes)}{environment(winner)}"
    script = f"{start}exec " + " \\\n  ".join(words) + "\n"
    return Export(text=script, notes=notes)


def _registry(winner: Winner) -> str:
    """The function with the model's shape in torchtitan's llama3 registry."""
    functions = {"llama-3-8b": "llama3_8b", "llama-3-70b": "llama3_70b", "llama-3.1-405b": "llama3_405b"}
    return functions.get(winner.model.name, DEBUG)


def _overrides(winner: Winner) -> list[str]:
    config, workload = winner.config, winner.workload
    # In a pipeline the schedule splits the batch into micro-batches; else torchtitan accumulates to the global batch.
    local = config.micro_batch_size * (winner.gradient_accumulation_steps if config.pipeline_parallel_size > 1 else 1)
    copies = state_copies(winner, TARGET.format)
    reshards = config.zero_stage == 3 and config.reshard_after_forward
    values: dict[str, object] = {
        LOCAL: local,
        GLOBAL: workload.global_batch_size,
        TOKENS: workload.sequence_length,
        **({} if winner.hyperparameters.clip is None else {"training.max_norm": winner.hyperparameters.clip}),
        PRECISION: "bfloat16" if config.precision in ("bf16", "fp8") else "float32",
        REPLICATE: copies,
        SHARD: winner.data_parallel_size // copies,
        RESHARD: "always" if reshards else "never",
        TENSOR: config.tensor_parallel_size,
        CONTEXT: config.context_parallel_size,
        PIPELINE: config.pipeline_parallel_size,
        EXPERTS: config.expert_parallel_size,
    }
    words = [f"--{name} {value}" for name, value in values.items()]
    words += spelled_words(config, "torchtitan")
    if config.compile_blocks:
        words += [f"--{COMPILE}", f"--{COMPONENTS} model"]
        if config.async_tensor_parallel:
            words.append(f"--{ASYNC[1]}")
    if config.offload_param == "cpu":
        words.append(f"--{OFFLOAD}")
    if config.tensor_parallel_size > 1 and not config.sequence_parallel:
        words.append("--parallelism.no-enable-sequence-parallel")
    return words


def _pipeline(winner: Winner) -> list[str]:
    """Options for pipelines. The last one takes every word up to the next option, so other options must follow."""
    config = winner.config
    if config.pipeline_parallel_size == 1:
        return []
    words = [
        f"--{GRAPHS}",  # torchtitan refuses them in pipelines
        f"--{SCHEDULE} {SCHEDULES[config.pipeline_schedule]}",
        f"--{MICRO} {config.micro_batch_size}",
    ]
    if winner.shape is not None and _registry(winner) != DEBUG:
        stages = split_layers(winner.shape, config, winner.workload.sequence_length)
        words += ["--parallelism.module_fqns_per_model_part", *_modules(stages)]
    return words


def _modules(stages: tuple[range, ...]) -> list[str]:
    """The modules of each stage, as torchtitan's Llama names them."""
    parts = [[f"layers.{layer}" for layer in layers] for layers in stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return [",".join(part) for part in parts]


def _notes(winner: Winner) -> list[str]:
    config = winner.config
    notes = fsdp2_notes(config, "reshard_after_forward never")
    if _registry(winner) == DEBUG:
        notes.append(
            f"{winner.model.name}: torchtitan has shapes by name alone; put your own registry function in the place of {DEBUG}"
        )
    if config.activation_checkpointing == "selective":
        notes.append("activation_checkpointing=selective: torchtitan computes every second matrix product again too")
    if config.async_tensor_parallel and not config.compile_blocks:
        notes.append(
            "async_tensor_parallel=True: torchtitan has it in compiled blocks alone (--compile.enable_async_tensor_parallel)"
        )
    if config.reduce_dtype != "fp32":
        notes.append(f"reduce_dtype={config.reduce_dtype}: torchtitan reduces in float32 alone")
    if config.precision == "fp8":
        recipe = "" if config.fp8_recipe == TENSORWISE else f'recipe_name="{config.fp8_recipe}"'
        converter = "MXFP8LinearConverter.Config()" if config.fp8_recipe == MXFP8 else f"Float8LinearConverter.Config({recipe})"
        notes.append(f"precision=fp8: give model_registry converters=[{converter}] in your registry function")
    elif config.precision not in ("fp32", "bf16"):
        notes.append(f"precision={config.precision}: torchtitan trains in float32 and bfloat16 alone")
    if config.pipeline_parallel_size > 1 and _registry(winner) == DEBUG:
        notes.append("virtual_stages, pipeline_split: give parallelism.module_fqns_per_model_part your model's modules")
    groups = "state it in the param_groups of the OptimizersContainer.Config of your registry function"
    notes += unplaced_notes(winner, groups, "lr", "weight_decay", "optimizer")
    notes += unstated_note(winner, "left out, those of the registry hold", "lr", "weight_decay", "clip", "optimizer")
    notes += marks_note(config, "torchtitan")
    return notes + TARGET.unexpressed(config)


def counts_tokens(settings: Mapping[str, Any]) -> bool:
    """Whether the settings are those after 0.3."""
    return any(key in settings for key in AFTER.values())


def in_samples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that count tokens as those of 0.3."""
    tokens = settings.get(AFTER[TOKENS], 2048)
    micro = max(settings.get(LOCAL_TOKENS, 16384) // tokens, 1)
    passes = settings.get(PASSES, 1) if settings.get(PIPELINE, 1) > 1 else 1
    step = settings.get(STEP_TOKENS, -1)
    samples = {LOCAL: micro * passes, MICRO: micro, TOKENS: tokens, GLOBAL: step if step == -1 else step // tokens}
    return {**{key: value for key, value in settings.items() if key not in AFTER.values()}, **samples}


def in_tokens(settings: Mapping[str, Any], tokens: int, micro: int) -> dict[str, Any]:
    """Changed settings of 0.3 as those that count tokens; `micro`: samples of a micro-batch."""
    changed = {key: value for key, value in settings.items() if key not in AFTER}
    tokens = settings.get(TOKENS, tokens)
    micro = settings.get(MICRO, micro)
    if MICRO in settings or (LOCAL in settings and PIPELINE not in settings):
        changed[LOCAL_TOKENS] = micro * tokens
    if LOCAL in settings:
        changed |= {LOCAL_TOKENS: micro * tokens, PASSES: max(settings[LOCAL] // micro, 1)}
    if GLOBAL in settings:
        changed[STEP_TOKENS] = settings[GLOBAL] if settings[GLOBAL] in (None, -1) else settings[GLOBAL] * tokens
    if TOKENS in settings:
        changed[AFTER[TOKENS]] = tokens
    return changed


def from_torchtitan(content: Mapping[str, Any], source: str) -> Imported:
    """Read the configuration.

    Args:
        content: its settings as tables, or with flat keys.
        source: the file's name, for messages.

    Raises:
        RequestError: the file is for another version of torchtitan, torchtitan does not accept a value, or a value is outside
            its knob's domain.
    """
    settings = dict(flat(content))
    if counts_tokens(settings):
        try:
            imported = from_torchtitan(in_samples(settings), source)
        except (TypeError, ZeroDivisionError):
            raise RequestError(LOCAL_TOKENS, f"numbers of tokens in {source} are not whole", "give whole numbers") from None
        keys = {knob: AFTER.get(key, key) for knob, key in imported.keys.items()}
        return replace(imported, settings=settings, keys=keys)
    table = FlatTable(content, source)
    _require_version(table)
    model = _model(table)
    pipeline, tensor = table.size(PIPELINE, "pipeline_parallel_size"), table.size(TENSOR, "tensor_parallel_size")
    context = table.size(CONTEXT, "context_parallel_size")
    table.size(EXPERTS, "expert_parallel_size")
    ranks = _data(table, pipeline, tensor, context)
    # 8 samples of 2048 tokens are torchtitan's defaults.
    local, micro = table.whole(LOCAL) or 8, table.whole(MICRO) or 1
    table.set("micro_batch_size", micro if pipeline > 1 else local, MICRO if pipeline > 1 else LOCAL)
    if tensor > 1:
        on = table.switch(SEQUENCE)
        table.set("sequence_parallel", True if on is None else on, SEQUENCE)
    if pipeline > 1:
        _read_pipeline(table, model, pipeline)
    _computation(table)
    batch, tokens = table.take(GLOBAL), table.whole(TOKENS)
    if tokens is not None:
        table.keys["sequence_length"] = TOKENS
    return table.imported(
        model=model,
        ranks=ranks,
        global_batch_size=None if batch in (None, -1) else _count(batch, source),
        samples_per_rank=local,
        sequence_length=tokens or 2048,
        hyperparameters=_stated(table),
    )


def _count(value: Any, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(GLOBAL, f"{value!r} in {source} is not a whole number", "give samples, or -1")
    return value


def _require_version(table: FlatTable) -> None:
    for option in OPTIONS:
        for key in option.before:
            if key in table.settings:
                raise RequestError(key, f"{table.source} is for a torchtitan before 0.1", f"rename the key to {option.key}")


def _model(table: FlatTable) -> ModelSpec | None:
    name, flavor, recipe = (table.take(key) for key in ("model.name", "model.flavor", "recipe"))
    table.drop_tables(*UNREAD)
    table.drop("module", "model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion", "training.dataset",
               "training.dataset_path", "training.steps", "training.gc_freq", "training.seed", "optimizer.eps",
               "optimizer.beta1", "optimizer.beta2", "optimizer.early_step_in_backward")  # fmt: skip
    return model_named(f"{name}-{flavor or ''}" if name is not None else str(recipe or ""))


def _data(table: FlatTable, pipeline: int, tensor: int, context: int) -> int | None:
    """Read how the states are divided; returns the ranks if the file states them."""
    replicas, shards = table.whole(REPLICATE) or 1, table.take(SHARD)
    if shards is not None and (isinstance(shards, bool) or not isinstance(shards, int) or (shards < 1 and shards != -1)):
        raise RequestError(SHARD, f"{shards!r} in {table.source} is not a degree", "give a whole number, or -1")
    table.set("zero_stage", 0 if shards == 1 and replicas > 1 and context == 1 else 3, SHARD)
    if shards in (None, -1):
        return None
    if replicas > 1 and table.knobs["zero_stage"] == 3:
        table.set("hsdp_shard_size", shards * context, SHARD)
    return int(replicas * shards * pipeline * tensor * context)


def _read_pipeline(table: FlatTable, model: ModelSpec | None, ranks: int) -> None:
    name = str(table.take(SCHEDULE) or "1F1B")
    schedule = next((ours for ours, word in SCHEDULES.items() if word.lower() == name.lower()), None)
    if schedule is None:
        schedule_names = ", ".join(SCHEDULES.values())
        raise RequestError(SCHEDULE, f"{name!r} in {table.source} is not one of our schedules", f"use one of {schedule_names}")
    table.set("pipeline_schedule", schedule, SCHEDULE)
    stages = 1 if schedule in ONE_STAGE_SCHEDULES else 2
    less = [int(table.number(key, default=1)) for key in LESS_LAYERS]
    stage_layers = table.whole(STAGE_LAYERS)
    if stage_layers is not None and model is not None and schedule not in FOLDED_SCHEDULES:
        layers = model.num_layers + sum(less)
        stages = max(-(-layers // stage_layers) // ranks, 1)
    table.set("virtual_stages", stages, SCHEDULE if stage_layers is None else STAGE_LAYERS)


def _computation(table: FlatTable) -> None:
    _recomputation(table)
    precision = table.choice(PRECISION, {"bfloat16": "bf16", "float32": "fp32"}) or "bf16"
    converters = str(table.take("model.converters") or ()).lower()
    recipe = table.take("float8.recipe_name")
    if precision == "bf16" and ("float8" in converters or "mx" in converters):
        precision = "fp8"
        table.set("fp8_recipe", MXFP8 if "mx" in converters else str(recipe or TENSORWISE), "float8.recipe_name")
    table.set("precision", precision, PRECISION)
    reshard = str(table.take(RESHARD) or "default")
    if table.knobs["zero_stage"] == 3:
        pipelined = table.knobs.get("pipeline_parallel_size", 1) != 1
        table.set("reshard_after_forward", reshard == "always" or (reshard == "default" and not pipelined), RESHARD)
    if table.switch(OFFLOAD):
        table.set("offload_optimizer", "cpu", OFFLOAD)
        table.set("offload_param", "cpu", OFFLOAD)
    components, of_version_1 = table.take(COMPONENTS), table.switch(OLD_COMPILE)
    compiled = bool(table.switch(COMPILE)) and (components is None or "model" in str(components))
    asynchronous = [table.switch(key) for key in ASYNC]
    if compiled or of_version_1:
        table.set("compile_blocks", True, COMPILE if compiled else OLD_COMPILE)
        if any(asynchronous) and table.knobs.get("tensor_parallel_size", 1) != 1:
            table.set("async_tensor_parallel", True, ASYNC[0])
    implementation = table.take("optimizer.implementation")
    if implementation is not None:
        table.set("fused_optimizer", implementation == "fused", "optimizer.implementation")


def _recomputation(table: FlatTable) -> None:
    """Files of 0.1 and 0.2 recompute every layer, every second one or, with `op`, some operators; 0.3 recomputes operators."""
    mode = table.choice(CHECKPOINTS, {"none": "none", "selective": "selective", "full": "full", "memory_budget": "selective"})
    if table.settings.get("activation_checkpoint", "") is None:  # after 0.3: `activation_checkpoint=None`
        mode = "none"
        table.drop("activation_checkpoint")
    every = table.take(SELECTIVE)
    if every is None:
        every = "2" if "model.name" in table.settings else "op"
    budget = table.take("activation_checkpoint.memory_budget")
    if table.settings.get(CHECKPOINTS) == "memory_budget":
        table.notes.append(f"memory_budget={0.5 if budget is None else budget}: predicted as selective recomputation")
    elif mode in (None, "selective") and re.fullmatch(r"[0-9]{1,9}", str(every)):
        table.set("activation_checkpointing", "full", CHECKPOINTS)
        table.set("checkpoint_every_k", max(int(every), 1), SELECTIVE)
        return
    table.set("activation_checkpointing", "selective" if mode is None else mode, CHECKPOINTS)


def _stated(table: FlatTable) -> Stated:
    name = table.take("optimizer.name")
    return Stated(
        lr=table.quantity("optimizer.lr") or None,
        weight_decay=table.quantity("optimizer.weight_decay"),
        clip=table.quantity(f"{TRAIN}max_norm"),
        optimizer="adamw" if name is not None and str(name).lower() == "adamw" else None,
    )
