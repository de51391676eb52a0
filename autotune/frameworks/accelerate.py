"""Files for `accelerate launch --config_file`: read (DeepSpeed, FSDP, Megatron-LM, DDP), and written (FSDP2, DeepSpeed)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.best_config import Stated, Winner
from autotune.frameworks.deepspeed import (
    DEEPSPEED_ENGINES,
    as_deepspeed_does,
    deepspeed_notes,
    from_deepspeed,
    reduces_as_it_computes,
)
from autotune.frameworks.export import (
    OTHER_FORMATS,
    Checkpoints,
    Export,
    ExportTarget,
    header,
    remarks,
    unplaced_notes,
    yaml_text,
)
from autotune.frameworks.framework import Option, knobs_of
from autotune.frameworks.fsdp2 import DECODER_LAYERS, fsdp2_notes, reduction_note, replicas
from autotune.frameworks.imported import FlatTable, Imported, named_file, nested, read_table, switch_of
from autotune.frameworks.peft import ADAPTER_KNOBS, peft_notes
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

PRECISIONS: Mapping[str, Value] = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
SHARDING: Mapping[str, Value] = {
    "full_shard": 3, "1": 3, "shard_grad_op": 2, "2": 2, "no_shard": 0, "3": 0, "hybrid_shard": 3, "4": 3,
    "hybrid_shard_zero2": 3, "5": 3,
}  # fmt: skip
"""FSDP1's strategies, by name and by number -> ZeRO stage. Only stage 3 supports copies on a part of the ranks."""
HYBRID_ZERO2 = ("hybrid_shard_zero2", "5")
"""The hybrid strategy that keeps parameters gathered until backward."""
CHECKED = "1.15.0"
"""The version whose source the reading and the checks were compared with."""
FILE, INIT_FLAG = "deepspeed_config.deepspeed_config_file", "deepspeed_config.zero3_init_flag"
PROCESSES, MACHINES = "num_processes", "num_machines"


def fsdp(name: str) -> str:
    """A setting of FSDP."""
    return f"fsdp_config.fsdp_{name}"


def megatron(name: str) -> str:
    """A setting of the Megatron-LM plug-in."""
    return f"megatron_lm_config.megatron_lm_{name}"


def mesh(name: str) -> str:
    """The setting of a degree of Accelerate's ParallelismConfig."""
    return f"parallelism_config.parallelism_config_{name}_size"


