"""The keys that DeepSpeed reads; and of its sections that refuse any other key, since which version and with which values."""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autotune.frameworks.framework import closest
from autotune.frameworks.imported import AUTO, flat, nested, short_text, switch_of
from search_spaces.errors import Effect, Finding

Version = tuple[int, ...]
UNREAD = "no part of DeepSpeed reads this key"


@dataclass(frozen=True, slots=True)
class SectionKey:
    """A key of a section."""

    kinds: tuple[str, ...]
    """The values that it takes, as in the file of the table."""
    since: Version
    """The first version that has it."""
    now: str
    """The key of today that an older spelling sets; empty: it is today's."""

    def takes(self, value: Any) -> bool:
        """Whether DeepSpeed takes the value: its models convert what has the same meaning (pydantic's lax mode)."""
        return any(_takes(kind, value) for kind in self.kinds)

    def converted(self, value: Any) -> Any:
        """The value as DeepSpeed's models convert it: a text that is a switch or a number."""
        if not isinstance(value, str | int | float) or value == AUTO or "text" in self.kinds or not self.takes(value):
            return value
        if "bool" in self.kinds or isinstance(value, bool):  # its validators refuse a switch for a number
            return value if isinstance(value, bool) else bool(switch_of(f"{value:g}" if isinstance(value, float) else value))
        number = _number("float", value)
        return value if number is None else int(number) if number.is_integer() else number

    @property
    def words(self) -> str:
        """The values in words."""
        kind_words = {
            "bool": "true or false", "int": "a whole number", "float": "a number", "text": "a text", "table": "an object",
            "section": "an object", "list": "a list",
        }  # fmt: skip
        return " or ".join(
            re.sub(r"^\w+", lambda match: kind_words.get(match[0], match[0]), kind)
            for kind in self.kinds if kind not in ("null", "nothing")
        )  # fmt: skip


def _takes(kind: str, value: Any) -> bool:
    name, _, rest = kind.partition(" ")
    comparisons = {">=": float.__ge__, ">": float.__gt__, "<=": float.__le__, "<": float.__lt__}
    match name:
        case "any":
            return True
        case "null":
            return value is None
        case "text":
            return isinstance(value, str)
        case "table" | "section":
            return isinstance(value, Mapping)
        case "list":
            return isinstance(value, list) and all(_takes(rest.removeprefix("of ") or "any", item) for item in value)
        case "one":
            words = rest.removeprefix("of ").split(", ")
            number = _number("int", value) if words[0].isdigit() else None
            return (f"{number:.0f}" if number is not None else value) in words
        case "bool":
            return value in (0, 1) if isinstance(value, int | float) else switch_of(value) is not None
        case "int" | "float":
            number = _number(name, value)
            bounds = re.findall(r"([<>]=?) (\S+)", rest)
            return number is not None and all(comparisons[sign](number, float(bound)) for sign, bound in bounds)
    return False


def _number(kind: str, value: Any) -> float | None:
    if isinstance(value, str) and (kind == "float" or re.fullmatch(r"\s*[-+]?\d[\d_]*(\.0*)?\s*", value)):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or (kind == "int" and (not math.isfinite(value) or value != int(value))):
        return None
    return float(value)


@cache
def section_keys() -> Mapping[str, Mapping[str, SectionKey]]:
    """Section -> its keys, with dots between a section and the one in it."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {path: {key: _key(words) for key, words in keys.items()} for path, keys in tomllib.loads(text).items()}


def converted(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the values of its sections as DeepSpeed's models convert them."""
    sections, settings = section_keys(), dict(flat(config))
    for setting, value in settings.items():
        section, _, name = setting.rpartition(".")
        if (key := sections.get(section, {}).get(name)) is not None:
            settings[setting] = key.converted(value)
    return nested(settings)


def _key(text: str) -> SectionKey:
    now, since = re.search(r", now (\w+)", text), re.search(r", since (\S+)$", text)
    kinds = re.sub(r", (now|since) .*", "", text).split(" or ")
    return SectionKey(tuple(kinds), version_numbers(since[1]) if since else (), now[1] if now else "")


