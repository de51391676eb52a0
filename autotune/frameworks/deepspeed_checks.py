"""Which keys of a configuration DeepSpeed reads, and which it refuses, or silently ignores or changes, by version.

DeepSpeed checks the batch sizes, some words and the closed sections (`deepspeed_sections`); it accepts everything else. Checked
against the source of 0.19.8 and, if it is installed, by tests against its classes. "auto" values are not checked.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.deepspeed import EITHER, OPTIONS, from_deepspeed
from autotune.frameworks.deepspeed_sections import (
    converted,
    finding_of,
    section_at,
    section_findings,
    unknown_keys,
    version_numbers,
)
from autotune.frameworks.framework import Framework, LintCase, Settings
from autotune.frameworks.imported import AUTO, Imported, flat, nested
from executor.engines.deepspeed.capability import installed_version
from search_spaces.deepspeed import KEYS
from search_spaces.errors import Effect, Finding
from search_spaces.trial_config import TrialConfig

Config = Mapping[str, Any]


def findings(config: Config, version: str, world_size: int | None = None) -> list[Finding]:
    """Everything that this DeepSpeed version refuses, ignores or changes, in the order of the rules.

    `world_size`: ranks of the run; None: checks that depend on it are skipped.
    """
    numbers, config = version_numbers(version), converted(config)
    rules = (_removed_keys, _sections, _batch, _words, _types, _stage, _offload, _tensor, _dead_keys)
    rule_findings = [*unknown_keys(config, REMOVED), *section_findings(config, numbers, REMOVED)]
    rule_findings += [finding for rule in rules for finding in rule(config, numbers)]
    return rule_findings if world_size is None else [*rule_findings, *_ranks(config, world_size)]


def _removed_keys(config: Config, version: tuple[int, ...]) -> Iterator[Finding]:
    if version < version_numbers("0.19.8"):
        return
    for path, instead in REMOVED.items():
        section, _, key = path.rpartition(".")
        if key in (section_at(config, section) if section else config):
            yield finding_of("removed-key", path, "DeepSpeed has removed it", f"leave it out: {instead}")
    kind = section_at(config, "optimizer").get("type")
    if isinstance(kind, str) and kind.lower() in ("onebitadam", "zerooneadam", "onebitlamb"):
        yield finding_of("removed-key", "optimizer.type", f"DeepSpeed has removed {kind}", "use AdamW or Lamb", Effect.FAILS)


def _dead_keys(config: Config, _version: tuple[int, ...]) -> Iterator[Finding]:
    for path, instead in NEVER_READ.items():
        section, _, key = path.rpartition(".")
        if key in (section_at(config, section) if section else config):
            yield _ignored("never-read", path, f"it is never read: {instead}", "leave it out")


def _stage(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    """Keys that have no effect at the selected stage."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        problem = f"{str(zero).lower()} means stage {int(zero)}"
        yield finding_of("stage-as-flag", "zero_optimization", problem, "name the stage", Effect.CHANGED)
    if not isinstance(zero, Mapping):
        return
    if "stage" not in zero:
        problem = "without a stage nothing is divided"
        yield finding_of("stage-missing", "zero_optimization", problem, "name the stage", Effect.CHANGED)
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
        problem, remedy = "stage 0 offloads nothing, but uses the host optimizer", "use stage 1, 2 or 3, or leave it out"
        yield finding_of("offload-optimizer-stage", "zero_optimization.offload_optimizer", problem, remedy, Effect.CHANGED)


