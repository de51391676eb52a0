"""Recipes of programs that train with Hugging Face's Trainer: one reader for the Trainer and TRL, Axolotl and LLaMA-Factory.

A program's table says how it spells what the reader asks for: a knob, or a field that is none, such as the model. Settings that
change neither memory nor speed (datasets, logging, saving) are not read, and have no notes.
"""

import re
from collections.abc import Mapping
from typing import Any

from autotune.frameworks.best_config import Stated
from autotune.frameworks.imported import AUTO, Imported, model_named, named_file, reads_one_file, short_text, switch_of
from autotune.frameworks.peft import TRANSFORMERS
from autotune.frameworks.trainer_sharding import read_sharding
from autotune.frameworks.trainer_table import STARTED, TrainerTable
from search_spaces.errors import ModelFormatError, SearchSpaceError
from search_spaces.kernels import LIGER
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.models.huggingface import known_model, read_model_config, resolve_model
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
    ranks = read_sharding(table, model, precision, micro, steps)
    _adapters(table)
    _computation(table)
    optimizer = _optimizer(table)
    rates = {"lr": table.rate("lr") or None, "weight_decay": table.rate("weight_decay"), "clip": table.rate("clip")}
    hyperparameters = Stated(**rates, optimizer=optimizer)
    off: tuple[Any, ...] = (None, False, "", [])
    switched = {
        key: value
        for key, value in table.settings.items()
        if value not in off and switch_of(value) is not False and not (key.endswith("_size") and value == 1)
    }
    for key in table.program.methods:
        if key in switched:
            table.unpredicted(key, "predictions do not have this method of training", "predict full or lora")
    noted = (key for key in table.program.noted if key in switched)
    unread = [f"{key}={short_text(switched[key])}: changes memory or speed, and is not read" for key in noted]
    elsewhere = {option.key for option in table.program.options if option.knob in table.keys}  # by a section of FSDP
    elsewhere |= set() if table.knobs.get("precision") == "fp32" else {key for key in ("bf16",) if not table.on(key)}
    defaults = {key: value for key, value in table.defaults_taken.items() if key not in {*table.settings, *elsewhere}}
    taken = [f"{key}={value_text(value)}: default of {table.program.title}" for key, value in defaults.items()]
    table.drop(*table.settings)
    table.notes += unread + taken
    return table.imported(
        model=model, ranks=ranks, samples_per_rank=micro * steps, sequence_length=length,
        hyperparameters=hyperparameters, unreadable=table.problem,
    )  # fmt: skip


def _model(table: TrainerTable) -> ModelSpec | None:
    """The model of a config.json beside the recipe, else the known one, or the one in the hub's cache, of that name."""
    name = str(table.field("model") or "")
    is_id = re.fullmatch(r"(?=.{1,96}$)([\w-][\w.-]*/)?[\w-][\w.-]*(?<!\.json)", name) is not None
    model, problem = None, "the shape of this model is not known here"
    if reads_one_file() and not is_id:
        problem = "it is a path, and no file is read here"
    beside = named_file(table.path, f"{name}/config.json") if name and not reads_one_file() else None
    try:
        model = read_model_config(beside) if beside else known_model(name)
        if model is None or (beside is None and model.frozen_bits == 16):  # the presets' names have no bits
            model = model_named(name) or model
        if model is None and is_id and not reads_one_file():
            model = resolve_model(name)
    except ModelFormatError as error:
        problem = f"its config.json is not read ({error})"
    except SearchSpaceError:
        pass  # no such preset
    if name and model is None:
        table.notes.append(f"{table.keys['model']}={name}: {problem}; give --model")
    return model


def _precision(table: TrainerTable) -> Value | None:
    """The precision that the recipe states; None: neither it nor a default does."""
    for name in ("fp8", "bf16", "fp16"):
        # `auto`, or not stated: on devices that have it, and beside no other
        if table.on(name) and not ((table.field(name) == AUTO or name not in table.keys) and table.on("fp16")):
            return name
    words = {"bfloat16": "bf16", "float16": "fp16"}
    return words.get(str(table.field("dtype")).removeprefix("torch."))


def _adapters(table: TrainerTable) -> None:
    """Read LoRA and the bits of the frozen weights."""
    adapter = table.field("adapter")
    kind = "" if adapter is None else str(adapter).lower()
    signs_of_adapters, program = table.program.adapter_signs, str(table.settings.get(STARTED, ""))
    signs = [f"{key}={short_text(value)}" for key in signs_of_adapters if (value := table.settings.get(key)) not in (None, "")]
    by_name = re.search(r"(?<![a-z])q?lora(?![a-z])", program)
    if signs_of_adapters and not kind and (signs or by_name):
        kind = "lora"
        table.notes.append(f"{[*signs, program][0]}: predicted with adapters, although no switch of them is stated")
    if kind in ("", "none", "full") or switch_of(kind) is False:
        return
    if kind not in ("lora", "qlora") and switch_of(kind) is None:
        table.unpredicted(table.keys["adapter"], f"{kind} is a method that predictions do not have", "predict full or lora")
        return
    table.set("lora_rank", table.size("lora_rank"), table.keys.get("lora_rank", ""))
    table.set("lora_targets", _targets(table), table.keys.get("lora_targets", ""))
    for name, value in (("lora_rank", 16), ("lora_targets", "attention")):
        if signs_of_adapters and name not in table.keys:  # the default is of a program that is not known here
            del table.knobs[name]
            table.assumed[name] = value
    bits = 4 if table.on("load_in_4bit") else 8 if table.on("load_in_8bit") else table.size("frozen_bits", least=0)
    stated_by = next((key for name in ("load_in_4bit", "load_in_8bit", "frozen_bits") if (key := table.keys.get(name))), "")
    if signs_of_adapters and by_name and by_name[0] == "qlora" and not stated_by:
        table.assumed["frozen_dtype"] = "nf4"
    elif bits in (4, 8):
        table.set("frozen_dtype", "nf4" if bits == 4 else "int8", stated_by)
    elif bits not in (0, 16, 32):
        table.unpredicted(
            table.keys["frozen_bits"], f"weights of {bits} bits are not among those of predictions", "predict 4 or 8"
        )


def _targets(table: TrainerTable) -> str:
    """Which matrices have adapters: those of attention, of the MLP, or both."""
    value = table.field("lora_targets")
    if table.on("lora_all_linear"):
        table.keys["lora_targets"] = table.keys["lora_all_linear"]
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
        table.notes.append(f"{table.keys['lora_targets']}={short_text(value)}: not among known names; predicted as attention's")
    return "both" if attention and mlp else "mlp" if mlp else "attention"


def _computation(table: TrainerTable) -> None:
    """Read recomputation and kernels."""
    option = next(option for option in table.program.options if option.knob == "activation_checkpointing")
    negated = option.words is not None and option.words["full"] is False
    offloads = str(table.field("activation_checkpointing")).startswith(("offload", "unsloth"))
    is_on = offloads or table.on("activation_checkpointing") is not negated
    if is_on or table.knobs.get("activation_checkpointing") is None:
        table.set("activation_checkpointing", "full" if is_on else "none", table.keys.get("activation_checkpointing", ""))
    offloaded = table.field("offload_activations")
    if offloads or (offloaded not in (None, "none") and switch_of(offloaded) is not False):
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
    """Read the optimizer; returns its name; None: the recipe does not state it, or it is none of ours."""
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
    return optimizer if "optimizer" in table.keys else None
