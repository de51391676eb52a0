"""What Accelerate does with the settings of its file (checked with 16cb6eb8 and 1.15.0)."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from autotune.errors import RequestError
from autotune.frameworks.accelerate import (
    CHECKED,
    FILE,
    INIT_FLAG,
    MACHINES,
    OFFLOAD_PARAM,
    OPTIONS,
    PROCESSES,
    RESHARD,
    SHARDING,
    STATE_DICT,
    STRATEGY,
    VERSION,
    WRAP,
    ZERO_STAGE,
    from_accelerate,
    fsdp,
    megatron,
    mesh,
)
from autotune.frameworks.deepspeed_checks import findings, version_of
from autotune.frameworks.deepspeed_sections import finding_of
from autotune.frameworks.framework import Check, Framework, LintCase, Settings, unknown
from autotune.frameworks.imported import SWITCHES, Imported, flat, named_file, nested, switch_of
from search_spaces.errors import Effect, Finding
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

KNOWN = {option.key for option in OPTIONS}
OF_VERSION_1 = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "sharding_strategy")
"""Settings that FSDP2 does not have."""
WITH_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model", "mixed_precision",
)  # fmt: skip
"""Settings that Accelerate refuses beside a DeepSpeed file."""
SAGEMAKER = "AMAZON_SAGEMAKER"
LOCAL_FIELDS = frozenset({
    "num_processes", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network", "fp8_config",
    "main_training_function", "deepspeed_config", "fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config",
    "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env",
})  # fmt: skip
"""Fields that a file for SageMaker does not have."""
RAM_EFFICIENT, SYNC = fsdp("cpu_ram_efficient_loading"), fsdp("sync_module_states")
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def _degree(case: LintCase, name: str) -> int:
    value = case.get(mesh(name), 1)
    return value if isinstance(value, int) else 1


def _has_mesh(case: LintCase) -> bool:
    return any(_degree(case, name) > 1 for name in DEGREES)


def _kind(case: LintCase) -> str:
    return str(case.get("distributed_type", "")).upper()


def _is_fsdp(case: LintCase, version: int) -> bool:
    return _kind(case) == "FSDP" and version == (2 if str(case.get(VERSION, "1")) == "2" else 1)


def _without_file(case: LintCase) -> bool:
    return _kind(case) == "DEEPSPEED" and not case.get(FILE)


WORDS: tuple[tuple[str, str, Collection[str], Callable[[LintCase], bool]], ...] = (
    ("environment", "compute_environment", ("LOCAL_MACHINE", SAGEMAKER), lambda _: True),
    ("type", "distributed_type", (
        "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
        "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM",
    ), lambda case: case.get("compute_environment") != SAGEMAKER),
    ("precision", "mixed_precision", ("no", "fp16", "bf16", "fp8"), lambda _: True),
    ("version", VERSION, ("1", "2"), lambda case: _kind(case) == "FSDP"),
    ("strategy", STRATEGY, tuple(SHARDING), lambda case: _is_fsdp(case, 1)),
    ("prefetch", fsdp("backward_prefetch"), ("backward_pre", "backward_post", "no_prefetch", "1", "2"),
     lambda case: _kind(case) == "FSDP"),
    ("state-dict", STATE_DICT, ("full_state_dict", "local_state_dict", "sharded_state_dict", "1", "2", "3"),
     lambda case: _kind(case) == "FSDP"),
    *(("switch", fsdp(name), SWITCHES, lambda case: _kind(case) == "FSDP") for name in (
        "offload_params", "activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading",
    )),
    *(("switch", fsdp(name), SWITCHES, lambda case: _is_fsdp(case, 1)) for name in (
        "use_orig_params", "sync_module_states", "forward_prefetch",
    )),
    *(("switch", megatron(name), SWITCHES, lambda case: _kind(case) == "MEGATRON_LM") for name in (
        "use_distributed_optimizer", "sequence_parallelism", "recompute_activations", "optimizer_cpu_offload",
        "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer", "attention_softmax_in_fp32",
    )),
    ("switch", INIT_FLAG, SWITCHES, lambda case: _kind(case) == "DEEPSPEED"),
    ("stage", ZERO_STAGE, ("0", "1", "2", "3"), _without_file),
    ("device", "deepspeed_config.offload_optimizer_device", ("none", "cpu", "nvme"), _without_file),
    ("device", OFFLOAD_PARAM, ("none", "cpu", "nvme"), _without_file),
    ("dynamo", "dynamo_config.dynamo_backend", (
        "no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt",
        "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm", "hpu_backend", "neuron",
    ), lambda case: _kind(case) != "DEEPSPEED"),
    ("backend", "parallelism_config.parallelism_config_cp_backend", ("torch",), lambda _: True),
    ("backend", "parallelism_config.parallelism_config_sp_backend", ("deepspeed",), lambda _: True),
)  # fmt: skip
"""Rule, setting, the words that it takes (in any case, if they are in lower case here), and when it is read."""
COUNTS: tuple[tuple[str, Callable[[LintCase], bool]], ...] = (
    *((mesh(name), lambda _: True) for name in DEGREES),
    *((megatron(name), lambda case: _kind(case) == "MEGATRON_LM") for name in ("tp_degree", "pp_degree", "num_micro_batches")),
    (PROCESSES, lambda case: case.get(PROCESSES) != -1),
    ("deepspeed_config.gradient_accumulation_steps", _without_file),
)
"""Settings that are read as whole numbers, and when they are."""


def _findings(case: LintCase) -> Iterator[Finding]:
    """What is not declared one by one: words, fields that Accelerate does not have, and the DeepSpeed file."""
    null_counts_as_unstated = (
        "distributed_type",
        "mixed_precision",
        STATE_DICT,
        fsdp("backward_prefetch"),
        INIT_FLAG,
        ZERO_STAGE,
    )
    for rule, key, words, holds in WORDS:
        value = case.imported.settings.get(key, "")
        unstated = value is None and key in null_counts_as_unstated
        if key not in case.imported.settings or unstated or not holds(case) or (rule == "type" and not isinstance(value, str)):
            continue
        text = str(value).lower() if next(iter(words)).islower() else str(value)
        if value is False and key == "mixed_precision":  # YAML's reading of no
            yield finding_of(rule, key, "YAML reads no as false, which Accelerate does not take", "write 'no' in quotes")
        elif text not in words:
            remedy = f"use {'true or false' if words is SWITCHES else 'one of ' + ', '.join(words)}"
            if rule == "environment":
                remedy += "; num_machines states several machines"
            yield finding_of(rule, key, f"{value!r} is not known", remedy)
    for key, holds in COUNTS:
        value = case.imported.settings.get(key)
        if value not in (None, "auto") and holds(case) and not re.fullmatch(r"[1-9]\d*", str(value)):
            remedy = "give a whole number of at least 1"
            yield finding_of("whole-number", key, f"{value!r} is not a whole number of at least 1", remedy)
    yield from _unknown_fields(case)
    if case.imported.beside is not None:
        yield from _deepspeed_file(case, case.imported.beside)


def _deepspeed_file(case: LintCase, inner: Imported) -> Iterator[Finding]:
    name, config = str(case.get(FILE)), nested(inner.settings)
    if "zero_optimization" not in config:
        problem, remedy = f"{name} has no zero_optimization, which Accelerate asks for", "name a stage there"
        yield finding_of("file-without-zero", FILE, problem, remedy)
    try:
        json.loads((named_file(Path(case.source), name) or Path(name)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        problem = f"{name} has comments or other marks, and Accelerate reads plain JSON"
        yield finding_of("plain-json", FILE, problem, "write it as plain JSON")
    for finding in findings(config, version_of(""), case.ranks):
        if finding.rule != "batch-missing":  # the program's own batch is filled in
            yield replace(finding, key=f"{name}:{finding.key}")


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    tables = {key.partition(".")[0] for key in KNOWN}
    sagemaker = case.get("compute_environment") == SAGEMAKER
    reported = set()
    # Tables whose settings are all in `OPTIONS`. Accelerate copies others of them, and never reads the copies.
    read_tables = ("fsdp_config", "parallelism_config", "deepspeed_config", "megatron_lm_config")
    for key in case.imported.settings:
        table, _, name = key.partition(".")
        if sagemaker:
            if table in LOCAL_FIELDS and table not in reported:
                reported.add(table)
                yield finding_of("sagemaker-field", table, "a file for SageMaker has no such field", f"leave {table} out")
        elif table not in tables and table not in reported:
            reported.add(table)
            yield unknown(case, table, tables, Effect.REFUSED)
        elif name and table in read_tables and not KNOWN & {key, f"{table}.fsdp_{name}"}:
            finding = unknown(case, key, [known for known in KNOWN if known.startswith(f"{table}.")], Effect.IGNORED)
            if table == "deepspeed_config" and not finding.remedy.startswith("did you mean"):
                problem, remedy = "Accelerate never reads it here", "state it in a file that deepspeed_config_file names"
                finding = replace(finding, problem=problem, remedy=remedy)
            yield finding


def _product(case: LintCase) -> str | None:
    product, ranks = math.prod(_degree(case, name) for name in DEGREES), case.get(PROCESSES)
    if not _has_mesh(case) or not isinstance(ranks, int) or _degree(case, "sp") > 1 or product == ranks:
        return None
    return f"the degrees of the mesh multiply to {product}, and there are {ranks} processes"


def _unsharded(case: LintCase) -> str | None:
    replicates = max(_degree(case, "tp"), _degree(case, "cp")) > 1 < _degree(case, "dp_replicate")  # has a check of its own
    if not _has_mesh(case) or not _is_fsdp(case, 2) or replicates or max(_degree(case, "dp_shard"), _degree(case, "cp")) > 1:
        return None
    return "FSDP2 has no ranks to shard over: dp_shard and cp are 1"


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
    if case.get("mixed_precision") is not None:
        stated_keys.append("mixed_precision")
    return stated_keys if _kind(case) == "DEEPSPEED" and case.get(FILE) else []


def _reshard_word(case: LintCase) -> bool:
    return switch_of(case.imported.settings.get(RESHARD, True)) is None


def _of_version_1(name: str) -> Check:
    key = fsdp(name)
    return Check(
        name=f"version-1-{name.replace('_', '-')}", key=key, effect=Effect.IGNORED, problem="FSDP2 has no such setting",
        holds=lambda case: _is_fsdp(case, 2) and key in case.imported.settings, fix={key: None}, remedy="leave it out",
    )  # fmt: skip


CHECKS = (
    Check(
        name="no-type", key="distributed_type", effect=Effect.REFUSED, problem="the file does not state it",
        holds=lambda case: "distributed_type" not in case.imported.settings, remedy="state distributed_type",
    ),
    Check(
        name="no-processes", key=PROCESSES, effect=Effect.REFUSED, problem="the number of processes is not stated",
        holds=lambda case: _kind(case) not in ("", "NO") and case.get(PROCESSES, -1) == -1 and case.around.ranks is None,
        remedy="state the processes of all machines together",
    ),
    Check(
        name="processes-a-machine", key=PROCESSES, effect=Effect.FAILS, problem=_machines,
        fix=lambda case: {PROCESSES: max(case.get(PROCESSES) // case.get(MACHINES), 1) * case.get(MACHINES)},
        remedy="give a multiple of the machines",
    ),
    Check(
        name="machines-number", key=MACHINES, effect=Effect.REFUSED, remedy="give a whole number of at least 1",
        problem=lambda case: f"{case.imported.settings[MACHINES]!r} is not a number",
        holds=lambda case: not isinstance(case.imported.settings.get(MACHINES, 1), int | float),
    ),
    Check(
        name="gpu-text", key="gpu_ids", effect=Effect.REFUSED, remedy="write it in quotes",
        problem=lambda case: f"{case.get('gpu_ids')!r} is not a text",
        holds=lambda case: not isinstance(case.get("gpu_ids", ""), str),
    ),
    Check(
        name="one-gpu", key="gpu_ids", effect=Effect.REFUSED, remedy="use all",
        problem="several processes need two GPUs or more",
        holds=lambda case: _kind(case) == "MULTI_GPU" and case.get(MACHINES, 1) == 1 and case.get("gpu_ids", "all") != "all"
        and "," not in str(case.get("gpu_ids")),
    ),
    Check(
        name="table-of-deepspeed", key="deepspeed_config", effect=Effect.REFUSED, remedy="write its settings",
        problem="it is not a table", holds=lambda case: _kind(case) == "DEEPSPEED" and case.get("deepspeed_config", {}) != {},
    ),
    Check(
        name="loading-needs-sync", key=RAM_EFFICIENT, effect=Effect.REFUSED, fix={SYNC: True},
        problem="loading on one rank, which is the default, needs fsdp_sync_module_states",
        holds=lambda case: _kind(case) == "FSDP" and bool(case.imported.settings.get(RAM_EFFICIENT, True))
        and not case.imported.settings.get(SYNC, True), remedy="set fsdp_sync_module_states to true",
    ),
    Check(
        name="offloaded-inputs", key=fsdp("activation_checkpointing_offload"), effect=Effect.REFUSED,
        problem="it needs fsdp_activation_checkpointing, and FSDP2", remedy="leave it out",
        holds=lambda case: case.on(fsdp("activation_checkpointing_offload"))
        and not (_is_fsdp(case, 2) and case.on(fsdp("activation_checkpointing"))),
    ),
    Check(
        name="mesh-without-shards", key=mesh("dp_shard"), effect=Effect.REFUSED, problem=_unsharded,
        remedy="give dp_shard or cp ranks",
    ),
    Check(
        name="recompute-activations", key=megatron("recompute_activations"), effect=Effect.IGNORED,
        problem=f"Accelerate {CHECKED} never hands it to Megatron-LM, and recomputes by recompute_granularity (full)",
        holds=lambda case: megatron("recompute_activations") in case.imported.settings,
        remedy="set megatron_lm_recompute_granularity",
    ),
    Check(
        name="mesh-product", key=mesh("dp_shard"), effect=Effect.REFUSED, problem=_product, fix=_product_fix,
        remedy="give degrees whose product is the processes",
    ),
    Check(
        name="mesh-needs-fsdp2", key=VERSION, effect=Effect.REFUSED, problem="a mesh of several degrees works with FSDP2 only",
        holds=lambda case: _is_fsdp(case, 1) and _has_mesh(case),
        fix=lambda case: {VERSION: 2, **{key: None for key in map(fsdp, OF_VERSION_1) if key in case.imported.settings}},
        remedy="set the version to 2",
    ),
    Check(
        name="two-sequence-degrees", key=mesh("sp"), effect=Effect.REFUSED, fix={mesh("sp"): 1},
        problem="context and sequence parallelism exclude each other",
        holds=lambda case: min(_degree(case, "cp"), _degree(case, "sp")) > 1, remedy="use one of them",
    ),
    Check(
        name="replicas-of-a-mesh", key=mesh("dp_replicate"), effect=Effect.REFUSED,
        problem="tensor and context parallelism work with sharded replicas only",
        holds=lambda case: max(_degree(case, "tp"), _degree(case, "cp")) > 1 and _degree(case, "dp_replicate") > 1
        and _degree(case, "dp_shard") == 1,
        fix=lambda case: {mesh("dp_replicate"): 1, mesh("dp_shard"): _degree(case, "dp_replicate")},
        remedy="shard instead of replicating",
    ),
    Check(
        name="reshard-word", key=RESHARD, effect=Effect.REFUSED, remedy="give true or false",
        problem=lambda case: f"FSDP2 takes true or false, not {case.get(RESHARD)}",
        holds=lambda case: _is_fsdp(case, 2) and _reshard_word(case),
        fix=lambda case: {RESHARD: str(case.get(RESHARD)).upper() in ("FULL_SHARD", "HYBRID_SHARD", "1", "4")},
    ),
    Check(
        name="reshard-in-version-1", key=RESHARD, effect=Effect.IGNORED, problem="FSDP1 goes by fsdp_sharding_strategy",
        holds=lambda case: _is_fsdp(case, 1) and RESHARD in case.imported.settings and not _reshard_word(case)
        and not _has_mesh(case), fix={VERSION: 2}, remedy="set the version to 2",
    ),
    Check(
        name="local-state-dict", key=STATE_DICT, effect=Effect.REFUSED, fix={STATE_DICT: "SHARDED_STATE_DICT"},
        problem="FSDP2 has no local state dict", remedy="use SHARDED_STATE_DICT",
        holds=lambda case: _is_fsdp(case, 2) and str(case.get(STATE_DICT)).upper() == "LOCAL_STATE_DICT",
    ),
    Check(
        name="wrap-policy", key=WRAP, effect=Effect.REFUSED, fix={WRAP: "TRANSFORMER_BASED_WRAP"},
        problem=lambda case: f"{case.get(WRAP)!r} is not one of {', '.join(WRAPS)}",
        holds=lambda case: _kind(case) == "FSDP" and case.get(WRAP) is not None and str(case.get(WRAP)).upper() not in WRAPS,
        remedy="use TRANSFORMER_BASED_WRAP",
    ),
    Check(
        name="whole-model-wrapped", key=WRAP, effect=Effect.CHANGED, fix={WRAP: "TRANSFORMER_BASED_WRAP"},
        problem="without a wrap policy the whole model is gathered at once",
        holds=lambda case: _kind(case) == "FSDP" and str(case.get(WRAP, "NO_WRAP")).upper() == "NO_WRAP",
        remedy="use TRANSFORMER_BASED_WRAP",
    ),
    Check(
        name="settings-beside-a-file", key=FILE, effect=Effect.REFUSED, holds=_beside_file,
        problem=lambda case: f"beside a DeepSpeed file {_beside_file(case)[0]} is refused",
        fix=lambda case: dict.fromkeys(_beside_file(case)), remedy="state them in the DeepSpeed file",
    ),
    Check(
        name="machines-without-hosts", key="deepspeed_config.deepspeed_multinode_launcher", effect=Effect.CHANGED,
        problem="without a deepspeed_hostfile only the first machine trains",
        holds=lambda case: _kind(case) == "DEEPSPEED" and isinstance(case.get(MACHINES), int) and case.get(MACHINES) > 1
        and case.get("deepspeed_config.deepspeed_multinode_launcher") != "standard"
        and case.get("deepspeed_config.deepspeed_hostfile") is None,
        fix={"deepspeed_config.deepspeed_multinode_launcher": "standard"}, remedy="use standard, which each machine starts",
    ),
    Check(
        name="init-flag-stage", key=INIT_FLAG, effect=Effect.IGNORED, problem="only stage 3 initialises divided parameters",
        holds=lambda case: case.on(INIT_FLAG) and _kind(case) == "DEEPSPEED" and not case.get(FILE)
        and case.config.zero_stage < 3, fix={INIT_FLAG: False}, remedy="set it to false",
    ),
    Check(
        name="offload-param-stage", key=OFFLOAD_PARAM, effect=Effect.IGNORED,
        problem="only stage 3 offloads parameters",
        holds=lambda case: str(case.get(OFFLOAD_PARAM, "none")).lower() != "none"
        and not case.get(FILE) and case.config.zero_stage < 3,
        fix={OFFLOAD_PARAM: "none"}, remedy="set it to none",
    ),
    *map(_of_version_1, OF_VERSION_1),
)  # fmt: skip
"""What ClusterConfig, ParallelismConfig, FullyShardedDataParallelPlugin and DeepSpeedPlugin check or leave unread."""


def _rewrite(case: LintCase, knob: str, value: Value) -> Settings | None:
    is_fsdp = _kind(case) == "FSDP"
    match knob:
        case "tensor_parallel_size" | "context_parallel_size" if _is_fsdp(case, 2) and _has_mesh(case):
            name, degrees = "tp" if knob.startswith("tensor") else "cp", {name: _degree(case, name) for name in DEGREES}
            ranks = math.prod(degrees.values())
            other_degrees = math.prod({**degrees, name: int(value), "dp_shard": 1}.values())
            return {mesh(name): value, mesh("dp_shard"): ranks // other_degrees} if ranks % other_degrees == 0 else {}
        case "activation_checkpointing" if is_fsdp:
            return None
        case "offload_optimizer" if is_fsdp and value == "cpu":
            return {fsdp("offload_params"): True}
        case "zero_stage" if _kind(case) in ("MULTI_GPU", "NO") and value == 3 and (case.ranks or 1) > 1:
            processes = {PROCESSES: case.ranks} if case.get(PROCESSES) in (None, 1) else {}
            return {"distributed_type": "FSDP", VERSION: 2, WRAP: "TRANSFORMER_BASED_WRAP", **processes}
        case "zero_stage" | "offload_optimizer" if _kind(case) == "DEEPSPEED" and not case.get(FILE):
            return None
        case _:
            return {}


def _sizes(case: LintCase, _: TrialConfig, __: int) -> Settings:
    cluster, ranks = case.around.cluster, case.ranks
    assert cluster is not None and ranks is not None
    settings: dict[str, object] = {PROCESSES: ranks, MACHINES: cluster.nodes}
    if any(mesh(name) in case.imported.settings for name in ("dp_shard", "tp", "cp")):
        copies = math.gcd(int(case.get(mesh("dp_replicate"), 1)), case.replicas or 1)
        settings[mesh("dp_shard")] = max((case.replicas or 1) // copies, 1)
        if mesh("dp_replicate") in case.imported.settings:
            settings[mesh("dp_replicate")] = copies
    return settings


def _read(settings: Settings, source: str) -> Imported:
    """As `from_accelerate`; a file for SageMaker, or with a value that cannot be read, has no knobs."""
    try:
        if settings.get("compute_environment") == SAGEMAKER:
            raise RequestError("compute_environment", "files for SageMaker are not read", "give a file for LOCAL_MACHINE")
        return from_accelerate(settings, source)
    except RequestError as error:
        if error.field == "from":  # a file that it names
            raise
        return Imported(knobs={}, settings=dict(flat(settings)), unreadable=error)


ACCELERATE = Framework(
    name="accelerate", title="Accelerate", checked=CHECKED, options=OPTIONS, read=_read, checks=CHECKS,
    rewrite=_rewrite, sizes=_sizes, undeclared_findings=_findings,
    rules=frozenset({"world-divides", "tensor-divides", "sequence-divides", "pipeline-layers"}),
)  # fmt: skip
