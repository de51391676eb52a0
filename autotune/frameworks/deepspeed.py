"""DeepSpeed's configuration (0.19.8): read as knobs, and written with the schedules of its data efficiency library."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.best_config import Stated, Winner
from autotune.frameworks.deepspeed_sections import section_keys
from autotune.frameworks.export import Checkpoints, Export, ExportTarget, remarks, unplaced_notes, unstated_note
from autotune.frameworks.framework import BATCH, Option, knobs_of
from autotune.frameworks.imported import AUTO, FlatTable, Imported
from autotune.frameworks.peft import ADAPTER_KNOBS, peft_notes
from search_spaces.communication import INT8
from search_spaces.deepspeed import KEEP_ALL, KEYS, REDUCTION, deepspeed_config, offloads_a_part
from search_spaces.knob_values import value_text
from search_spaces.models.command import CommandModel
from search_spaces.optimizers import BF16_MASTERS
from search_spaces.placeholders import files_read, is_trainer
from search_spaces.training.data_schedule import GRANULARITY, UNSCHEDULED_LAYERS
from search_spaces.trial_config import TrialConfig

ZERO = "zero_optimization."
OPTIONS = (
    *(Option(key, knob, changes=knob in ("micro_batch_size", "zero_stage", "offload_optimizer", "offload_param"))
      for knob, key in KEYS.items()),
    Option("train_batch_size", BATCH),
    Option("tensor_parallel.autotp_size", "tensor_parallel_size"),
    Option("sequence_parallel_size", "context_parallel_size", changes=False),
)  # fmt: skip
EITHER = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
"""Keys of `zero_optimization` for stage 3 that DeepSpeed accepts with and without the prefix `stage3_`."""
OPTIMIZER_TYPES = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lamb": "lamb", "muon": "muon"}
"""Optimizer type in lower case -> our name. DeepSpeed's Adam applies decoupled weight decay, as AdamW does."""
DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
OF_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden_size: hidden_size * hidden_size,
    "prefetch_bucket_size": lambda hidden_size: int(0.9 * hidden_size * hidden_size),
    "param_persistence_threshold": lambda hidden_size: 10 * hidden_size,
}
"""Knob -> the value that Accelerate and the Trainer write for "auto"."""
OLDER_SWITCHES = {f"{ZERO}cpu_offload": "offload_optimizer", f"{ZERO}cpu_offload_param": "offload_param"}
"""Older switch that DeepSpeed still maps -> the knob that it sets to `cpu`."""


def from_deepspeed(content: Mapping[str, Any], source: str) -> Imported:
    """Read the configuration.

    Args:
        content: the parsed JSON.
        source: the file's name, for messages.

    Raises:
        RequestError: DeepSpeed does not accept a value, or a value is outside its knob's domain.
    """
    table = FlatTable(content, source)
    for name, key in KEYS.items():
        _knob(table, key, name)
        if name in EITHER:
            _knob(table, f"{ZERO}{name}", name)
    key = "tensor_parallel.autotp_size"
    if (size := table.number(key, default=0)) > 1:  # 0 and 1 switch it off
        if size != int(size):
            raise RequestError(key, f"{size:g} in {source} is not a whole number", "give a whole number")
        table.set("tensor_parallel_size", int(size), key)
    for switch, knob in OLDER_SWITCHES.items():
        table.set(knob, "cpu" if table.switch(switch) else None, switch)
    if table.size("sequence_parallel_size", "context_parallel_size") > 1:
        table.set("context_parallel_method", "ulysses", "sequence_parallel_size")
    table.assumed |= {"micro_batch_size": 1, "activation_checkpointing": "none"}
    as_deepspeed_does(table)
    _reuse(table)
    _precision(table)
    hyperparameters = _stated(table)
    steps, batch = table.whole("gradient_accumulation_steps"), table.whole("train_batch_size")
    micro = table.knobs.get("micro_batch_size")
    if micro is None and batch is not None and steps is not None:
        table.notes.append(
            "train_micro_batch_size_per_gpu is not stated: it follows from the number of ranks; the default is 1"
        )
    samples = int(micro) * steps if micro is not None and steps is not None else None
    return table.imported(global_batch_size=batch, samples_per_rank=samples, hyperparameters=hyperparameters)


