"""What Accelerate does with the settings of its file (checked with 16cb6eb8 and 1.15.0)."""

import math
from collections.abc import Iterator

from autotune.frameworks.accelerate import (
    FILE,
    INIT_FLAG,
    MACHINES,
    OFFLOAD_PARAM,
    OPTIONS,
    PROCESSES,
    RESHARD,
    STATE_DICT,
    VERSION,
    WRAP,
    from_accelerate,
    fsdp,
    mesh,
)
from autotune.frameworks.framework import Check, Framework, LintCase, Settings, unknown
from search_spaces.finding import Effect, Finding
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

KNOWN = {option.key for option in OPTIONS}
OF_VERSION_1 = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "sharding_strategy")
"""Settings that FSDP2 does not have."""
WITH_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip
"""Settings that Accelerate refuses beside a DeepSpeed file."""
PRECISION_WORDS = ("no", "fp16", "bf16", "fp8", "none", "false")
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


def _unknown_fields(case: LintCase) -> Iterator[Finding]:
    tables = {key.partition(".")[0] for key in KNOWN}
    inner = FILE in case.imported.settings
    for key in case.imported.settings:
        table, _, name = key.partition(".")
        if table not in tables:
            if not inner:  # else it is the DeepSpeed file's
                yield unknown(case, key if not name else table, tables, Effect.REFUSED)
        elif name and table in ("fsdp_config", "parallelism_config") and not KNOWN & {key, f"{table}.fsdp_{name}"}:
            yield unknown(case, key, [known for known in KNOWN if known.startswith(f"{table}.")], Effect.IGNORED)


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
    key = fsdp(name)
    return Check(
        name=f"version-1-{name.replace('_', '-')}", key=key, effect=Effect.IGNORED, problem="FSDP2 has no such setting",
        holds=lambda case: _is_fsdp(case, 2) and key in case.imported.settings, fix={key: None}, remedy="leave it out",
    )  # fmt: skip


CHECKS = (
    Check(
        name="no-type", key="distributed_type", effect=Effect.REFUSED, problem="the file does not state it",
        holds=lambda case: not case.get("distributed_type"), remedy="state distributed_type",
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
        name="precision", key="mixed_precision", effect=Effect.REFUSED,
        problem=lambda case: f"{case.get('mixed_precision')!r} is not known",
        holds=lambda case: str(case.get("mixed_precision", "no")).lower() not in PRECISION_WORDS,
        remedy=f"use one of {', '.join(PRECISION_WORDS[:4])}",
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


ACCELERATE = Framework(
    name="accelerate", title="Accelerate", checked="1.15.0", options=OPTIONS, read=from_accelerate, checks=CHECKS,
    rewrite=_rewrite, sizes=_sizes, undeclared_findings=_unknown_fields,
    rules=frozenset({"world-divides", "tensor-divides", "sequence-divides", "pipeline-layers"}),
)  # fmt: skip