VERSION, STRATEGY, RESHARD = fsdp("version"), fsdp("sharding_strategy"), fsdp("reshard_after_forward")
WRAP, STATE_DICT = fsdp("auto_wrap_policy"), fsdp("state_dict_type")
ZERO_STAGE, OFFLOAD_PARAM = "deepspeed_config.zero_stage", "deepspeed_config.offload_param_device"
SETUP = (
    "compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "rdzv_backend", "same_network", "use_cpu", "gpu_ids", "downcast_bf16", "enable_cpu_affinity", "tpu_env", "tpu_use_cluster",
    "tpu_use_sudo", VERSION, WRAP, STATE_DICT, INIT_FLAG, "deepspeed_config.zero3_save_16bit_model",
    *(f"deepspeed_config.deepspeed_{name}" for name in (
        "multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter", "moe_layer_cls_names",
    )), *map(fsdp, (
        "cpu_ram_efficient_loading", "transformer_layer_cls_to_wrap", "sync_module_states", "use_orig_params",
    )),
)  # fmt: skip
"""Settings about how a run is started and saved. They are not knobs and do not affect a step."""
OPTIONS = (
    Option(mesh("tp"), "tensor_parallel_size", changes=False),
    Option(mesh("cp"), "context_parallel_size", changes=False),
    Option(mesh("dp_shard"), "hsdp_shard_size", changes=False),
    Option(fsdp("activation_checkpointing"), "activation_checkpointing", words={"none": False, "full": True}),
    Option(ZERO_STAGE, "zero_stage"),
    Option("deepspeed_config.offload_optimizer_device", "offload_optimizer"),
    Option(OFFLOAD_PARAM, "offload_param", changes=False),
    Option(megatron("tp_degree"), "tensor_parallel_size", changes=False),
    Option(megatron("pp_degree"), "pipeline_parallel_size", changes=False),
    Option(megatron("context_parallel_size"), "context_parallel_size", changes=False),
    Option(megatron("expert_model_parallel_size"), "expert_parallel_size", changes=False),
    Option(megatron("recompute_granularity"), "activation_checkpointing", changes=False),
    *(Option(megatron(name)) for name in (
        "use_custom_fsdp", "no_load_optim", "eod_mask_loss", "no_save_optim", "optimizer_cpu_offload", "num_micro_batches",
        "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer", "decoder_last_pipeline_num_layers",
        "sequence_parallelism", "use_distributed_optimizer", "gradient_clipping", "recompute_activations", "recompute_method",
        "recompute_num_layers",
        "attention_backend", "attention_dropout", "hidden_dropout", "attention_softmax_in_fp32", "expert_tensor_parallel_size",
        "calculate_per_token_loss", "use_rotary_position_embeddings",
    )),
    *map(Option, SETUP),
    *map(Option, (
        FILE, "deepspeed_config.gradient_accumulation_steps", "deepspeed_config.gradient_clipping",
        "distributed_type", "mixed_precision", PROCESSES, MACHINES, "fp8_config", "megatron_lm_config", "mpirun_config",
        "tpu_name", "tpu_zone", "command_file", "commands", "tpu_vm", "dynamo_config", "fp16", "dynamo_backend", RESHARD,
        STRATEGY,
    )),
    *(Option(fsdp(name)) for name in (
        "activation_checkpointing_offload", "backward_prefetch", "forward_prefetch", "min_num_params", "offload_params",
        "ignored_modules",
    )),
    *(Option(f"parallelism_config.parallelism_config_{name}") for name in (
        "cp_backend", "cp_comm_strategy", "dp_replicate_size", "sp_attn_implementation", "sp_backend", "sp_seq_length",
        "sp_seq_length_is_variable", "sp_size",
    )),
)  # fmt: skip
"""Every field of a file, of FSDP and of the mesh, and those of DeepSpeed that state a knob. Accelerate refuses other fields of
a file. What is of one type (FSDP, DeepSpeed) is written into files of this type only."""


def from_accelerate(content: Mapping[str, Any], source: str) -> Imported:
    """Read the file.

    Args:
        content: the parsed YAML.
        source: path of the file; the files that it names are in the same folder.

    Raises:
        RequestError: Accelerate does not accept a value, a value is outside its knob's domain, or a file that it names cannot
            be read.
    """
    path = Path(source)
    table = FlatTable(content, path.name)
    kind = str(table.take("distributed_type") or "NO").upper()
    ranks, machines = table.whole(PROCESSES), table.whole(MACHINES) or 1
    table.drop(*SETUP)
    if kind == "DEEPSPEED" and (name := table.take(FILE)) is not None:
        table.drop("mixed_precision")
        inner_path = named_file(path, str(name)) or path.parent / str(name)
        inner = from_deepspeed(read_table(inner_path), inner_path.name)
        _read_mesh(table)
        outer = table.imported(ranks=ranks)
        return dataclasses.replace(
            inner, ranks=ranks, notes=(*outer.notes, *inner.notes), settings=outer.settings, beside=inner,
            knobs={**inner.knobs, **outer.knobs}, keys={**inner.keys, **outer.keys},
        )  # fmt: skip
    table.set("precision", table.choice("mixed_precision", PRECISIONS), "mixed_precision")
    table.drop_tables("fp8_config.")
    match kind:
        case "DEEPSPEED":
            _read_deepspeed(table)
        case "FSDP":
            _read_fsdp(table, ranks, machines)
        case "MEGATRON_LM":
            _read_megatron(table)
        case _:
            table.set("zero_stage", 0, "distributed_type")
    _read_mesh(table)
    steps = table.whole("gradient_accumulation_steps") or table.whole("deepspeed_config.gradient_accumulation_steps")
    if steps is not None:
        table.notes.append(f"gradient_accumulation_steps={steps}: follows from the batches; give --global-batch-size")
    table.assumed |= {"micro_batch_size": 1, "activation_checkpointing": "none"}
    clip = table.quantity("deepspeed_config.gradient_clipping", megatron("gradient_clipping"))
    return table.imported(ranks=ranks, hyperparameters=Stated(clip=clip))