def _knob(table: FlatTable, key: str, name: str) -> None:
    """Read a knob. A legal value that is none of the knob's leaves it at the default, with a note.

    Raises:
        RequestError: DeepSpeed does not accept the value.
    """
    value = table.settings.get(key)
    if value == AUTO and name in OF_HIDDEN_SIZE:
        table.drop(key)
        table.of_hidden_size[name] = OF_HIDDEN_SIZE[name]
        table.notes.append(f"{key}=auto: the program takes it from the model's hidden size, and so do predictions")
        return
    try:
        table.knob(key, name)
    except RequestError:
        section, _, last = key.rpartition(".")
        declared = section_keys().get(section, {}).get(last)
        if declared is None or not declared.takes(value):
            raise
        table.notes.append(f"{key}={value_text(value)}: no value of {name}, which was left at the default")


def as_deepspeed_does(table: FlatTable) -> None:
    """Leave out settings that DeepSpeed silently ignores (`autotune lint deepspeed` reports them too), and add its defaults for
    missing settings: at stages 1 and 2 it reduces after backward, at stage 3 it overlaps the reduction with backward."""
    stage, offloads = table.knobs.get("zero_stage", 0), table.knobs.get("offload_optimizer", "none") != "none"
    ignored = {"allgather_bucket_size": "DeepSpeed never reads it"}
    if stage == 0:
        ignored |= dict.fromkeys(REDUCTION, "stage 0 reduces after backward, in buckets of its own")
        ignored |= dict.fromkeys(("offload_optimizer", "offload_ratio"), "stage 0 offloads nothing")
    if stage != 3:
        ignored["offload_param"] = f"stage {stage} keeps its parameters where they are"
    if stage in (1, 2) and offloads:
        ignored["contiguous_gradients"] = "gradients are copied into one buffer to be offloaded"
    for name, why in ignored.items():
        value = table.knobs.pop(name, None)
        if value is not None and value != getattr(TrialConfig(), name):
            table.notes.append(f"{name}={value_text(value)}: {why}; it was left at the default")
    if stage in (1, 2):
        table.knobs.setdefault("overlap_comm", False)
    if stage != 3:
        table.of_hidden_size = {name: size for name, size in table.of_hidden_size.items() if stage and name in REDUCTION}
    if stage and "reduce_bucket_size" not in table.of_hidden_size:
        table.knobs.setdefault("reduce_bucket_size", 500_000_000)  # DeepSpeed's default


def reduces_as_it_computes(table: FlatTable) -> None:
    """If the file does not state the dtype of reductions, it is that of mixed precision: half the bytes of our default."""
    precision = table.knobs.get("precision", "fp32")
    if precision in ("bf16", "fp16"):
        table.knobs.setdefault("reduce_dtype", precision)


def _reuse(table: FlatTable) -> None:
    """Read how far ahead DeepSpeed looks before it frees gathered parameters: not at all, the whole step, or in between."""
    if table.knobs.get("zero_stage") != 3:
        return
    key = f"{ZERO}stage3_max_reuse_distance"
    distance = table.number(key, f"{ZERO}max_reuse_distance", default=1e9)  # DeepSpeed's default
    if distance in (0, KEEP_ALL):
        table.set("reshard_after_forward", distance == 0, key)
        return
    table.notes.append(
        f"{key}={distance:g}: DeepSpeed keeps parameters that it reuses within this distance, trials keep none; for a "
        'model of at most half this size add --baseline FILE with {"reshard_after_forward": false}'
    )


