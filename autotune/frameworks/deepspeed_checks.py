"""Which keys of a configuration DeepSpeed reads, and which it refuses, or silently ignores or changes, by version.

DeepSpeed checks the batch sizes and the keys of some sections; it accepts everything else. Checked against the source of 0.19.8
and, if it is installed, by tests against its classes. "auto" values are not checked.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.deepspeed import EITHER, OPTIONS, from_deepspeed
from autotune.frameworks.framework import Framework, LintCase, Settings
from autotune.frameworks.imported import Imported, flat, nested
from executor.engines.deepspeed.capability import installed_version
from search_spaces.deepspeed import KEYS
from search_spaces.finding import Effect, Finding
from search_spaces.trial_config import TrialConfig

Config = Mapping[str, Any]


def findings(config: Config, version: str, world_size: int | None = None) -> list[Finding]:
    """Everything that this DeepSpeed version refuses, ignores or changes, in the order of the rules.

    `world_size`: ranks of the run; None: checks that depend on it are skipped.
    """
    rules = (_removed_keys, _unknown_keys, _sections, _batch, _types, _stage, _offload, _tensor, _dead_keys)
    rule_findings = [finding for rule in rules for finding in rule(config, _numbers(version))]
    return rule_findings if world_size is None else [*rule_findings, *_ranks(config, world_size)]


def _unknown_keys(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    """Keys that DeepSpeed never reads; the finding suggests the closest known key."""
    removed = {path for path in REMOVED if "." not in path}
    for key in config:
        if key not in TOP_LEVEL and key not in removed:
            yield _ignored("unknown-key", key, "no part of DeepSpeed reads this key", _meant(key, TOP_LEVEL))
    for path, allowed in IGNORES_OTHERS.items():
        for key in _section(config, path):
            if key not in allowed:
                yield _ignored("unknown-key", f"{path}.{key}", "no part of DeepSpeed reads this key", _meant(key, allowed))
    for path, allowed in FORBIDS_OTHERS.items():
        for key in _section(config, path):
            if key not in allowed and f"{path}.{key}" not in REMOVED:
                yield _refused("unknown-key", f"{path}.{key}", "the section has no such key", _meant(key, allowed))


def _removed_keys(config: Config, version: tuple[int, ...]) -> Iterator[Finding]:
    if version < _numbers(REMOVED_VERSION):
        return
    for path, instead in REMOVED.items():
        section, _, key = path.rpartition(".")
        if key in (_section(config, section) if section else config):
            yield _refused("removed-key", path, "DeepSpeed has removed it", f"leave it out: {instead}")
    kind = _section(config, "optimizer").get("type")
    if isinstance(kind, str) and kind.lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        yield _make("removed-key", "optimizer.type", Effect.FAILS, f"DeepSpeed has removed {kind}", "use AdamW or Lamb")


def _dead_keys(config: Config, _version: tuple[int, ...]) -> Iterator[Finding]:
    for path, instead in NEVER_READ.items():
        section, _, key = path.rpartition(".")
        if key in (_section(config, section) if section else config):
            yield _ignored("never-read", path, f"it is never read: {instead}", "leave it out")


def _stage(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    """Keys that have no effect at the selected stage."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        yield _make(
            "stage-as-flag",
            "zero_optimization",
            Effect.CHANGED,
            f"{str(zero).lower()} means stage {int(zero)}",
            "name the stage",
        )
    if not isinstance(zero, Mapping):
        return
    if "stage" not in zero:
        yield _make(
            "stage-missing", "zero_optimization", Effect.CHANGED, "without a stage nothing is divided", "name the stage"
        )
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or stage >= 3:
        return
    for key in sorted(STAGE_3_KEYS & zero.keys()):
        yield _ignored(
            "stage-3-key", f"zero_optimization.{key}", f"stage {stage} does not read it", "use stage 3, or leave it out"
        )
    if zero.get("zero_hpz_partition_size", 1) != 1:
        yield _ignored(
            "stage-3-key", "zero_optimization.zero_hpz_partition_size", f"stage {stage} has no parameters to divide twice",
            "use stage 3, or leave it out",
        )  # fmt: skip
    if _device(config, "offload_param") != "none":
        yield _ignored(
            "offload-param-stage", "zero_optimization.offload_param", f"stage {stage} keeps its parameters where they are",
            "use stage 3, or leave it out",
        )  # fmt: skip
    if stage == 0:
        yield from _stage_0(config, zero)


