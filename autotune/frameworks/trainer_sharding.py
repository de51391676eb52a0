"""How a recipe of the Trainer divides its states: the file or section of DeepSpeed, of FSDP or of Accelerate that it names."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.accelerate import SHARDING, from_accelerate
from autotune.frameworks.deepspeed import from_deepspeed
from autotune.frameworks.imported import AUTO, Imported, flat, nested, read_table
from autotune.frameworks.shell import ENVIRONMENT, LAUNCHER
from autotune.frameworks.trainer_table import TrainerTable
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec


def read_sharding(table: TrainerTable, model: ModelSpec | None, precision: Value | None, micro: int, steps: int) -> int | None:
    """Read how the states are divided, and in which precision; returns the number of processes if the recipe states it.

    Args:
        table: the recipe.
        model: of which DeepSpeed's automatic sizes are taken; None: unknown.
        precision: what the recipe itself states; None: nothing, so that the launcher's holds.
        micro: samples of a micro-batch.
        steps: micro-batches of an optimizer step.
    """
    launch = {key.removeprefix(LAUNCHER): value for key, value in table.settings.items() if key.startswith(LAUNCHER)}
    content, deepspeed = _accelerate(table, launch), table.inner_table("deepspeed")
    inner_file = content.get("deepspeed_config.deepspeed_config_file")
    if deepspeed is None and inner_file is not None and content.get("distributed_type") == "DEEPSPEED":
        file = table.file(str(inner_file), f"{LAUNCHER}config_file")
        deepspeed = None if file is None else dict(flat(read_table(file)))
    words = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
    stated_precision = precision or words.get(str(content.get("mixed_precision")).lower())
    precision = stated_precision or "fp32"
    ranks, base = _ranks(table, launch, content), None
    if deepspeed is not None:
        filled = _filled(deepspeed, model, precision, micro, steps)
        base = _read_by(table, "deepspeed", lambda: from_deepspeed(nested(filled), table.source))
    elif "zero_stage" in table.assumed:  # by the name of a file that is not there
        pass
    elif (fsdp := _fsdp(table)) or content.get("distributed_type") in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        mixed = {"mixed_precision": {"fp32": "no", "fp8": "bf16"}.get(str(precision), precision)}
        settings = nested({**content, **fsdp, **mixed})
        base = _read_by(table, "fsdp_config", lambda: from_accelerate(settings, str(table.path)))
    if base is not None:
        knobs = {name: value for name, value in base.knobs.items() if name != "micro_batch_size"}
        table.knobs |= knobs
        table.keys |= {name: _stating(table, base.keys[name]) for name in knobs.keys() & base.keys.keys()
                       if (deepspeed or {}).get(base.keys[name]) != AUTO}  # fmt: skip
        follows = ("micro_batch_size", "gradient_accumulation_steps")
        table.notes += [note for note in base.notes if not note.startswith(follows) and "is not a knob" not in note]
    elif (stage := table.field("zero_stage")) is not None:
        table.set("zero_stage", table.size("zero_stage", least=0) if stage else 0, table.keys["zero_stage"])
    elif table.problem is None and not (table.program.launches or launch or table.assumed):
        table.assumed["zero_stage"] = 0  # the file of the launch, which is not known here, decides it
    elif table.problem is None and "zero_stage" not in table.assumed:
        table.set("zero_stage", 0)
    if stated_precision is None and "zero_stage" in table.assumed and "bf16" not in table.keys:
        table.assumed |= {"precision": "bf16", "reduce_dtype": "bf16"}  # the same file decides it
        return ranks
    key = next((table.keys[name] for name in (str(precision), "dtype") if name in table.keys), "")
    keeps = deepspeed is None or precision == "fp8"  # else the DeepSpeed file has the last word
    table.set("precision", precision if keeps else table.knobs.get("precision", precision), key)
    for knob in ("tensor_parallel_size", "context_parallel_size"):
        if (size := table.size(knob)) > 1:
            table.set(knob, size, table.keys[knob])
    return ranks or (base.ranks if base else None)


def _stating(table: TrainerTable, key: str) -> str:
    """The recipe's setting that states one of its sharding framework: itself, or what names the file or switches it on."""
    named = (table.keys[name] for name in ("deepspeed", "fsdp_config", "fsdp") if name in table.keys)
    switches = (name for name in table.settings if name.startswith("fsdp"))
    spellings = (f"deepspeed.{key}", key, key.replace("fsdp_config.fsdp_", "fsdp_config."))
    return next((name for name in (*spellings, *named, *switches) if name in table.settings), f"{LAUNCHER}config_file")