def _precision(table: FlatTable) -> None:
    """bf16 and fp16 are tables with one switch each; if both are off, the precision is fp32.

    A switch that is "auto" is set by the Trainer's arguments of this name; which of them is given, the file does not state.
    """
    auto = [
        key for name in ("bfloat16", "bf16", "fp16") for key in (f"{name}.enabled", name) if table.settings.get(key) == AUTO
    ]
    precision = "fp16" if auto and auto[0].startswith("fp16") else "bf16"
    for key in auto:
        table.drop(key)
        decides = "an argument of the Trainer decides it, which the file does not state"
        table.notes.append(f"{key}=auto: {decides}; predictions for GPUs take {precision}, write true or false instead")
    bf16, fp16 = table.switch("bf16.enabled"), table.switch("fp16.enabled")
    if (older := table.switch("bfloat16.enabled")) is not None:
        bf16 = older
    if bf16 or fp16:
        table.set("precision", "bf16" if bf16 else "fp16", "bf16.enabled" if bf16 else "fp16.enabled")
    elif auto:
        table.assumed |= {"precision": precision, "reduce_dtype": precision}
        table.keys["precision"] = auto[0]
    elif bf16 is False or fp16 is False:
        table.set("precision", "fp32", "bf16.enabled" if bf16 is False else "fp16.enabled")
    table.set("reduce_dtype", table.choice("communication_data_type", DTYPES), "communication_data_type")
    reduces_as_it_computes(table)


def _stated(table: FlatTable) -> Stated:
    """Read the hyperparameters, and whether the optimizer is fused."""
    kind = table.take("optimizer.type")
    optimizer = OPTIMIZER_TYPES.get(str(kind).lower())
    if kind is not None and optimizer is None:
        optimizer_names = ", ".join(sorted(set(OPTIMIZER_TYPES.values())))
        table.notes.append(
            f"optimizer.type={kind}: not among {optimizer_names}; trials train with their default, and exports leave it out"
        )
    if table.switch("optimizer.params.torch_adam"):
        table.set("fused_optimizer", bool(table.switch("optimizer.params.fused")), "optimizer.params.torch_adam")
    rate = table.quantity("optimizer.params.lr")
    if rate == 0:
        table.notes.append("optimizer.params.lr=0: this would train nothing; it was left out")
    return Stated(
        lr=rate or None,
        weight_decay=table.quantity("optimizer.params.weight_decay"),
        clip=table.quantity("gradient_clipping"),
        optimizer=optimizer,
    )


METRIC = "seqlen_truncate"
"""The metric name by which Megatron-DeepSpeed truncates samples; DeepSpeed itself knows no name and truncates nothing."""


def data_notes(winner: Winner) -> list[str]:
    """Notes about what the program has to do besides the section."""
    config, notes = winner.config, []
    if config.curriculum_start_length:
        grown = f"over curriculum_steps={config.curriculum_steps}"
        notes.append(
            f"curriculum_start_length={config.curriculum_start_length} {grown}: as the metric {METRIC}, by which "
            "Megatron-DeepSpeed cuts samples; in any other program cut them to the sampler's current_difficulties"
        )
    if config.random_ltd_start_tokens:
        notes.append(
            f"random_ltd_start_tokens={config.random_ltd_start_tokens} over random_ltd_steps={config.random_ltd_steps}: wrap "
            "the layers with convert_to_random_ltd after deepspeed.initialize, and give them the rotations of the tokens that "
            "they see; every sample draws its own tokens there, not every step"
        )
    return notes


def _sampling(winner: Winner) -> dict[str, Any]:
    config = winner.config
    if not config.curriculum_start_length:
        return {}
    metric = {
        "index_to_sample_path": "dummy",
        "index_to_metric_path": "dummy",
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": config.curriculum_start_length,
        "max_difficulty": winner.workload.sequence_length,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": config.curriculum_steps, "difficulty_step": GRANULARITY},
    }
    # DeepSpeed's sampler writes its sample lists into this folder.
    curriculum = {"enabled": True, "data_cluster_path": "data_clusters", "curriculum_metrics": {METRIC: metric}}
    return {"data_sampling": {"enabled": True, "curriculum_learning": curriculum}}


def _routing(winner: Winner) -> dict[str, Any]:
    config, shape = winner.config, winner.shape
    if not config.random_ltd_start_tokens or shape is None:
        return {}
    dropped = {
        "enabled": True,
        "total_layer_num": shape.num_layers,
        "random_ltd_layer_num": shape.num_layers - UNSCHEDULED_LAYERS,
        "random_ltd_layer_id": [*range(1, shape.num_layers - 1)],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": config.random_ltd_start_tokens,
            "max_value": winner.workload.sequence_length,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": config.random_ltd_steps, "seq_per_step": GRANULARITY},
        },
    }
    return {"data_routing": {"enabled": True, "random_ltd": dropped}}


