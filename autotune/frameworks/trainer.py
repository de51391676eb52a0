"""Recipes of programs that train with Hugging Face's Trainer: one reader for the Trainer and TRL, Axolotl and LLaMA-Factory.

A program's table says how it spells what the reader asks for: a knob, or a field that is none, such as the model. Settings that
change neither memory nor speed (datasets, logging, saving) are not read, and have no notes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.accelerate import SHARDING, from_accelerate
from autotune.frameworks.best_config import Stated
from autotune.frameworks.deepspeed import from_deepspeed
from autotune.frameworks.framework import Option
from autotune.frameworks.imported import AUTO, FlatTable, Imported, flat, model_named, nested, read_table
from autotune.frameworks.peft import TRANSFORMERS
from autotune.frameworks.shell import ENVIRONMENT, LAUNCHER
from search_spaces.errors import ModelFormatError, SearchSpaceError
from search_spaces.kernels import LIGER
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.models.huggingface import read_model_config, resolve_model
from search_spaces.models.model import ModelSpec

ATTENTION: Mapping[str, str] = {
    "sdpa": "best", "auto": "best", "eager": "math", "disabled": "math", "fa2": "flash", "fa3": "flash",
    "xformers": "efficient",
}  # fmt: skip
"""Implementation of attention -> ours."""
OPTIMIZERS: Mapping[str, str] = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "adamw_bnb_8bit": "adamw8bit", "adamw_8bit": "adamw8bit", "adamw_torch_8bit": "adamw8bit", "ao_adamw_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit", "paged_adamw_32bit": "adamw", "paged_adamw": "adamw", "sgd": "sgd", "muon": "muon",
}  # fmt: skip
"""Optimizer -> ours. Paged states count as states on the device."""
BUCKETS = {"reduce_bucket_size": 1.0, "stage3_prefetch_bucket_size": 0.9}
"""Automatic sizes of DeepSpeed's buckets, in squares of the hidden size [transformers, integrations/deepspeed.py]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgram:
    """A program that trains with the Trainer."""

    title: str
    """With the version whose defaults it has."""
    options: tuple[Option, ...]
    defaults: Mapping[str, Any]
    """Setting -> its value where a file does not state it."""
    noted: tuple[str, ...]
    """Settings that change memory or speed a little, and are not read."""
    methods: tuple[str, ...]
    """Settings that switch on a method of training which predictions do not have."""
    launches: bool = True
    """Whether it starts its own processes, so that without a sharding framework in the file there is none."""
    loads_in_precision: bool = False
    """Whether parameters have the precision's type where nothing divides them, without a copy in fp32."""