def _read_by(table: TrainerTable, key: str, reader: Callable[[], Imported]) -> Imported | None:
    """What a framework's own reader makes of its settings; None: they have a value that is no knob's."""
    try:
        imported = reader()
    except RequestError as error:
        table.unpredicted(key, f"{error.field}: {error.problem}", error.remedy)
        return None
    if imported.unreadable is not None:
        table.unpredicted(key, f"{imported.unreadable.field}: {imported.unreadable.problem}", imported.unreadable.remedy)
    return imported


def _accelerate(table: TrainerTable, launch: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `accelerate launch`, flat: those of its file, and its options, which override them."""
    content: dict[str, Any] = {}
    name = launch.get("config_file", launch.get("accelerate_config"))
    preset = re.fullmatch(r"(zero|fsdp)([123])|(multi|single)_gpu", str(name))
    if "accelerate_config" in launch and preset is not None:  # of trl.accelerate_configs
        kind = {"zero": "DEEPSPEED", "fsdp": "FSDP", None: "MULTI_GPU"}[preset[1]]
        setting = "deepspeed_config.zero_stage" if kind == "DEEPSPEED" else "fsdp_config.fsdp_version"
        content = {"distributed_type": kind, "mixed_precision": "bf16", "num_processes": 8, setting: int(preset[2] or 1)}
    elif name is not None and (file := table.file(str(name), f"{LAUNCHER}config_file")) is not None:
        content = dict(flat(read_table(file)))
    for option, kind in {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM"}.items():
        if launch.get(option):
            content["distributed_type"] = kind
    deepspeed = {"deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag"}
    for option, value in launch.items():
        if option in deepspeed:
            content[f"deepspeed_config.{option}"] = value
        elif option.startswith("fsdp_"):
            content[f"fsdp_config.{option}"] = value
        elif option in ("mixed_precision", "num_processes", "num_machines"):
            content[option] = value
    return content


def _ranks(table: TrainerTable, launch: Mapping[str, Any], content: Mapping[str, Any]) -> int | None:
    """Processes: of accelerate all together, of torchrun, DeepSpeed and LLaMA-Factory those of a machine times machines."""
    names = ("nproc_per_node", "num_gpus")
    each = next((launch[name] for name in names if name in launch), table.settings.get(f"{ENVIRONMENT}NPROC_PER_NODE"))
    nodes = launch.get("nnodes", launch.get("num_nodes", table.settings.get(f"{ENVIRONMENT}NNODES", 1)))
    total = content.get("num_processes")
    if isinstance(total, int) and total > 0:
        return total
    return each * nodes if isinstance(each, int) and isinstance(nodes, int) and each * nodes > 0 else None


def _filled(deepspeed: Mapping[str, Any], model: ModelSpec | None, precision: Value, micro: int, steps: int) -> dict[str, Any]:
    """DeepSpeed's settings with the Trainer's in the place of `auto`; what has none is left to DeepSpeed."""
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps, "fp16.enabled": precision == "fp16",
        **dict.fromkeys(("bf16.enabled", "bfloat16.enabled"), precision in ("bf16", "fp8")),
    }  # fmt: skip
    # Automatic sizes of DeepSpeed's buckets, in squares of the hidden size [transformers, integrations/deepspeed.py].
    buckets = {"reduce_bucket_size": 1.0, "stage3_prefetch_bucket_size": 0.9}
    if model is not None:
        sizes = {name: int(part * model.hidden_size**2) for name, part in buckets.items()}
        sizes["stage3_param_persistence_threshold"] = 10 * model.hidden_size
        values |= {f"zero_optimization.{name}": size for name, size in sizes.items()}
    filled = {key: values.get(key) if value == AUTO else value for key, value in deepspeed.items()}
    return {key: value for key, value in filled.items() if value is not None and key != "train_batch_size"}


def _fsdp(table: TrainerTable) -> dict[str, Any]:
    """FSDP's settings as those of a file of Accelerate; empty: the recipe has none."""
    words = table.field("fsdp")
    words = [str(word) for word in words] if isinstance(words, list) else str(words or "").split()
    inside = table.inner_table("fsdp_config") or {}
    settings = {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in inside.items() if value is not None}
    if not words and not settings:
        return {}
    strategy = next((word for word in words if word in SHARDING), None)
    if strategy is not None:
        settings.setdefault("fsdp_sharding_strategy", strategy.upper())
    if "offload" in words:
        settings["fsdp_offload_params"] = True
    settings["fsdp_version"] = table.field("fsdp_version") or settings.get("fsdp_version", 1)
    sizes = {f"parallelism_config_{name}_size": table.field(name) for name in ("dp_replicate", "dp_shard")}
    return {
        "distributed_type": "FSDP",
        **{f"fsdp_config.{key}": value for key, value in settings.items() if not key.startswith("fsdp_transformer_layer")},
        **{f"parallelism_config.{key}": value for key, value in sizes.items() if value is not None},
    }
