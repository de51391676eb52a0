"""Reads an Accelerate file as knobs: DeepSpeed, FSDP, Megatron-LM, or plain data parallelism."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.exports.winner import Stated
from autotune.imports.deepspeed import as_deepspeed_does, from_deepspeed, reduces_as_it_computes
from autotune.imports.imported import FlatTable, Imported
from search_spaces.knob import Value

SETTINGS = (
    "compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "rdzv_backend", "same_network", "use_cpu", "gpu_ids", "downcast_bf16", "enable_cpu_affinity", "tpu_env", "tpu_use_cluster",
    "tpu_use_sudo", "fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_state_dict_type",
    "fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_version",
    "fsdp_config.fsdp_sync_module_states", "fsdp_config.fsdp_use_orig_params", "deepspeed_config.zero3_init_flag",
    "deepspeed_config.zero3_save_16bit_model", "deepspeed_config.deepspeed_multinode_launcher",
)  # fmt: skip
"""Keys about how a run is started and saved. They are not knobs and do not affect a step."""
PRECISIONS: Mapping[str, Value] = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}
SHARDING: Mapping[str, Value] = {
    "full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0, "hybrid_shard": 3, "4": 3,
    "hybrid_shard_zero2": 3, "5": 3,
}  # fmt: skip
"""FSDP1's strategies, by name and by number -> ZeRO stage. Only stage 3 supports copies on a part of the ranks."""
HYBRID = ("hybrid_shard", "4", "hybrid_shard_zero2", "5")
KEPT = ("hybrid_shard_zero2", "5")
"""The hybrid strategy that keeps parameters gathered until backward."""
STRATEGY, RESHARD = "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward"
ACCELERATE_FORMAT = "accelerate"
ReadFile = Callable[[Path], Mapping[str, Any]]


def from_accelerate(content: Mapping[str, Any], path: Path, read_file: ReadFile) -> Imported:
    """Read the file.

    Args:
        content: the parsed YAML.
        path: path of the file; the files that it names are in the same folder.
        read_file: reads a DeepSpeed configuration that the file names.

    Raises:
        RequestError: Accelerate does not accept a value, a value is outside its knob's domain, or a file that it names cannot
            be read.
    """
    table = FlatTable(content, path.name)
    kind = str(table.take("distributed_type") or "NO").upper()
    ranks, machines = table.whole("num_processes"), table.whole("num_machines") or 1
    table.drop(*SETTINGS)
    if kind == "DEEPSPEED" and (beside := table.take("deepspeed_config.deepspeed_config_file")) is not None:
        table.drop("mixed_precision")
        return _with_file(table, path.parent / str(beside), ranks, read_file)
    table.set("precision", table.choice("mixed_precision", PRECISIONS))
    match kind:
        case "DEEPSPEED":
            _deepspeed(table)
        case "FSDP":
            _fsdp(table, ranks, machines)
        case "MEGATRON_LM":
            _megatron(table)
        case _:
            table.set("zero_stage", 0)
    _mesh(table)
    steps = table.whole("gradient_accumulation_steps") or table.whole("deepspeed_config.gradient_accumulation_steps")
    if steps is not None:
        table.notes.append(f"gradient_accumulation_steps={steps}: follows from the batches; give --global-batch-size")
    baseline = 'for a sweep add --baseline FILE with {"micro_batch_size": N}'
    table.notes.append(f"micro_batch_size: the file does not state it, so it is 1; {baseline}")
    table.assumed |= {"micro_batch_size": 1, "activation_checkpointing": "none"}
    clip = table.quantity("deepspeed_config.gradient_clipping", "megatron_lm_config.megatron_lm_gradient_clipping")
    return table.imported(format=ACCELERATE_FORMAT, ranks=ranks, hyperparameters=Stated(clip=clip))