class TrainerTable(FlatTable):
    """A recipe's settings, read by the fields that a program's options state."""

    def __init__(self, content: Mapping[str, Any], source: str, program: TrainingProgram) -> None:
        self.path, self.program = Path(source), program
        self.problem: RequestError | None = None
        self.defaults_taken: dict[str, Any] = {}
        super().__init__(content, self.path.name)

    def unpredicted(self, key: str, problem: str, remedy: str) -> None:
        """State why there is no prediction, unless something else is the reason already."""
        self.problem = self.problem or RequestError(key, problem, remedy)

    def field(self, name: str) -> Any:
        """What states a field, else the program's default; None: neither."""
        options = [option for option in self.program.options if name in (option.field, option.knob)]
        for option in options:
            value = self.settings.get(option.key)
            if value not in (None, ""):
                self.keys[name] = option.key
                return value
        for option in options:
            if (default := self.program.defaults.get(option.key)) is not None:
                self.defaults_taken[option.key] = default
                return default
        return None

    def on(self, name: str) -> bool:
        """Whether a field is switched on."""
        return str(self.field(name)).lower() in ("true", "1", "yes")

    def size(self, name: str, least: int = 1) -> int:  # type: ignore[override]
        """A field that counts something; `least`: it is not stated, or smaller.

        Raises:
            RequestError: the value is not a whole number.
        """
        value = self.field(name)
        if value is None:
            return least
        try:
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            problem = f"{value!r} in {self.source} is not a whole number"
            raise RequestError(self.keys.get(name, name), problem, "give a whole number") from None
        return max(int(float(value)), least)

    def rate(self, name: str) -> float | None:
        """A field that is a positive number; None: it is not stated, or something else."""
        try:
            value = float(self.field(name))
        except (TypeError, ValueError):
            return None
        return value if value > 0 else None

    def inner_table(self, name: str) -> Mapping[str, Any] | None:
        """The table that a field is, or that is in the file which it names; None: it is not stated, or is not there."""
        keys = [option.key for option in self.program.options if option.field == name]
        inside = {key.removeprefix(f"{begin}."): value for key, value in self.settings.items()
                  for begin in keys if key.startswith(f"{begin}.")}  # fmt: skip
        if inside:
            return inside
        value = self.field(name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return dict(flat(json.loads(value)))
        if not isinstance(value, str):
            return None
        file = self.file(value)
        if file is None:
            self.unpredicted(self.keys[name], f"{value} is not beside {self.source}", "put it where the recipe names it")
        return None if file is None else dict(flat(read_table(file)))

    def file(self, name: str) -> Path | None:
        """The file of this name, seen from the recipe's folder or from one above it, as repositories have it."""
        folders = self.path.absolute().parents
        return next((folder / name for folder in folders if (folder / name).is_file()), None)


def read_trainer(table: TrainerTable) -> Imported:
    """Read the recipe.

    1. The model, the batch and the length.
    2. The precision, of which the sharding framework's file may be the only statement.
    3. That framework (DeepSpeed, FSDP), by its own reader: its values `auto` are the recipe's.
    4. What the Trainer itself does: recomputation, adapters, kernels, the optimizer.

    Raises:
        RequestError: a value is not valid.
    """
    model = _model(table)
    micro, steps = table.size("micro_batch_size"), table.size("gradient_accumulation_steps")
    table.set("micro_batch_size", micro, table.keys.get("micro_batch_size", ""))
    length = table.size("sequence_length", least=0) or None
    precision = _precision(table)
    ranks = _sharding(table, model, precision, micro, steps)
    _adapters(table)
    _computation(table)
    optimizer = _optimizer(table)
    stated = Stated(lr=table.rate("lr"), weight_decay=table.rate("weight_decay"), clip=table.rate("clip"), optimizer=optimizer)
    switched = {key: value for key, value in table.settings.items() if value not in (None, False, "", [])}
    for key in table.program.methods:
        if key in switched:
            table.unpredicted(key, "predictions do not have this method of training", "predict full or lora")
    noted = (key for key in table.program.noted if key in switched)
    unread = [f"{key}={_short(switched[key])}: changes memory or speed, and is not read" for key in noted]
    defaults = {key: value for key, value in table.defaults_taken.items() if key not in table.settings and value is not False}
    taken = [f"{key}={value_text(value)}: default of {table.program.title}" for key, value in defaults.items()]
    table.drop(*table.settings)
    table.notes += unread + taken
    return table.imported(
        model=model, ranks=ranks, samples_per_rank=micro * steps, sequence_length=length, hyperparameters=stated,
        unreadable=table.problem,
    )  # fmt: skip


def _short(value: Any) -> str:
    text = value_text(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _model(table: TrainerTable) -> ModelSpec | None:
    """The model of a config.json beside the recipe, else the preset of that name."""
    name, model = str(table.field("model") or ""), None
    beside, problem = table.path.parent / name / "config.json", "the shape of this model is not known here"
    if name and not Path(name).is_absolute() and ".." not in name:
        try:
            model = read_model_config(beside) if beside.is_file() else model_named(name)
            if model is None and not Path(name).exists():
                model = resolve_model(name)
        except ModelFormatError as error:
            problem = f"its config.json is not read ({error})" if beside.is_file() else problem
        except SearchSpaceError:
            pass  # no such preset
    if name and model is None:
        table.notes.append(f"{table.keys['model']}={name}: {problem}; give --model")
    return model


def _precision(table: TrainerTable) -> Value | None:
    """The precision that the recipe states; None: neither it nor a default does."""
    for name in ("fp8", "bf16", "fp16"):
        value = table.field(name)
        if name == "bf16" and value == AUTO and not table.on("fp16"):
            value = True  # on devices that have it
        if str(value).lower() in ("true", "1"):
            return name
    words = {"bfloat16": "bf16", "float16": "fp16"}
    return words.get(str(table.field("dtype")).removeprefix("torch."))


def _sharding(table: TrainerTable, model: ModelSpec | None, precision: Value | None, micro: int, steps: int) -> int | None:
    """Read how the states are divided; returns the number of processes if the recipe states it."""
    launch = {key.removeprefix(LAUNCHER): value for key, value in table.settings.items() if key.startswith(LAUNCHER)}
    content, deepspeed = _accelerate(table, launch), table.inner_table("deepspeed")
    inner_file = content.get("deepspeed_config.deepspeed_config_file")
    if deepspeed is None and inner_file is not None and content.get("distributed_type") == "DEEPSPEED":
        file = table.file(str(inner_file))
        if file is None:
            table.unpredicted(f"{LAUNCHER}config_file", f"{inner_file} is not here", "put it where the file names it")
        else:
            deepspeed = dict(flat(read_table(file)))
    words = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
    precision = precision or words.get(str(content.get("mixed_precision", "no")).lower(), "fp32")
    ranks, base = _ranks(table, launch, content), None
    if deepspeed is not None:
        filled = _filled(deepspeed, model, precision, micro, steps)
        base = _read_by(table, "deepspeed", lambda: from_deepspeed(nested(filled), table.source))
    elif (fsdp := _fsdp(table)) or content.get("distributed_type") in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        mixed = {"mixed_precision": {"fp32": "no", "fp8": "bf16"}.get(str(precision), precision)}
        settings = nested({**content, **fsdp, **mixed})
        base = _read_by(table, "fsdp_config", lambda: from_accelerate(settings, str(table.path)))
    if base is not None:
        table.knobs |= {name: value for name, value in base.knobs.items() if name != "micro_batch_size"}
        follows = ("micro_batch_size", "gradient_accumulation_steps")
        table.notes += [note for note in base.notes if not note.startswith(follows) and "is not a knob" not in note]
    elif (stage := table.field("zero_stage")) is not None:
        table.set("zero_stage", table.size("zero_stage", least=0) if stage else 0, table.keys["zero_stage"])
    elif table.problem is None and not table.program.launches and not launch:
        table.assumed["zero_stage"] = 0  # the file of the launch, which is not known here, decides it
    elif table.problem is None:
        table.set("zero_stage", 0)
    table.set("precision", table.knobs.get("precision", precision) if deepspeed is not None else precision)
    loaded = table.program.loads_in_precision or table.field("dtype") is not None
    if base is None and loaded and precision != "fp32" and "zero_stage" in table.knobs and not table.field("adapter"):
        problem = f"parameters and states are {precision} without a copy in fp32, which predictions do not have"
        table.unpredicted(table.keys.get("dtype", table.keys.get("bf16", "bf16")), problem, "shard them, or predict lora")
    for knob in ("tensor_parallel_size", "context_parallel_size"):
        if (size := table.size(knob)) > 1:
            table.set(knob, size, table.keys[knob])
    return ranks or (base.ranks if base else None)


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
    if name is not None and (file := table.file(str(name))) is not None:
        content = dict(flat(read_table(file)))
    elif "accelerate_config" in launch and preset is not None:  # of trl.accelerate_configs
        kind = {"zero": "DEEPSPEED", "fsdp": "FSDP", None: "MULTI_GPU"}[preset[1]]
        setting = "deepspeed_config.zero_stage" if kind == "DEEPSPEED" else "fsdp_config.fsdp_version"
        content = {"distributed_type": kind, "mixed_precision": "bf16", "num_processes": 8, setting: int(preset[2] or 1)}
    elif name is not None:
        table.unpredicted(f"{LAUNCHER}config_file", f"{name} is not beside {table.source}", "put it where the recipe names it")
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
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps, "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16", "bfloat16.enabled": precision == "bf16",
    }  # fmt: skip
    if model is not None:
        sizes = {name: int(part * model.hidden_size**2) for name, part in BUCKETS.items()}
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


def _adapters(table: TrainerTable) -> None:
    """Read LoRA and the bits of the frozen weights."""
    kind = str(table.field("adapter") or "").lower()
    if kind in ("", "false", "none", "full"):
        return
    if kind not in ("true", "lora", "qlora"):
        table.unpredicted(table.keys["adapter"], f"{kind} is a method that predictions do not have", "predict full or lora")
        return
    table.set("lora_rank", table.size("lora_rank"), table.keys.get("lora_rank", ""))
    table.set("lora_targets", _targets(table), table.keys.get("lora_targets", ""))
    bits = table.size("frozen_bits", least=0)
    if table.on("load_in_4bit") or bits == 4:
        table.set("frozen_dtype", "nf4", table.keys.get("load_in_4bit", ""))
    elif table.on("load_in_8bit") or bits == 8:
        table.set("frozen_dtype", "int8", table.keys.get("load_in_8bit", ""))
    elif bits:
        key = table.keys["frozen_bits"]
        table.unpredicted(key, f"weights of {bits} bits are not among those of predictions", "predict 4 or 8")


def _targets(table: TrainerTable) -> str:
    """Which matrices have adapters: those of attention, of the MLP, or both."""
    value = table.field("lora_targets")
    if table.on("lora_all_linear") or str(value).strip("[]'\"").lower() in ("all", "all-linear", "all_linear"):
        return "both"
    called = set() if value is None else set(re.findall(r"[a-z]\w*", str(value)))  # of a list, or of a regular expression

    def adapts(part: str, *matrices: str) -> bool:
        names = {family[matrix] for family in TRANSFORMERS.values() for matrix in matrices if matrix in family}
        return bool(called & names) or any(part in word for word in called)

    attention, mlp = adapts("attn", "query", "key", "value", "output"), adapts("mlp", "gate", "up", "down")
    if "q_proj" in called and not {"k_proj", "o_proj"} <= called:
        key, left_out = table.keys["lora_targets"], ", ".join(sorted({"k_proj", "o_proj"} - called))
        table.notes.append(f"{key}: predicted with adapters of all matrices of attention, {left_out} too")
    if called and not attention and not mlp:
        table.notes.append(f"{table.keys['lora_targets']}={_short(value)}: not among known names; predicted as attention's")
    return "both" if attention and mlp else "mlp" if mlp else "attention"


def _computation(table: TrainerTable) -> None:
    """Read recomputation and kernels."""
    option = next(option for option in table.program.options if option.knob == "activation_checkpointing")
    value = table.field("activation_checkpointing")
    negated = option.words is not None and option.words["full"] is False
    is_on = str(value).lower() in (("false", "none") if negated else ("true", "1", "offload", "offload_disk"))
    if is_on or table.knobs.get("activation_checkpointing") is None:
        table.set("activation_checkpointing", "full" if is_on else "none", table.keys.get("activation_checkpointing", ""))
    if str(value).startswith("offload") or table.on("offload_activations"):
        table.set("offload_activations", True, table.keys.get("offload_activations", ""))
    attention = str(table.field("attention_backend") or "sdpa")
    backend = ATTENTION.get(attention) or ("flash" if "flash" in attention else None)
    if backend is None:
        table.notes.append(f"{table.keys['attention_backend']}={attention}: predicted as sdpa")
    table.set("attention_backend", backend or "best", table.keys.get("attention_backend", ""))
    if table.on("pack_sequences"):
        table.set("pack_sequences", True, table.keys["pack_sequences"])
    if table.on("fused_kernels"):
        table.set("fused_kernels", LIGER, table.keys["fused_kernels"])
    if table.on("compile_blocks"):
        table.set("compile_blocks", True, table.keys["compile_blocks"])


def _optimizer(table: TrainerTable) -> str | None:
    """Read the optimizer; returns its name; None: it is none of ours."""
    name = str(table.field("optimizer"))
    optimizer = OPTIMIZERS.get(name)
    if optimizer is None:
        table.notes.append(f"{table.keys.get('optimizer', 'optim')}={name}: not among ours; predicted with the states of AdamW")
        table.assumed["optimizer"] = "adamw"
        return None
    table.set("optimizer", optimizer, table.keys.get("optimizer", ""))
    if name.startswith("paged_"):
        table.notes.append(f"{table.keys['optimizer']}={name}: its pages are counted as memory of the device")
    if name == "adamw_torch":
        table.set("fused_optimizer", False, table.keys.get("optimizer", ""))
    return optimizer