TARGET = ExportTarget(
    format="deepspeed",
    name="a DeepSpeed configuration",
    expressed=knobs_of(OPTIONS) - {"allgather_bucket_size", "context_parallel_size"} | ADAPTER_KNOBS | {
        "reduce_dtype", "precision", "fused_optimizer", "hsdp_shard_size", "reshard_after_forward", "accumulation_dtype",
        "optimizer", "onebit_warmup_steps", "gather_dtype", "secondary_shard_size", "activation_checkpointing",
        "curriculum_start_length", "curriculum_steps", "random_ltd_start_tokens", "random_ltd_steps",
    },
    elsewhere={
        "offload_activations": "DeepSpeed's own checkpointing has cpu_checkpointing; else wrap the model's forward in "
        "torch.autograd.graph.save_on_cpu(pin_memory=True)",
        "allgather_bucket_size": "DeepSpeed accepts its key and never reads it",
        "sequence_parallel": "DeepSpeed's AutoTP keeps the norms' sequence whole",
        "pipeline_parallel_size": "build a deepspeed.pipe.PipelineModule, with the layers that launch.placement names",
        "virtual_stages": "a PipelineModule runs one stage a rank",
        "pipeline_schedule": "a PipelineModule runs 1F1B alone",
        "pipeline_split": "set the partition_method of the PipelineModule",
        "pipeline_layout": "give the PipelineModule these layers; it recomputes on every stage alike",
        "context_parallel_size": "DeepSpeed divides sequences by heads instead (Ulysses, deepspeed.sequence)",
        "context_parallel_method": "as sequence_parallel_size of UlyssesSPAttentionHF.register_with_transformers "
        "(deepspeed.runtime.sequence_parallel.ulysses_sp), whose groups are the mpu of deepspeed.initialize",
        "attention_window": "load the model with this sliding_window, where its class has one",
        "expert_parallel_size": "build the experts as deepspeed.moe.layer.MoE with this ep_size",
        "rank_order": "give the PipelineModule a topology with these axes",
        "checkpoint_every_k": "set it in the model (activation_checkpoint_interval of a PipelineModule)",
        "defer_gradient_reduction": "DeepSpeed reduces after every micro-batch at stage 2",
    },
)  # fmt: skip

BY_TORCHAO = "torchao.optim._AdamW(bf16_stochastic_round=True), whose moments have the parameters' type"
"""How another program rounds as `BF16_MASTERS` does."""
OPTIMIZER_NOTES = {
    "lamb": "as Lamb, which bounds its ratios and under ZeRO takes norms of groups of parameters, not of each",
    "muon": "as Muon, which takes the parameters for matrices whose attribute use_muon is True, and the rest for AdamW's",
    BF16_MASTERS: f"DeepSpeed keeps fp32 masters beside bf16 parameters; without ZeRO and its bf16 section, {BY_TORCHAO}",
    "adamw8bit": "no type has 8-bit moments: give deepspeed.initialize a torchao.optim.AdamW8bit or bitsandbytes' AdamW8bit",
}
"""Optimizer -> its note."""
RECOMPUTATION = (
    "recomputation: the model switches on activation_checkpointing=full (`gradient_checkpointing_enable()` in Transformers)"
)
"""The note on full recomputation. It does not begin with the knob, because nothing is lost (`lossless`)."""
DEEPSPEED_ENGINES = ("deepspeed",)
"""The engine that runs DeepSpeed itself."""


def export_deepspeed(winner: Winner) -> Export:
    """Return the JSON for `deepspeed.initialize(config=…)`; settings that it cannot express become notes."""
    notes = remarks(winner, deepspeed_notes(winner), Checkpoints.DEEPSPEED, DEEPSPEED_ENGINES)
    return Export(text=json.dumps(deepspeed_document(winner), indent=2) + "\n", notes=notes)