def version_numbers(version: str) -> Version:
    """`0.19.8` as numbers."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def section_at(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The section at a dotted path; empty if there is none."""
    section: Any = config
    for name in path.split("."):
        section = section.get(name) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def meant(key: str, allowed: Mapping[str, object] | frozenset[str]) -> str:
    """The remedy for an unknown key; comments are left out."""
    is_comment = key.startswith(("_", "//", "#", "$")) or key.lower() in ("comment", "comments", "note", "notes", "description")
    close = [] if is_comment else closest(key, tuple(sorted(allowed)), 0.6)
    return f"did you mean {close[0]}?" if close else "leave it out"


def unknown_keys(config: Mapping[str, Any], gone: Mapping[str, str]) -> Iterator[Finding]:
    """Keys outside the closed sections that DeepSpeed never reads, with the closest one that it reads.

    Args:
        config: the configuration.
        gone: keys that another rule reports.
    """
    for path, allowed in {"": TOP_LEVEL, **IGNORES_OTHERS}.items():
        for key in section_at(config, path) if path else config:
            if key not in allowed and (path or key not in gone):
                yield finding_of("unknown-key", f"{path}.{key}" if path else key, UNREAD, meant(key, allowed), Effect.IGNORED)


def section_findings(config: Mapping[str, Any], version: Version, gone: Mapping[str, str]) -> Iterator[Finding]:
    """What the sections refuse.

    Args:
        config: the configuration.
        version: DeepSpeed's.
        gone: keys that another rule reports.
    """
    for path, keys in section_keys().items():
        closed_since = min(key.since for key in keys.values())
        if path == "bfloat16" and config.get("bf16") is not None:
            continue
        for name, value in section_at(config, path).items():
            key, setting = keys.get(name), f"{path}.{name}"
            if setting in gone or name == "strict":
                continue
            if version < closed_since:
                if key is None and path in ("bf16", "bfloat16", "fp16"):  # older versions had other keys in the rest
                    yield finding_of("unknown-key", setting, UNREAD, meant(name, keys), Effect.IGNORED)
            elif key is None:
                effect, problem = Effect.REFUSED, "the section has no such key"
                # The version that the table of sections is of.
                if version > (0, 19, 8):
                    continue  # a later version may have it
                if value == "auto":  # counts as not stated, whatever the key
                    effect, problem = Effect.IGNORED, UNREAD
                yield finding_of("unknown-key", setting, problem, meant(name, keys), effect)
            elif version < key.since and value != "auto":
                first = ".".join(map(str, key.since))
                yield finding_of("later-key", setting, f"the key came with {first}", f"leave it out, or use {first}")
            elif value != AUTO and not key.takes(value) and not _leaves(setting, value):
                rule = "section-type" if "section" in key.kinds else "value"
                problem = f"{short_text(json.dumps(value, default=str))} is not {key.words or 'a value of JSON'}"
                yield finding_of(rule, setting, problem, _remedy(key))
            elif (today := _today(keys, name)) != name and value != "auto":
                others = [other for other in section_at(config, path) if other != name and _today(keys, other) == today]
                if others:
                    yield finding_of("two-spellings", setting, f"it sets the same as {others[0]}", "leave it out")


def _leaves(setting: str, value: Any) -> bool:
    """Whether a value stands for a list of names of leaf modules, as text, or for the section of none."""
    section = "zero_optimization.leaf_module"
    return value is None if setting == section else isinstance(value, str) and setting.startswith(f"{section}.")


def _today(keys: Mapping[str, SectionKey], name: str) -> str:
    while name in keys and keys[name].now:
        name = keys[name].now
    return name


def _remedy(key: SectionKey) -> str:
    if "section" in key.kinds:
        return "write its keys, as in " + '{"enabled": true}'
    return f"give {key.words}" if key.words else "leave it out"


def finding_of(rule: str, key: str, problem: str, remedy: str, effect: Effect = Effect.REFUSED) -> Finding:
    """A finding, of something that is refused if nothing else is said."""
    return Finding(rule=rule, key=key, effect=effect, problem=problem, remedy=remedy)


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