def _offload(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    zero, optimizer = section_at(config, "zero_optimization"), section_at(config, "zero_optimization.offload_optimizer")
    for name in ("offload_param", "offload_optimizer"):
        if _device(config, name) == "nvme" and not section_at(config, f"zero_optimization.{name}").get("nvme_path"):
            path = f"zero_optimization.{name}.nvme_path"
            yield finding_of("nvme-path", path, "nvme needs a folder, and none is given", "give nvme_path", Effect.FAILS)
    ratio = optimizer.get("ratio", 1.0)
    if isinstance(ratio, int | float) and ratio < 1.0:
        path = "zero_optimization.offload_optimizer.ratio"
        if zero.get("stage") != 3:
            yield finding_of("offload-ratio-stage", path, "only stage 3 offloads a part", "use stage 3, or leave it out")
        elif section_at(config, "optimizer.params").get("torch_adam"):
            problem = "only DeepSpeed's own Adam can offload a part"
            yield finding_of("offload-ratio-optimizer", path, problem, "leave out torch_adam", Effect.FAILS)
    if (
        _device(config, "offload_optimizer") != "none"
        and zero.get("contiguous_gradients") is False
        and zero.get("stage") in (1, 2)
    ):
        problem = "gradients are copied into one buffer to be offloaded"
        yield _ignored("offload-contiguous", "zero_optimization.contiguous_gradients", problem, "leave it out")


def _words(config: Config, version: tuple[int, ...]) -> Iterator[Finding]:
    """Settings that take some words only, in any case."""
    for path, words in WORDS.items():
        section, _, key = path.rpartition(".")
        table = section_at(config, section) if section else config
        if key not in table or (table[key] is None and path in DTYPE_KEYS):
            continue
        # Older versions spell bf16 bfp16 in `DTYPE_KEYS`.
        if path in DTYPE_KEYS and version < (0, 14, 1):
            words = ("fp16", "bfp16", "fp32")
        if not isinstance(table[key], str) or table[key].lower() not in words:
            problem = f"{json.dumps(table[key], default=str)} is not one of {', '.join(words)}"
            yield finding_of("word", path, problem, f"use {' or '.join(words)}")


def _types(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    zero, fp16, bf16 = (section_at(config, name) for name in ("zero_optimization", "fp16", _bf16(config)))
    stage = zero.get("stage", 0)
    if bf16.get("enabled") is True and fp16.get("enabled") is True:
        yield finding_of("two-precisions", "fp16.enabled", "bf16 and fp16 exclude each other", "enable one of them")
    if "max_grad_norm" in section_at(config, "optimizer.params"):
        problem = "an optimizer has no such parameter"
        yield finding_of("max-grad-norm", "optimizer.params.max_grad_norm", problem, "set gradient_clipping", Effect.FAILS)
    size = zero.get("allgather_bucket_size", 0)
    if isinstance(size, int) and size % 2 and stage in (1, 2):
        path = "zero_optimization.allgather_bucket_size"
        yield finding_of("odd-bucket", path, "it must be even, though it is never read", "leave it out", Effect.FAILS)
    # Sections and their switches that DeepSpeed refuses without ZeRO.
    need_zero = (
        ("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads"), ("bf16", "bf16_optimizer_states"),
    )  # fmt: skip
    for section, key in need_zero:
        section = _bf16(config) if section == "bf16" else section
        if section_at(config, section).get(key) is True and stage not in (1, 2, 3):
            yield finding_of("master-stage", f"{section}.{key}", "it needs ZeRO", "set zero_optimization.stage to 1, 2 or 3")
    if bf16.get("bf16_optimizer_states") is True and bf16.get("bf16_master_weights_and_grads") is not True:
        problem = "it needs bf16_master_weights_and_grads"
        yield finding_of("bf16-states", "bf16.bf16_optimizer_states", problem, "set bf16_master_weights_and_grads to true")
    if zero.get("compute_grad_norm") is False and stage not in (1, 2):
        path = "zero_optimization.compute_grad_norm"
        yield finding_of("norm-stage", path, "only stages 1 and 2 can leave the norm out", "leave it out")
    if str(config.get("gradient_allreduce_op")).lower() == "sum" and (stage == 3 or zero.get("zenflow") is not None):
        problem = "stage 3 and ZenFlow take the mean only"
        yield finding_of("sum-stage", "gradient_allreduce_op", problem, "leave it out")
    for key in ("loss_scale", "loss_scale_window", "min_loss_scale"):
        value = fp16.get(key, 1)
        least = 0 if key == "loss_scale" else 1
        dynamic = least == 0 or (fp16.get("enabled") is True and fp16.get("loss_scale", 0) == 0)
        if isinstance(value, bool) or (isinstance(value, int | float) and value < least and dynamic):
            problem = f"{json.dumps(value)} is not a number of at least {least}"
            yield finding_of("loss-scale", f"fp16.{key}", problem, f"give a number of at least {least}")


def _sections(config: Config, _version: tuple[int, ...]) -> Iterator[Finding]:
    """Sections that are not objects."""
    for path in SECTIONS:
        outer, _, name = path.rpartition(".")
        value = (section_at(config, outer) if outer else config).get(name, {})
        as_flag = path == "zero_optimization" and isinstance(value, bool)
        unstated = (value is None and path in ("aio", "bf16")) or (
            value == AUTO and path in ("tensorboard", "wandb", "csv_monitor", "comet")
        )
        unread = (path == "bfloat16" and config.get("bf16") is not None) or (path == "expert_parallel" and not value)
        if not (isinstance(value, Mapping) or as_flag or unstated or unread):
            problem = f"{json.dumps(value, default=str)} is not an object"
            yield finding_of("section-type", path, problem, 'write its keys, as in {"enabled": true}')
    for path, kinds in SCALARS.items():
        section, _, key = path.rpartition(".")
        table = section_at(config, section) if section else config
        value = table.get(key, "auto") if key != "params" or table.get("type") is not None else "auto"
        if value != "auto" and not isinstance(value, kinds):
            yield finding_of("value", path, f"{json.dumps(value, default=str)} is of another type", "leave it out")


def _batch(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    for name in BATCH_SIZES:
        value = config.get(name)
        if value not in (None, "auto") and not (isinstance(value, int | float) and value > 0):
            problem = f"{json.dumps(value, default=str)} is not a count"
            yield finding_of("batch-positive", name, problem, "give a whole number of at least 1")
    if config.get(BATCH_SIZES[0]) is None and config.get(BATCH_SIZES[1]) is None:
        yield finding_of("batch-missing", BATCH_SIZES[0], "neither it nor the micro-batch is given", f"give {BATCH_SIZES[1]}")
    divided = section_at(config, "tensor_parallel").get("autotp_size", 0)
    if isinstance(divided, int) and divided > 1 and all(isinstance(config.get(name), int) for name in BATCH_SIZES):
        problem = "with AutoTP DeepSpeed still counts every rank as a replica, and refuses the product of the three"
        yield finding_of("autotp-batch", BATCH_SIZES[0], problem, f"leave {BATCH_SIZES[0]} out")


def _tensor(config: Config, _: tuple[int, ...]) -> Iterator[Finding]:
    section = section_at(config, "tensor_parallel")
    size = section.get("autotp_size")
    if not section or size is None or size in (0, 1):
        inert = [key for key in section if key not in ("autotp_size", "dtype")]
        if inert:
            path = f"tensor_parallel.{inert[0]}"
            yield _ignored("autotp-off", path, "without an autotp_size above 1 nothing is divided", "set autotp_size")
    elif "partition_config" not in section and "preset_model" not in section:
        problem = "without a plan AutoTP goes by the names of the layers, and leaves those that it does not know whole"
        yield finding_of(
            "autotp-plan",
            "tensor_parallel",
            problem,
            "give partition_config, or a model with a tp_plan of its own",
            Effect.CHANGED,
        )


def _ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """Checks against the number of ranks that DeepSpeed does not make."""
    size = section_at(config, "tensor_parallel").get("autotp_size") or 1
    if isinstance(size, int) and world_size % size:
        path = "tensor_parallel.autotp_size"
        yield finding_of(
            "autotp-ranks", path, f"{size} does not divide {world_size} ranks", "give a divisor of the ranks", Effect.FAILS
        )
        return
    hpz = section_at(config, "zero_optimization").get("zero_hpz_partition_size", 1)
    if isinstance(hpz, int) and hpz > 1 and world_size % min(hpz, world_size):
        path = "zero_optimization.zero_hpz_partition_size"
        yield finding_of(
            "hpz-ranks", path, f"{hpz} does not divide {world_size} ranks", "give a divisor of the ranks", Effect.FAILS
        )
    if size == 1:
        yield from _batch_of_ranks(config, world_size)


def _batch_of_ranks(config: Config, world_size: int) -> Iterator[Finding]:
    """The product of the three sizes, of which DeepSpeed computes those that are not stated; the ranks that share the tokens of
    a sample are one replica."""
    sharing = config.get("sequence_parallel_size", 1)
    if not isinstance(sharing, int) or sharing < 1 or world_size % sharing:
        problem = f"{json.dumps(sharing, default=str)} does not divide {world_size} ranks"
        # The configuration takes a part of a replica; the groups of ranks do not.
        effect = Effect.FAILS if isinstance(sharing, int) and sharing > 0 else Effect.REFUSED
        yield finding_of("sequence-ranks", "sequence_parallel_size", problem, "give a divisor of the ranks", effect)
        return
    sizes = [config.get(name) for name in BATCH_SIZES]
    batch, micro, steps = sizes
    if batch is None or not all(size is None or (isinstance(size, int | float) and size > 0) for size in sizes):
        return
    replicas = world_size // sharing
    if micro is None:
        micro = batch // replicas // (steps or 1)
    if steps is None:
        steps = batch // micro // replicas if micro else 0
    if micro * steps * replicas != batch:
        ranks = f"{replicas} ranks" if sharing == 1 else f"{replicas} replicas of {sharing} ranks"
        problem = f"{batch} is not {micro:g} samples x {steps:g} micro-batches x {ranks}"
        remedy = "give two of the three" if None not in sizes else "give a multiple of the replicas' samples"
        yield finding_of("batch-product", "train_batch_size", problem, remedy)


def _bf16(config: Config) -> str:
    """The section that DeepSpeed reads of bf16's two spellings."""
    return "bfloat16" if config.get("bf16") is None else "bf16"


def _device(config: Config, name: str) -> str:
    return str(section_at(config, f"zero_optimization.{name}").get("device", "none"))


def _ignored(rule: str, key: str, problem: str, remedy: str) -> Finding:
    return finding_of(rule, key, problem, remedy, Effect.IGNORED)


BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SECTIONS = (
    "optimizer", "scheduler", "zero_optimization", "bf16", "fp16", "tensor_parallel", "comms_logger", "hybrid_engine",
    "compile", "weight_quantization", "tensorboard", "wandb", "csv_monitor", "comet", "activation_checkpointing",
    "flops_profiler", "autotuning", "pipeline", "data_efficiency", "checkpoint", "data_types", "aio", "torch_autocast",
    "timers", "timers.throughput", "bfloat16", "expert_parallel",
)  # fmt: skip
SCALARS: Mapping[str, tuple[type, ...]] = {
    "wall_clock_breakdown": (int,), "flops_profiler.enabled": (int,), "data_types.keep_in_fp32_modules": (list,),
    "optimizer.type": (str, type(None)), "optimizer.params": (Mapping, type(None)),
}  # fmt: skip
"""Settings outside the closed sections whose values DeepSpeed uses while it reads the configuration -> their types."""
DTYPE_KEYS = ("communication_data_type", "seq_parallel_communication_data_type")
WORDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(DTYPE_KEYS, ("fp16", "bf16", "fp32")),
    "gradient_allreduce_op": ("mean", "sum"),
    "checkpoint.tag_validation": ("warn", "ignore", "fail"),
    "torch_autocast.dtype": ("bf16", "fp16", "fp32", "bfloat16", "float16", "float32", "half", "float", "int8",
                             "torch.bfloat16", "torch.float16", "torch.float32", "torch.int8"),
}  # fmt: skip
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
"""Key that stops DeepSpeed from 0.19.8 on -> its replacement."""
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
    # DeepSpeed's reader refuses keys that the file states twice.
    repeated = [finding_of("repeated-key", key, "the file states it twice", "state it once") for key in case.imported.repeated]
    table_findings = findings(nested(case.imported.settings), version_of(case.around.version), case.ranks)
    return [replace(finding, fix=_fix(case, finding)) for finding in [*repeated, *table_findings]]


def _fix(case: LintCase, finding: Finding) -> Settings:
    """The change that the table's remedy describes, where it is one of settings."""
    if finding.rule == "batch-product":
        if case.get(KEYS["micro_batch_size"]) is None:
            return {}
        steps = case.get("gradient_accumulation_steps") or 1
        return {finding.key: case.get(KEYS["micro_batch_size"]) * steps * (case.ranks // case.get("sequence_parallel_size", 1))}
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