def deepspeed_document(winner: Winner) -> dict[str, Any]:
    """The configuration as plain data. Of a script that reads the file, it is the one that was measured."""
    config = winner.config
    content = deepspeed_config(config, winner.workload, winner.world_size, winner.model.parameter_count)
    command = script_of(winner)
    content = _as_stated(content, winner) if command is None else _for_script(content, winner, command)
    if config.tensor_parallel_size > 1 and config.pipeline_parallel_size == 1:
        content["tensor_parallel"] = {"autotp_size": config.tensor_parallel_size}
    if schedules := {**_sampling(winner), **_routing(winner)}:
        content["data_efficiency"] = {"enabled": True, "seed": winner.workload.seed, **schedules}
    return content


def script_of(winner: Winner) -> CommandModel | None:
    """The user's script, if it reads this file in its trials."""
    return winner.model if isinstance(winner.model, CommandModel) and "config" in files_read(winner.model) else None


def makes_optimizer(command: CommandModel) -> bool:
    """Whether the script makes the optimizer itself: a Trainer, or a script under Accelerate's plugin."""
    return is_trainer(command) or command.plugin == "deepspeed"


def _for_script(content: dict[str, Any], winner: Winner, command: CommandModel) -> dict[str, Any]:
    """The configuration as the script's trials have it, with the trials' hyperparameters where the user stated none."""
    if makes_optimizer(command):
        content = {name: value for name, value in content.items() if name != "optimizer"}
        content |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    elif not winner.on_gpus and content["optimizer"]["type"] == "AdamW" and not offloads_a_part(winner.config):
        # DeepSpeed's own AdamW takes a minute to compile at first use, and needs a compiler. Only partial offload requires it.
        content["optimizer"]["params"]["torch_adam"] = True
    if not is_trainer(command):
        return content
    # A Trainer takes these from its arguments, and refuses to start if the file has other values.
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return content | dict.fromkeys(batch, "auto") | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


def _as_stated(content: dict[str, Any], winner: Winner) -> dict[str, Any]:
    """A trial's configuration without the hyperparameters that the user did not state."""
    content_keys = {"clip": "gradient_clipping", "optimizer": "optimizer"}
    stated_content = {
        key: value
        for key, value in content.items()
        if key not in {content_keys[name] for name in winner.hyperparameters.missing(*content_keys)}
    }
    if "optimizer" in stated_content:
        unstated = winner.hyperparameters.missing("lr", "weight_decay")
        parameters = {name: value for name, value in stated_content["optimizer"]["params"].items() if name not in unstated}
        stated_content["optimizer"] = {**stated_content["optimizer"], "params": parameters}
    return stated_content


def _stated_notes(winner: Winner) -> list[str]:
    """Notes about hyperparameters. DeepSpeed reads those of an optimizer only beside its type."""
    config, notes = winner.config, []
    command = script_of(winner)
    if command is not None:
        names = ("clip",) if makes_optimizer(command) else ("optimizer", "lr", "weight_decay", "clip")
        placeholders = "those of the trials are in the file as placeholders, put in your own"
        return [] if is_trainer(command) else unstated_note(winner, placeholders, *names)
    if winner.hyperparameters.optimizer is None:
        outcome = "left out, hand DeepSpeed the optimizer that your program makes"
        outcome += ", a DeepSpeedCPUAdam for states in main memory" if config.offload_optimizer != "none" else ""
        notes += unstated_note(winner, outcome, "optimizer")
        if not config.fused_optimizer:
            notes.append("fused_optimizer=False: choose it where the optimizer is made")
    if winner.hyperparameters.optimizer is None or config.optimizer == "adamw8bit":
        yours = "DeepSpeed reads it beside a type of optimizer alone; give it to your own optimizer"
        notes += unplaced_notes(winner, yours, "lr", "weight_decay")
    else:
        notes += unstated_note(winner, "left out, DeepSpeed's own defaults hold", "lr", "weight_decay")
    return [*notes, *unstated_note(winner, "left out, DeepSpeed does not clip", "clip")]