def _stage_0(config: Config, zero: Config) -> Iterator[Finding]:
    for key in ("reduce_bucket_size", "overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients"):
        if key in zero:
            problem = "stage 0 reduces after backward in its own buckets"
            yield _ignored("stage-0-key", f"zero_optimization.{key}", problem, "use a higher stage, or leave it out")
    if _device(config, "offload_optimizer") != "none":
        yield _make(
            "offload-optimizer-stage", "zero_optimization.offload_optimizer", Effect.CHANGED,
            "stage 0 offloads nothing, but uses the host optimizer", "use stage 1, 2 or 3, or leave it out",
        )  # fmt: skip


def _offload(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    zero, optimizer = _section(config, "zero_optimization"), _section(config, "zero_optimization.offload_optimizer")
    for name in ("offload_param", "offload_optimizer"):
        if _device(config, name) == "nvme" and not _section(config, f"zero_optimization.{name}").get("nvme_path"):
            path = f"zero_optimization.{name}.nvme_path"
            yield _make("nvme-path", path, Effect.FAILS, "nvme needs a folder, and none is given", "give nvme_path")
    ratio = optimizer.get("ratio", 1.0)
    if isinstance(ratio, int | float) and ratio < 1.0:
        path = "zero_optimization.offload_optimizer.ratio"
        if zero.get("stage") != 3:
            yield _refused("offload-ratio-stage", path, "only stage 3 offloads a part", "use stage 3, or leave it out")
        elif _section(config, "optimizer.params").get("torch_adam"):
            problem = "only DeepSpeed's own Adam can offload a part"
            yield _make("offload-ratio-optimizer", path, Effect.FAILS, problem, "leave out torch_adam")
    if (
        _device(config, "offload_optimizer") != "none"
        and zero.get("contiguous_gradients") is False
        and zero.get("stage") in (1, 2)
    ):
        problem = "gradients are copied into one buffer to be offloaded"
        yield _ignored("offload-contiguous", "zero_optimization.contiguous_gradients", problem, "leave it out")


def _types(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    if _section(config, "bf16").get("enabled") is True and _section(config, "fp16").get("enabled") is True:
        yield _refused("two-precisions", "fp16.enabled", "bf16 and fp16 exclude each other", "enable one of them")
    if "max_grad_norm" in _section(config, "optimizer.params"):
        problem = "an optimizer has no such parameter"
        yield _make("max-grad-norm", "optimizer.params.max_grad_norm", Effect.FAILS, problem, "set gradient_clipping")
    size = _section(config, "zero_optimization").get("allgather_bucket_size", 0)
    if isinstance(size, int) and size % 2 and _section(config, "zero_optimization").get("stage") in (1, 2):
        path = "zero_optimization.allgather_bucket_size"
        yield _make("odd-bucket", path, Effect.FAILS, "it must be even, though it is never read", "leave it out")


def _sections(config: Config, _version: tuple[int, ...]) -> Iterator[Finding]:
    """Sections that are not objects."""
    for path in ("optimizer", *FORBIDS_OTHERS):
        section, dot, key = path.rpartition(".")
        value = (_section(config, section) if dot else config).get(key)
        as_flag = path == "zero_optimization" and isinstance(value, bool)
        if not (value in (None, "auto") or isinstance(value, Mapping) or as_flag):
            yield _refused("section-type", path, f"{value!r} is not an object", 'write its keys, as in {"enabled": true}')


def _batch(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value < 1:
            yield _refused("batch-positive", name, f"{value} is not a count", "give a whole number of at least 1")
    if config.get(names[0]) is None and config.get(names[1]) is None:
        yield _refused("batch-missing", names[0], "neither it nor the micro-batch is given", f"give {names[1]}")
    divided = _section(config, "tensor_parallel").get("autotp_size", 0)
    if isinstance(divided, int) and divided > 1 and all(isinstance(config.get(name), int) for name in names):
        problem = "with AutoTP DeepSpeed still counts every rank as a replica, and refuses the product of the three"
        yield _refused("autotp-batch", names[0], problem, f"leave {names[0]} out")


def _tensor(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    section = _section(config, "tensor_parallel")
    size = section.get("autotp_size")
    if not section or size is None or size in (0, 1):
        inert = [key for key in section if key not in ("autotp_size", "dtype")]
        if inert:
            path = f"tensor_parallel.{inert[0]}"
            yield _ignored("autotp-off", path, "without an autotp_size above 1 nothing is divided", "set autotp_size")
    elif "partition_config" not in section and "preset_model" not in section:
        problem = "without a plan AutoTP goes by the names of the layers, and leaves those that it does not know whole"
        yield _make(
            "autotp-plan",
            "tensor_parallel",
            Effect.CHANGED,
            problem,
            "give partition_config, or a model with a tp_plan of its own",
        )


def _ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """Checks against the number of ranks that DeepSpeed does not make."""
    size = _section(config, "tensor_parallel").get("autotp_size") or 1
    if isinstance(size, int) and world_size % size:
        path = "tensor_parallel.autotp_size"
        yield _make(
            "autotp-ranks", path, Effect.FAILS, f"{size} does not divide {world_size} ranks", "give a divisor of the ranks"
        )
        return
    hpz = _section(config, "zero_optimization").get("zero_hpz_partition_size", 1)
    if isinstance(hpz, int) and hpz > 1 and world_size % min(hpz, world_size):
        path = "zero_optimization.zero_hpz_partition_size"
        yield _make("hpz-ranks", path, Effect.FAILS, f"{hpz} does not divide {world_size} ranks", "give a divisor of the ranks")
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and isinstance(micro, int) and min(batch, micro) > 0 and size == 1:
        steps = config.get("gradient_accumulation_steps")
        steps = steps if isinstance(steps, int) else batch // (micro * world_size)
        if micro * steps * world_size != batch:
            problem = f"{batch} is not {micro} samples x {steps} micro-batches x {world_size} ranks"
            yield _refused("batch-product", "train_batch_size", problem, "give two of the three")


def _section(config: Config, path: str) -> Config:
    """The section at a dotted path; empty if there is none."""
    section: Any = config
    for name in path.split("."):
        section = section.get(name) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _device(config: Config, name: str) -> str:
    return str(_section(config, f"zero_optimization.{name}").get("device", "none"))


def _meant(key: str, allowed: frozenset[str]) -> str:
    close = difflib.get_close_matches(key, sorted(allowed), n=1)
    return f"did you mean {close[0]}?" if close else "leave it out"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _make(rule: str, key: str, effect: Effect, problem: str, remedy: str) -> Finding:
    return Finding(rule=rule, key=key, effect=effect, problem=problem, remedy=remedy)


def _refused(rule: str, key: str, problem: str, remedy: str) -> Finding:
    return _make(rule, key, Effect.REFUSED, problem, remedy)


def _ignored(rule: str, key: str, problem: str, remedy: str) -> Finding:
    return _make(rule, key, Effect.IGNORED, problem, remedy)


TOP_LEVEL = frozenset({
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_parallel_size", "data_types",
    "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel",
    "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping",
    "gradient_predivide_factor", "hybrid_engine", "log_level", "managed_gradient_accumulation", "memory_breakdown",
    "optimizer", "pipeline", "prescale_gradients", "scheduler", "seq_parallel_communication_data_type",
    "sequence_parallel_size", "steps_per_print", "tensor_parallel", "tensorboard", "timers", "torch_autocast",
    "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "vocabulary_size",
    "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
})  # fmt: skip

FORBIDS_OTHERS: Mapping[str, frozenset[str]] = {
    "zero_optimization": frozenset({
        "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights",
        "elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param",
        "cpu_offload_use_pin_memory", "cpu_offload", *EITHER, *(f"stage3_{name}" for name in EITHER),
        "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1", "round_robin_gradients",
        "parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
    }),
    "zero_optimization.offload_param": frozenset({
        "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory",
    }),
    "zero_optimization.offload_optimizer": frozenset({
        "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init", "ratio",
        "super_offload", "cpuadam_cores_perc",
    }),
    "bf16": frozenset({
        "enabled", "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states",
    }),
    "fp16": frozenset({
        "enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
        "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads",
    }),
    "tensor_parallel": frozenset({
        "dtype", "autotp_size", "tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend", "tp",
        "tensor_parallel", "injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host",
        "replace_with_kernel_inject", "kernel_inject",
    }),
    "comms_logger": frozenset({"enabled", "prof_all", "prof_ops", "verbose", "debug"}),
}  # fmt: skip
"""Sections in which an unlisted key stops DeepSpeed."""

IGNORES_OTHERS: Mapping[str, frozenset[str]] = {
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "scheduler": frozenset({"type", "params"}),
    "activation_checkpointing": frozenset({
        "partition_activations", "number_checkpoints", "contiguous_memory_optimization", "synchronize_checkpoint_boundary",
        "profile", "cpu_checkpointing",
    }),
    "pipeline": frozenset({
        "stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned",
        "use_reentrant",
    }),
    "data_types": frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}),
    "flops_profiler": frozenset({
        "enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
    }),
    "aio": frozenset({
        "block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds",
    }),
    "timers": frozenset({"throughput"}),
}  # fmt: skip
"""Sections in which DeepSpeed ignores an unlisted key."""

REMOVED_VERSION = "0.19.8"
REMOVED: Mapping[str, str] = {
    "nebula": "checkpoints are written by torch.save",
    "compression_training": "use a library for compression",
    "amp": "use bf16, fp16 or torch_autocast",
    "quantize_training": "use a library for quantization",
    "sparse_gradients": "gradients of embeddings made with sparse=True stay sparse without it",
    "eigenvalue": "only quantize_training used it",
    "sparse_attention": "use torch's flex_attention",
    "elasticity": "set the three batch sizes",
    "graph_harvesting": "use torch.compile",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "drop layers in the model",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "zero_quantized_gradients works without it",
}
"""Key that stops DeepSpeed from `REMOVED_VERSION` on -> its replacement."""
STAGE_3_KEYS = frozenset({
    *EITHER, *(f"stage3_{name}" for name in EITHER), "sub_group_size", "zero_quantized_weights", "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights", "memory_efficient_linear",
})  # fmt: skip
"""Keys of `zero_optimization` that are accepted at every stage but read only at stage 3."""
NEVER_READ: Mapping[str, str] = {
    "zero_optimization.allgather_bucket_size": "updated parameters are gathered in one message per group",
    "zero_optimization.allgather_partitions": "updated parameters are always gathered",
    "disable_allgather": "updated parameters are always gathered",
}
"""Key that is accepted but never read on any torch that DeepSpeed supports -> what happens instead."""


CHECKED = "0.19.8"
"""The version against which the rules are checked; used if none is installed or given."""


def version_of(stated_version: str) -> str:
    """The version that is checked: the stated one, else the installed one, else `CHECKED`.

    Raises:
        RequestError: the stated text is not a version.
    """
    if stated_version and not re.match(r"\d+\.\d+", stated_version):
        raise RequestError("for", f"{stated_version!r} is not a version", f"write it as in {CHECKED}")
    return stated_version or installed_version() or CHECKED


def _findings_of_table(case: LintCase) -> list[Finding]:
    table_findings = findings(nested(case.imported.settings), version_of(case.around.version), case.ranks)
    error = case.imported.unreadable
    # DeepSpeed takes 0 and 1 for switches and allows 0 for sizes, and does not check the clipping.
    if error is not None and error.field not in ("gradient_clipping", *(finding.key for finding in table_findings)):
        value = Finding(rule="value", key=error.field, effect=Effect.REFUSED, problem=error.problem, remedy=error.remedy)
        table_findings += [] if case.get(error.field) in (0, 1) else [value]
    return [replace(finding, fix=_fix(case, finding)) for finding in table_findings]


def _fix(case: LintCase, finding: Finding) -> Settings:
    """The change that the table's remedy describes, where it is one of settings."""
    if finding.rule == "batch-product":
        steps = case.get("gradient_accumulation_steps") or 1
        return {finding.key: case.get(KEYS["micro_batch_size"]) * steps * case.ranks}
    if finding.rule == "offload-param-stage":
        return {finding.key: None, f"{finding.key}.device": None}
    meant = re.fullmatch(r"did you mean (\w+)\?", finding.remedy)
    if meant is not None:
        table, dot, _ = finding.key.rpartition(".")
        return {finding.key: None, f"{table}{dot}{meant[1]}": case.get(finding.key)}
    return {finding.key: None} if finding.remedy.startswith("leave it out") else {}


def _read(settings: Settings, source: str) -> Imported:
    """As `from_deepspeed`; a file with a value that is no knob's has no knobs."""
    try:
        return from_deepspeed(settings, Path(source).name)
    except RequestError as error:
        return Imported(knobs={}, settings=dict(flat(settings)), unreadable=error)


def _sizes(case: LintCase, config: TrialConfig, batch: int) -> Settings:
    """Beside AutoTP DeepSpeed refuses the global batch, because it counts every rank as a replica."""
    steps = max(batch // (config.micro_batch_size * (case.replicas or 1)), 1)
    if config.tensor_parallel_size > 1:
        return {"train_batch_size": None, "gradient_accumulation_steps": steps}
    values = {"train_batch_size": batch, "gradient_accumulation_steps": steps}
    stated_names = [name for name in values if isinstance(case.get(name), int)]
    return {name: values[name] for name in stated_names or ["train_batch_size"]}


DEEPSPEED = Framework(
    name="deepspeed", title="DeepSpeed", checked=CHECKED, read=_read, checks=(), options=OPTIONS, sizes=_sizes,
    undeclared_findings=_findings_of_table,
    rules=frozenset({"tensor-divides"}),
)  # fmt: skip