def _read_deepspeed(table: FlatTable) -> None:
    table.knob(ZERO_STAGE, "zero_stage")
    table.knobs.setdefault("zero_stage", 2)  # Accelerate's default
    table.knob("deepspeed_config.offload_optimizer_device", "offload_optimizer")
    table.knob(OFFLOAD_PARAM, "offload_param")
    as_deepspeed_does(table)
    reduces_as_it_computes(table)


def _read_fsdp(table: FlatTable, ranks: int | None, machines: int) -> None:
    reduces_as_it_computes(table)
    strategy, reshard = _strategy(table)
    stage = 3 if strategy is None else int(SHARDING[strategy])
    table.set("zero_stage", stage, "distributed_type" if strategy is None else STRATEGY)
    table.set("reshard_after_forward", False if strategy in HYBRID_ZERO2 else reshard, STRATEGY if strategy else RESHARD)
    if strategy in ("hybrid_shard", "4", *HYBRID_ZERO2) and ranks is not None and machines > 1:
        table.set("hsdp_shard_size", ranks // machines, STRATEGY)
    if table.switch(fsdp("offload_params")):
        _offload(table, stage)
    if table.switch(fsdp("activation_checkpointing")):
        table.set("activation_checkpointing", "full", fsdp("activation_checkpointing"))


def _strategy(table: FlatTable) -> tuple[str | None, bool | None]:
    """FSDP1's strategy, and the FSDP2 switch that replaces it.

    Raises:
        RequestError: Accelerate does not have this strategy.
    """
    strategy, reshard = table.take(STRATEGY), table.take(RESHARD)
    if isinstance(reshard, str) and switch_of(reshard) is None:
        strategy, reshard = strategy or reshard, None  # FSDP1 files may have the strategy under this key
    word = None if strategy is None else str(strategy).lower()
    if word is not None and word not in SHARDING:
        raise RequestError(STRATEGY, f"{strategy!r} in {table.source} is not known", f"use one of {', '.join(SHARDING)}")
    return word, switch_of(reshard)


def _offload(table: FlatTable, stage: int) -> None:
    """FSDP offloads parameters and optimizer state together; in trials below stage 3, parameters stay on the device."""
    if stage > 0:
        table.set("offload_optimizer", "cpu", fsdp("offload_params"))
    if stage == 3:
        table.set("offload_param", "cpu", fsdp("offload_params"))
    else:
        offload_note = "parameters stay on the device" if stage else "nothing is offloaded"
        table.notes.append(f"fsdp_config.fsdp_offload_params=true: at stage {stage} {offload_note} in trials")


def _read_megatron(table: FlatTable) -> None:
    table.knob(megatron("tp_degree"), "tensor_parallel_size")
    table.knob(megatron("pp_degree"), "pipeline_parallel_size")
    table.knob(megatron("expert_model_parallel_size"), "expert_parallel_size")
    table.set("sequence_parallel", table.switch(megatron("sequence_parallelism")), megatron("sequence_parallelism"))
    sharded = table.switch(megatron("use_distributed_optimizer"))
    table.set("zero_stage", 1 if sharded else 0, megatron("use_distributed_optimizer"))
    for key, knob, default in (("context_parallel_size", "context_parallel_size", 2),
                               ("recompute_granularity", "activation_checkpointing", "full")):  # fmt: skip
        table.knob(megatron(key), knob)
        if knob not in table.knobs:
            table.set(knob, default)
            table.notes.append(f"{megatron(key)}: not stated; the plug-in of Accelerate {CHECKED} takes {default}")


def _read_mesh(table: FlatTable) -> None:
    """Degrees of the mesh. Sequences are divided by keys and values (cp), or by heads, with DeepSpeed alone (sp)."""
    sizes = {name: table.whole(mesh(name)) or 1 for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    for name, knob in (("tp", "tensor_parallel_size"), ("cp", "context_parallel_size"), ("sp", "context_parallel_size")):
        if sizes[name] > 1:
            table.set(knob, sizes[name], mesh(name))
    if sizes["sp"] > 1:
        table.set("context_parallel_method", "ulysses", mesh("sp"))
        table.drop(*(f"parallelism_config.parallelism_config_sp_{name}" for name in ("backend", "seq_length_is_variable")))
    if sizes["dp_replicate"] > 1 and sizes["dp_shard"] * sizes["cp"] > 1 and table.knobs.get("zero_stage") == 3:
        table.set("hsdp_shard_size", sizes["dp_shard"] * sizes["cp"], mesh("dp_shard"))


FSDP = ExportTarget(
    format="accelerate-fsdp",
    name="an Accelerate file for FSDP",
    expressed=knobs_of(OPTIONS) - {"pipeline_parallel_size", "expert_parallel_size"} | ADAPTER_KNOBS | {
        "precision", "reshard_after_forward", "micro_batch_size", "reduce_dtype", "compile_blocks",
    },
    elsewhere={
        "sequence_parallel": "the model's own tensor-parallel plan decides it",
        "fused_optimizer": "make the optimizer with foreach=True",
        "context_parallel_method": "Accelerate exchanges heads with DeepSpeed alone: parallelism_config_sp_size in "
        "the place of parallelism_config_cp_size, and sp_backend deepspeed",
    },
    refused={name: OTHER_FORMATS[name] for name in ("pipeline_parallel_size", "expert_parallel_size")},
)  # fmt: skip
DDP = ExportTarget(
    format="accelerate-fsdp",
    name="an Accelerate file for data parallelism",
    expressed=frozenset({"zero_stage", "precision", "micro_batch_size", "compile_blocks", *ADAPTER_KNOBS}),
    elsewhere={
        "reduce_bucket_size": "give accelerate.DistributedDataParallelKwargs its bytes as bucket_cap_mb",
        "reduce_dtype": "give accelerate.DistributedDataParallelKwargs a comm_hook",
    },
)
DEEPSPEED = ExportTarget(
    format="accelerate-deepspeed",
    name="an Accelerate file for DeepSpeed",
    expressed=frozenset(),
    refused={**OTHER_FORMATS, "pipeline_parallel_size": "deepspeed, with its PipelineModule"},
)
DEEPSPEED_FILE = "ds_config.json"


def export_accelerate_fsdp(winner: Winner) -> Export:
    """Return the YAML for FSDP2, or for DistributedDataParallel at stage 0."""
    FSDP.require(winner.config)
    notes = remarks(winner, _fsdp_notes(winner), Checkpoints.DISTRIBUTED)
    content = _machines(winner, _kind(winner))
    if _sharded(winner.config):
        content |= _fsdp(winner)
    if winner.config.model_parallel_size > 1 or winner.shard_size < winner.zero_ranks:
        copies = replicas(winner, FSDP.format)
        degrees = {
            "dp_replicate": copies, "dp_shard": winner.data_parallel_size // copies,
            "tp": winner.config.tensor_parallel_size, "cp": winner.config.context_parallel_size,
        }  # fmt: skip
        content |= {mesh(name): degree for name, degree in degrees.items()}
    if winner.config.compile_blocks:
        content |= {"dynamo_config.dynamo_backend": "INDUCTOR", "dynamo_config.dynamo_use_regional_compilation": True}
    return Export(text=header(winner, "accelerate launch --config_file", notes) + yaml_text(nested(content)), notes=notes)


def export_accelerate_deepspeed(winner: Winner) -> Export:
    """Return the YAML that refers to the DeepSpeed configuration in the same folder."""
    DEEPSPEED.require(winner.config)
    beside = (
        f"the knobs are in {DEEPSPEED_FILE} beside this file: `autotune export --format deepspeed --out {DEEPSPEED_FILE}`",
        *(
            ["it has the optimizer too: give accelerator.prepare an accelerate.utils.DummyOptim"]
            if winner.hyperparameters.optimizer
            else []
        ),
        *_machine_notes(winner),
    )
    notes = remarks(winner, [*beside, *deepspeed_notes(winner)], Checkpoints.DEEPSPEED, DEEPSPEED_ENGINES)
    content = _machines(winner, "DEEPSPEED")
    # The DeepSpeed file states it, and Accelerate refuses a second statement.
    del content["mixed_precision"]
    content |= {FILE: DEEPSPEED_FILE, INIT_FLAG: winner.config.zero_stage == 3}
    if winner.nodes > 1:
        content["deepspeed_config.deepspeed_multinode_launcher"] = "standard"
    return Export(text=header(winner, "accelerate launch --config_file", notes) + yaml_text(nested(content)), notes=notes)


def _machines(winner: Winner, kind: str) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": winner.config.precision if winner.config.precision in ("bf16", "fp16", "fp8") else "no",
        MACHINES: winner.nodes,
        PROCESSES: winner.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not winner.on_gpus,
    }


def _machine_notes(winner: Winner) -> list[str]:
    if not winner.on_gpus and winner.world_size > 1:
        ranks = f"torchrun --nnodes={winner.nodes} --nproc-per-node={winner.ranks_per_node} train.py"
        start = f"start the ranks by `ACCELERATE_USE_CPU=true {ranks}`, with these settings in Accelerate's other variables"
        return [f"on CPUs `accelerate launch` starts one process: {start}"]
    if winner.nodes == 1:
        return []
    return [
        "give each machine its own --machine_rank, and all of them the first one's --main_process_ip and a --main_process_port"
    ]


def _sharded(config: TrialConfig) -> bool:
    """Whether parameters are DTensors: Accelerate combines tensor and context parallelism only with FSDP2."""
    return config.zero_stage > 0 or config.model_parallel_size > 1


def _kind(winner: Winner) -> str:
    if _sharded(winner.config):
        return "FSDP"
    return "MULTI_GPU" if winner.on_gpus else "MULTI_CPU"


def _fsdp(winner: Winner) -> dict[str, Any]:
    config = winner.config
    settings: dict[str, Any] = {
        VERSION: 2,
        RESHARD: config.zero_stage == 3 and config.reshard_after_forward,
        WRAP: "TRANSFORMER_BASED_WRAP",
        fsdp("activation_checkpointing"): config.activation_checkpointing != "none",
        fsdp("offload_params"): config.offload_param == "cpu",
        fsdp("cpu_ram_efficient_loading"): True,
        STATE_DICT: "SHARDED_STATE_DICT",
    }
    if (layer := DECODER_LAYERS.get(winner.shape.family if winner.shape else "")) is not None:
        settings[fsdp("transformer_layer_cls_to_wrap")] = layer
    return settings


def _fsdp_notes(winner: Winner) -> list[str]:
    config = winner.config
    notes = peft_notes(winner) + fsdp2_notes(config, "fsdp_reshard_after_forward: false")
    if _sharded(config):
        plugin = "give a FullyShardedDataParallelPlugin with a MixedPrecisionPolicy of this reduce_dtype"
        notes += reduction_note(config, "Accelerate", plugin)
    notes += _machine_notes(winner)
    if config.zero_stage == 0 and _sharded(config):
        notes.append("zero_stage=0: Accelerate composes other dimensions with FSDP2 alone, so that states are sharded")
    notes.append(
        f"micro_batch_size={config.micro_batch_size}: give the DataLoader this batch_size, and "
        f"Accelerator(gradient_accumulation_steps={winner.gradient_accumulation_steps})"
    )
    notes += unplaced_notes(winner, "it belongs to the optimizer that your program makes", "lr", "weight_decay", "optimizer")
    notes += unplaced_notes(winner, "call accelerator.clip_grad_norm_ with it", "clip")
    if config.activation_checkpointing == "selective":
        notes.append("activation_checkpointing=selective: Accelerate knows full alone, which is switched on")
    if config.precision == "fp8":
        notes.append("precision=fp8: add an fp8_config whose backend is AO (torchao) or TE (Transformer Engine)")
    if config.precision == "fp64":
        notes.append("precision=fp64: cast the model to double before it is handed over")
    if _sharded(config) and not winner.on_gpus:
        notes.append("measured on CPUs: Accelerate runs FSDP on accelerators alone")
    if _sharded(config) and (winner.shape is None or winner.shape.family not in DECODER_LAYERS):
        notes.append("fsdp_transformer_layer_cls_to_wrap is left out: name your model's layer class, or set _no_split_modules")
    return notes + (FSDP if _sharded(config) else DDP).unexpressed(config)