def deepspeed_notes(winner: Winner) -> list[str]:
    """Notes about what the configuration cannot express, or what DeepSpeed does not do."""
    config = winner.config
    notes = [*peft_notes(winner), *data_notes(winner), *_stated_notes(winner)]
    if config.zero_stage == 0:
        changed, why = config.differences(TrialConfig()), "at stage 0 DeepSpeed reduces after backward, in buckets of its own"
        notes += [f"{name}={changed[name]}: {why}" for name in REDUCTION if name in changed]
    if config.activation_checkpointing == "full":
        notes.append(RECOMPUTATION)
    elif config.activation_checkpointing != "none":
        notes.append(f"activation_checkpointing={config.activation_checkpointing}: select what is kept in the model's own code")
    if config.precision == "fp64":
        notes.append("precision=fp64: cast the model to double before it is handed over")
    if config.precision == "fp8":
        notes.append("precision=fp8: as bf16; convert the model with torchao.float8.convert_to_float8_training beforehand")
    if config.optimizer in OPTIMIZER_NOTES:
        notes.append(f"optimizer={config.optimizer}: {OPTIMIZER_NOTES[config.optimizer]}")
    if config.pipeline_parallel_size > 1 and config.zero_stage >= 2:
        notes.append(f"zero_stage={config.zero_stage} in a pipeline: DeepSpeed refuses stages 2 and 3 there; use stage 1")
    if config.tensor_parallel_size > 1:
        remedy = "as autotp_size; DeepSpeed's AutoTP needs a partition_config too for a model that is none of Hugging Face's"
        if config.pipeline_parallel_size > 1:
            remedy = "DeepSpeed's AutoTP hangs in a PipelineModule; divide the layers yourself"
        notes.append(f"tensor_parallel_size={config.tensor_parallel_size}: {remedy}")
    notes += _compression_notes(config)
    if config.hsdp_shard_size and not config.secondary_shard_size:
        notes.append(
            f"hsdp_shard_size={config.hsdp_shard_size}: as zero_hpz_partition_size, which keeps a second copy of the "
            "parameters near, and shards optimizer state and gradients over all ranks"
        )
    if "nvme" in (config.offload_optimizer, config.offload_param) and winner.workload.nvme_path is None:
        notes.append("nvme_path: no folder is named for what goes to files; write one into the configuration")
    return notes + _offload_notes(config) + TARGET.unexpressed(config)


def _compression_notes(config: TrialConfig) -> list[str]:
    """ZeRO++ has equivalent keys; 1-bit Adam no longer has any."""
    notes = []
    if config.gather_dtype == INT8:
        notes.append("gather_dtype=int8: as zero_quantized_weights, whose kernels are CUDA's")
    if config.secondary_shard_size:
        notes.append(f"secondary_shard_size={config.secondary_shard_size}: as zero_hpz_partition_size, for backward alone")
        if config.hsdp_shard_size:
            difference = "states and gradients are sharded over all ranks there"
            notes.append(f"hsdp_shard_size={config.hsdp_shard_size}: {difference}")
    if config.reduce_dtype == INT8:
        unsupported = "DeepSpeed sends integers at stage 3 alone; fp32 is written"
        notes.append(f"reduce_dtype=int8: {'as zero_quantized_gradients' if config.zero_stage == 3 else unsupported}")
    if config.optimizer == "onebit_adam":
        notes += [
            "optimizer=onebit_adam: DeepSpeed 0.19.8 has no 1-bit Adam any more, AdamW is written; older ones have OneBitAdam",
            f"onebit_warmup_steps={config.onebit_warmup_steps}: as the freeze_step of OneBitAdam, where there is one",
        ]
    return notes


def _offload_notes(config: TrialConfig) -> list[str]:
    notes = []
    if config.offload_optimizer == "nvme" and config.zero_stage < 3:
        notes.append(f"offload_optimizer=nvme: DeepSpeed offloads to files at stage 3 alone, not at stage {config.zero_stage}")
    if offloads_a_part(config) and not config.fused_optimizer:
        notes.append("fused_optimizer=False: DeepSpeed offloads a part with its own Adam alone, which is left to it")
    elif config.offload_optimizer != "none" and config.offload_ratio < 1.0 and config.zero_stage < 3:
        notes.append(f"offload_ratio={config.offload_ratio}: DeepSpeed offloads a part at stage 3 alone; here it offloads all")
    return notes