def _with_file(table: FlatTable, path: Path, ranks: int | None, read_file: ReadFile) -> Imported:
    inner = from_deepspeed(read_file(path), path.name)
    notes = (*table.imported().notes, *inner.notes)
    return Imported(
        knobs=inner.knobs,
        global_batch_size=inner.global_batch_size,
        samples_per_rank=inner.samples_per_rank,
        ranks=ranks,
        hyperparameters=inner.hyperparameters,
        notes=notes,
        assumed=inner.assumed,
        format=ACCELERATE_FORMAT,
        keys=inner.keys,
        settings={**table.settings, **inner.settings},
    )


def _deepspeed(table: FlatTable) -> None:
    table.knob("deepspeed_config.zero_stage", "zero_stage")
    table.knobs.setdefault("zero_stage", 2)  # Accelerate's default
    table.knob("deepspeed_config.offload_optimizer_device", "offload_optimizer")
    table.knob("deepspeed_config.offload_param_device", "offload_param")
    as_deepspeed_does(table)
    reduces_as_it_computes(table)


def _fsdp(table: FlatTable, ranks: int | None, machines: int) -> None:
    reduces_as_it_computes(table)
    strategy, reshard = _strategy(table)
    stage = 3 if strategy is None else int(SHARDING[strategy])
    table.set("zero_stage", stage)
    table.set("reshard_after_forward", False if strategy in KEPT else reshard)
    if strategy in HYBRID and ranks is not None and machines > 1:
        table.set("hsdp_shard_size", ranks // machines)
    if table.switch("fsdp_config.fsdp_offload_params"):
        _offload(table, stage)
    if table.switch("fsdp_config.fsdp_activation_checkpointing"):
        table.set("activation_checkpointing", "full")


def _strategy(table: FlatTable) -> tuple[str | None, bool | None]:
    """FSDP1's strategy, and the FSDP2 switch that replaces it.

    Raises:
        RequestError: Accelerate does not have this strategy.
    """
    strategy, reshard = table.take(STRATEGY), table.take(RESHARD)
    if isinstance(reshard, str) and reshard.lower() not in ("true", "false"):
        strategy, reshard = strategy or reshard, None  # FSDP1 files may have the strategy under this key
    word = None if strategy is None else str(strategy).lower()
    if word is not None and word not in SHARDING:
        raise RequestError(STRATEGY, f"{strategy!r} in {table.source} is not known", f"use one of {', '.join(SHARDING)}")
    return word, None if reshard is None else str(reshard).lower() in ("true", "1")


def _offload(table: FlatTable, stage: int) -> None:
    """FSDP offloads parameters and optimizer state together; in trials below stage 3, parameters stay on the device."""
    if stage > 0:
        table.set("offload_optimizer", "cpu")
    if stage == 3:
        table.set("offload_param", "cpu")
    else:
        offload_note = "parameters stay on the device" if stage else "nothing is offloaded"
        table.notes.append(f"fsdp_config.fsdp_offload_params=true: at stage {stage} {offload_note} in trials")


def _megatron(table: FlatTable) -> None:
    table.knob("megatron_lm_config.megatron_lm_tp_degree", "tensor_parallel_size")
    table.knob("megatron_lm_config.megatron_lm_pp_degree", "pipeline_parallel_size")
    table.set("sequence_parallel", table.switch("megatron_lm_config.megatron_lm_sequence_parallelism"))
    table.set("zero_stage", 1 if table.switch("megatron_lm_config.megatron_lm_use_distributed_optimizer") else 0)
    if table.switch("megatron_lm_config.megatron_lm_recompute_activations"):
        table.set("activation_checkpointing", "selective")


def _mesh(table: FlatTable) -> None:
    """The degrees of Accelerate's ParallelismConfig."""
    keys = {name: f"parallelism_config.parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    sizes = {name: table.whole(key) or 1 for name, key in keys.items()}
    for name, knob in (("tp", "tensor_parallel_size"), ("cp", "context_parallel_size")):
        if sizes[name] > 1:
            table.set(knob, sizes[name], keys[name])
    if sizes["dp_replicate"] > 1 and sizes["dp_shard"] * sizes["cp"] > 1 and table.knobs.get("zero_stage") == 3:
        table.set("hsdp_shard_size", sizes["dp_shard"] * sizes["cp"], keys["dp_shard"])
