"""What Accelerate does with the settings of its file (checked with 16cb6eb8 and 1.15.0)."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from autotune.frameworks.accelerate import ACCELERATE_FORMAT, from_accelerate
from autotune.frameworks.framework import Check, Framework, LintCase, Settings, unknown
from autotune.frameworks.imported import Imported, read_table
from search_spaces.finding import Effect, Finding
from search_spaces.knob import Value

FIELDS = frozenset({
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "main_training_function",
    "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config",
    "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands",
    "tpu_vm", "tpu_env", "dynamo_config", "fp16", "dynamo_backend",
})  # fmt: skip
"""Top-level fields; Accelerate refuses others."""
FSDP_FIELDS = frozenset(f"fsdp_{name}" for name in (
    "activation_checkpointing", "activation_checkpointing_offload", "auto_wrap_policy", "backward_prefetch",
    "cpu_ram_efficient_loading", "forward_prefetch", "min_num_params", "offload_params", "reshard_after_forward",
    "sharding_strategy", "state_dict_type", "sync_module_states", "transformer_layer_cls_to_wrap", "use_orig_params", "version",
    "ignored_modules",
))  # fmt: skip
MESH_FIELDS = frozenset(f"parallelism_config_{name}" for name in (
    "cp_backend", "cp_comm_strategy", "cp_size", "dp_replicate_size", "dp_shard_size", "sp_attn_implementation", "sp_backend",
    "sp_seq_length", "sp_seq_length_is_variable", "sp_size", "tp_size",
))  # fmt: skip
OF_VERSION_1 = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "sharding_strategy")
"""Settings that FSDP2 does not have."""
WITH_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""Settings that Accelerate refuses beside a DeepSpeed file."""
PRECISIONS = ("no", "fp16", "bf16", "fp8", "none", "false")
VERSION, RESHARD = "fsdp_config.fsdp_version", "fsdp_config.fsdp_reshard_after_forward"
STATE_DICT, WRAP = "fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_auto_wrap_policy"
FILE = "deepspeed_config.deepspeed_config_file"
PROCESSES, MACHINES = "num_processes", "num_machines"
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def mesh(name: str) -> str:
    """The setting of a degree of the mesh."""
    return f"parallelism_config.parallelism_config_{name}_size"


def _degree(case: LintCase, name: str) -> int:
    value = case.get(mesh(name), 1)
    return value if isinstance(value, int) else 1


def _has_mesh(case: LintCase) -> bool:
    return any(_degree(case, name) > 1 for name in DEGREES)


def _kind(case: LintCase) -> str:
    return str(case.get("distributed_type", "")).upper()


def _version(case: LintCase) -> int:
    return 2 if str(case.get(VERSION, "1")) == "2" else 1


def _fsdp(case: LintCase, version: int) -> bool:
    return _kind(case) == "FSDP" and _version(case) == version


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    tables: Mapping[str, frozenset[str]] = {"fsdp_config": FSDP_FIELDS, "parallelism_config": MESH_FIELDS}
    inner = FILE in case.imported.settings
    for key in case.imported.settings:
        table, _, name = key.partition(".")
        if table not in FIELDS:
            if not inner:  # else it is the DeepSpeed file's
                yield unknown(case, key if not name else table, FIELDS, Effect.REFUSED)
        elif table in tables and name:
            spelled = name if name.startswith("fsdp_") or table != "fsdp_config" else f"fsdp_{name}"
            if spelled not in tables[table]:
                yield unknown(case, key, [f"{table}.{field}" for field in tables[table]], Effect.IGNORED)


def _product(case: LintCase) -> str | None:
    product, ranks = math.prod(_degree(case, name) for name in DEGREES), case.get(PROCESSES)
    if not _has_mesh(case) or not isinstance(ranks, int) or _degree(case, "sp") > 1 or product == ranks:
        return None
    return f"the degrees of the mesh multiply to {product}, and there are {ranks} processes"


def _product_fix(case: LintCase) -> Settings:
    ranks = case.get(PROCESSES)
    other_degrees = math.prod(_degree(case, name) for name in DEGREES if name != "dp_shard")
    return (
        {mesh("dp_shard"): ranks // other_degrees}
        if ranks % other_degrees == 0
        else {PROCESSES: other_degrees * _degree(case, "dp_shard")}
    )


def _machines(case: LintCase) -> str | None:
    ranks, machines = case.get(PROCESSES), case.get(MACHINES, 1)
    if not isinstance(ranks, int) or not isinstance(machines, int) or machines < 1 or ranks % machines == 0:
        return None
    return f"{ranks} processes are not the same number on each of {machines} machines"


def _beside_file(case: LintCase) -> list[str]:
    stated_keys = [f"deepspeed_config.{name}" for name in WITH_FILE if f"deepspeed_config.{name}" in case.imported.settings]
    if "mixed_precision" in case.imported.settings and str(case.get("mixed_precision")).lower() != "no":
        stated_keys.append("mixed_precision")
    return stated_keys if _kind(case) == "DEEPSPEED" and case.get(FILE) else []


def _reshard_word(case: LintCase) -> bool:
    return str(case.get(RESHARD, "true")).lower() not in ("true", "false", "1", "0", "yes", "no")


def _of_version_1(name: str) -> Check:
    key = f"fsdp_config.fsdp_{name}"
    return Check(
        name=f"version-1-{name.replace('_', '-')}",
        key=key,
        effect=Effect.IGNORED,
        problem=lambda case: "FSDP2 has no such setting" if _fsdp(case, 2) and key in case.imported.settings else None,
        fix=lambda _: {key: None},
        remedy="leave it out",
    )


CHECKS = (
    Check(
        name="no-type", key="distributed_type", effect=Effect.REFUSED, remedy="state distributed_type",
        problem=lambda case: None if case.get("distributed_type") else "the file does not state it",
    ),
    Check(
        name="no-processes", key=PROCESSES, effect=Effect.REFUSED, remedy="state the processes of all machines together",
        problem=lambda case: (
            "the number of processes is not stated"
            if _kind(case) not in ("", "NO") and case.get(PROCESSES, -1) == -1 and case.around.ranks is None else None
        ),
    ),
    Check(
        name="processes-a-machine", key=PROCESSES, effect=Effect.FAILS, problem=_machines,
        fix=lambda case: {PROCESSES: max(case.get(PROCESSES) // case.get(MACHINES), 1) * case.get(MACHINES)},
        remedy="give a multiple of the machines",
    ),
    Check(
        name="precision", key="mixed_precision", effect=Effect.REFUSED, remedy=f"use one of {', '.join(PRECISIONS[:4])}",
        problem=lambda case: (
            f"{case.get('mixed_precision')!r} is not known" if str(case.get("mixed_precision", "no")).lower() not in PRECISIONS
            else None
        ),
    ),
    Check(
        name="mesh-product", key=mesh("dp_shard"), effect=Effect.REFUSED, problem=_product, fix=_product_fix,
        remedy="give degrees whose product is the processes",
    ),
    Check(
        name="mesh-needs-fsdp2", key=VERSION, effect=Effect.REFUSED,
        problem=lambda case: "a mesh of several degrees works with FSDP2 only" if _fsdp(case, 1) and _has_mesh(case) else None,
        fix=lambda case: {VERSION: 2, **{f"fsdp_config.fsdp_{name}": None for name in OF_VERSION_1
                                         if f"fsdp_config.fsdp_{name}" in case.imported.settings}},
        remedy="set the version to 2",
    ),
    Check(
        name="two-sequence-degrees", key=mesh("sp"), effect=Effect.REFUSED, fix=lambda _: {mesh("sp"): 1},
        problem=lambda case: (
            "context and sequence parallelism exclude each other"
            if min(_degree(case, "cp"), _degree(case, "sp")) > 1
            else None
        ),
        remedy="use one of them",
    ),
    Check(
        name="replicas-of-a-mesh", key=mesh("dp_replicate"), effect=Effect.REFUSED,
        problem=lambda case: (
            "tensor and context parallelism work with sharded replicas only"
            if max(_degree(case, "tp"), _degree(case, "cp")) > 1 and _degree(case, "dp_replicate") > 1
            and _degree(case, "dp_shard") == 1 else None
        ),
        fix=lambda case: {mesh("dp_replicate"): 1, mesh("dp_shard"): _degree(case, "dp_replicate")},
        remedy="shard instead of replicating",
    ),
    Check(
        name="reshard-word", key=RESHARD, effect=Effect.REFUSED, remedy="give true or false",
        problem=lambda case: (
            f"FSDP2 takes true or false, not {case.get(RESHARD)}" if _fsdp(case, 2) and _reshard_word(case) else None
        ),
        fix=lambda case: {RESHARD: str(case.get(RESHARD)).upper() in ("FULL_SHARD", "HYBRID_SHARD", "1", "4")},
    ),
    Check(
        name="reshard-in-version-1", key=RESHARD, effect=Effect.IGNORED, remedy="set the version to 2",
        problem=lambda case: (
            "FSDP1 goes by fsdp_sharding_strategy" if _fsdp(case, 1) and RESHARD in case.imported.settings
            and not _reshard_word(case) and not _has_mesh(case) else None
        ),
        fix=lambda _: {VERSION: 2},
    ),
    Check(
        name="local-state-dict", key=STATE_DICT, effect=Effect.REFUSED, fix=lambda _: {STATE_DICT: "SHARDED_STATE_DICT"},
        problem=lambda case: (
            "FSDP2 has no local state dict"
            if _fsdp(case, 2) and str(case.get(STATE_DICT)).upper() == "LOCAL_STATE_DICT"
            else None
        ),
        remedy="use SHARDED_STATE_DICT",
    ),
    Check(
        name="wrap-policy", key=WRAP, effect=Effect.REFUSED, fix=lambda _: {WRAP: "TRANSFORMER_BASED_WRAP"},
        problem=lambda case: (
            f"{case.get(WRAP)!r} is not one of {', '.join(WRAPS)}"
            if _kind(case) == "FSDP" and case.get(WRAP) is not None and str(case.get(WRAP)).upper() not in WRAPS else None
        ),
        remedy="use TRANSFORMER_BASED_WRAP",
    ),
    Check(
        name="whole-model-wrapped", key=WRAP, effect=Effect.CHANGED, fix=lambda _: {WRAP: "TRANSFORMER_BASED_WRAP"},
        problem=lambda case: (
            "without a wrap policy the whole model is gathered at once"
            if _kind(case) == "FSDP" and str(case.get(WRAP, "NO_WRAP")).upper() == "NO_WRAP" else None
        ),
        remedy="use TRANSFORMER_BASED_WRAP",
    ),
    Check(
        name="settings-beside-a-file", key=FILE, effect=Effect.REFUSED,
        problem=lambda case: f"beside a DeepSpeed file {_beside_file(case)[0]} is refused" if _beside_file(case) else None,
        fix=lambda case: dict.fromkeys(_beside_file(case)), remedy="state them in the DeepSpeed file",
    ),
    Check(
        name="init-flag-stage", key="deepspeed_config.zero3_init_flag", effect=Effect.IGNORED,
        problem=lambda case: (
            "only stage 3 initialises divided parameters"
            if case.on("deepspeed_config.zero3_init_flag") and _kind(case) == "DEEPSPEED" and not case.get(FILE)
            and case.config.zero_stage < 3 else None
        ),
        fix=lambda _: {"deepspeed_config.zero3_init_flag": False}, remedy="set it to false",
    ),
    Check(
        name="offload-param-stage", key="deepspeed_config.offload_param_device", effect=Effect.IGNORED,
        problem=lambda case: (
            "only stage 3 offloads parameters"
            if str(case.get("deepspeed_config.offload_param_device", "none")).lower() != "none" and not case.get(FILE)
            and case.config.zero_stage < 3 else None
        ),
        fix=lambda _: {"deepspeed_config.offload_param_device": "none"}, remedy="set it to none",
    ),
    *map(_of_version_1, OF_VERSION_1),
)  # fmt: skip
"""What ClusterConfig, ParallelismConfig, FullyShardedDataParallelPlugin and DeepSpeedPlugin check or leave unread."""
KEYS: Mapping[str, str] = {
    "tensor_parallel_size": mesh("tp"), "context_parallel_size": mesh("cp"), "hsdp_shard_size": mesh("dp_shard"),
    "activation_checkpointing": "fsdp_config.fsdp_activation_checkpointing", "zero_stage": "deepspeed_config.zero_stage",
    "offload_optimizer": "deepspeed_config.offload_optimizer_device", "offload_param": "deepspeed_config.offload_param_device",
}  # fmt: skip


def _write(case: LintCase, knob: str, value: Value) -> Settings:
    fsdp = _kind(case) == "FSDP"
    match knob:
        case "tensor_parallel_size" | "context_parallel_size" if fsdp and _version(case) == 2 and _has_mesh(case):
            key, other = KEYS[knob], {name: _degree(case, name) for name in DEGREES}
            ranks = math.prod(other.values())
            other["tp" if knob.startswith("tensor") else "cp"] = int(value)
            other_degrees = math.prod(count for name, count in other.items() if name != "dp_shard")
            return {key: value, mesh("dp_shard"): ranks // other_degrees} if ranks % other_degrees == 0 else {}
        case "activation_checkpointing" if fsdp and value in ("none", "full"):
            return {KEYS[knob]: value == "full"}
        case "offload_optimizer" if fsdp and value == "cpu":
            return {"fsdp_config.fsdp_offload_params": True}
        case "zero_stage" if _kind(case) == "MULTI_GPU" and value == 3:
            return {"distributed_type": "FSDP", VERSION: 2, WRAP: "TRANSFORMER_BASED_WRAP"}
        case "zero_stage" | "offload_optimizer" if _kind(case) == "DEEPSPEED" and not case.get(FILE):
            return {KEYS[knob]: value}
        case _:
            return {}


def _read(settings: Settings, source: str) -> Imported:
    return from_accelerate(settings, Path(source), read_table)


ACCELERATE = Framework(
    name=ACCELERATE_FORMAT, title="Accelerate", checked="1.15.0", read=_read, checks=CHECKS, keys=KEYS, write=_write,
    undeclared_findings=_unknown_fields,
    rules=frozenset({"world-divides", "tensor-divides", "sequence-divides", "pipeline-layers"}),
)  # fmt: skip
