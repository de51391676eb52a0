"""A recipe of a program that trains with Hugging Face's Trainer as a table, read by the fields that its settings state."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.framework import Option
from autotune.frameworks.imported import AUTO, FlatTable, flat, named_file, read_table, switch_of
from autotune.frameworks.shell import LAUNCHER

STARTED = "launcher.program"
"""The name of the program that a script starts, as a setting."""


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
    adapter_signs: tuple[str, ...] = ()
    """Settings beside which adapters are trained although no switch says so. Empty: the switch alone decides."""
    quantised_words: Mapping[str, str] = field(default_factory=lambda: {"whole_norms": "true", "whole_tables": "true"})
    """Words of `Transformers` that its quantised models have if no setting states them: as PEFT prepares them."""
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
        """Whether a field is switched on.

        Raises:
            RequestError: the value is no switch.
        """
        value = self.field(name)
        switch = value == AUTO if value in (None, AUTO, "none", "None") else switch_of(value)
        if switch is None:
            raise RequestError(self.keys[name], f"{value!r} in {self.source} is not a boolean", "give true or false")
        return switch

    def size(self, name: str, least: int = 1) -> int:  # type: ignore[override]
        """A field that counts something; `least`: it is not stated.

        Raises:
            RequestError: the value is not a whole number, or is smaller.
        """
        value = self.field(name)
        try:
            number = least if value is None else math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not least <= number < math.inf or number != int(number):
            problem = f"{value!r} in {self.source} is not a whole number of at least {least}"
            raise RequestError(self.keys.get(name, name), problem, "give one")
        return int(number)

    def rate(self, name: str) -> float | None:
        """A field that is a number; None: it is not stated.

        Raises:
            RequestError: the value is no number.
        """
        value = self.field(name)
        try:
            return None if value is None else float(value)
        except (TypeError, ValueError):
            raise RequestError(self.keys[name], f"{value!r} in {self.source} is not a number", "give a number") from None

    def inner_table(self, name: str) -> Mapping[str, Any] | None:
        """The table that a field is, or that is in the file which it names; None: it is not stated, or is not there."""
        keys = [option.key for option in self.program.options if option.field == name]
        inside = {key.removeprefix(f"{begin}."): value for key, value in self.settings.items()
                  for begin in keys if key.startswith(f"{begin}.")}  # fmt: skip
        if inside:
            return inside
        value = self.field(name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                return dict(flat(json.loads(value)))
            except (ValueError, RecursionError):
                raise RequestError(self.keys[name], f"its text in {self.source} is not JSON", "write it as a table") from None
        if not isinstance(value, str):
            return None
        file = self.file(value, self.keys[name])
        return None if file is None else dict(flat(read_table(file)))

    def file(self, name: str, key: str) -> Path | None:
        """The file that a setting names, seen from the recipe's folder or from one above it, as repositories have it.

        If it is not there, its name may still say how it divides the states, which is assumed then; else nothing is predicted.
        """
        if (file := named_file(self.path, name)) is not None:
            return file
        word = re.search(r"(?:zero|stage|ds_z)_?-?([0-3])|(fsdp)|ddp|multi_gpu", name.lower())
        if word is None:
            self.unpredicted(key, f"{name} is not beside {self.source}", "put it where the recipe names it")
            return None
        self.assumed["zero_stage"] = int(word[1]) if word[1] else 3 if word[2] else 0
        if "offload" in name:
            self.assumed["offload_optimizer"] = "cpu"
        taken = f"predicted with zero_stage={self.assumed['zero_stage']}, as its name says"
        self.notes.append(f"{key}={name}: not beside {self.source}, {taken}")
        return None


DOUBLE = ("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quantization")
"""Switches of scales that are quantised too."""
REENTRANT = (
    "gradient_checkpointing_kwargs.use_reentrant", "gradient_checkpointing_use_reentrant", "use_reentrant_gc",
    "activation_checkpointing_kwargs.use_reentrant",
)  # fmt: skip


MOMENTS = {
    "adamw_8bit": "bnb8", "adamw_bnb_8bit": "bnb8", "paged_adamw_8bit": "bnb8", "paged_adamw_32bit": "bnb32",
    "paged_adamw": "bnb32", "adamw_torch_8bit": "ao8", "adamw_torch_4bit": "ao4",
}  # fmt: skip
"""`optim` of the Trainer -> `Transformers.moments`."""


def memory_arguments(settings: Mapping[str, Any], program: TrainingProgram) -> dict[str, str] | None:
    """The words of `Transformers`; None: a setting cannot be read.

    Accelerate puts parameters that FSDP divides in fp32 if precision is mixed. PEFT's preparation of quantised models leaves
    out those that FSDP divides.
    """
    table = TrainerTable(settings, "", program)
    try:
        half, quantised = table.on("bf16") or table.on("fp16"), table.on("load_in_4bit") or table.on("load_in_8bit")
        deepspeed = table.field("deepspeed") or settings.get(f"{LAUNCHER}use_deepspeed")
        fsdp = table.field("fsdp") or settings.get(f"{LAUNCHER}use_fsdp") or any(key.startswith("fsdp") for key in settings)
        optimizer, packs = str(table.field("optimizer")), table.on("pack_sequences")
    except RequestError:
        return None
    typed = table.field("dtype") is not None and "32" not in str(table.field("dtype"))
    loaded = program.loads_in_precision or typed or switch_of(settings.get("pure_bf16")) is True
    double = next((switch_of(settings[key]) for key in DOUBLE if key in settings), None)
    reentrant = next((switch_of(settings[key]) for key in REENTRANT if key in settings), True)
    version = 2 if str(settings.get("fsdp_version", settings.get("fsdp_config.fsdp_version", "1"))) == "2" else 1
    return {
        "states": "true",
        "sharding": "zero" if deepspeed else f"fsdp{version}" if fsdp else "none",
        "parameter_width": "2" if loaded and half and not fsdp else "4",
        "adapter_dropout": str(settings.get("lora_dropout", 0) not in (0, "0", "0.0", None)),
        "reentrant": str(reentrant is not False),
        "update": "foreach" if optimizer == "adamw_torch" else "fused",
        "moments": MOMENTS.get(optimizer, "torch"),
        "paged": str(optimizer.startswith("paged_")),
        "varying_lengths": str(not packs),
        **({"loss": "cut"} if switch_of(settings.get("cut_cross_entropy")) is True else {}),
        **(program.quantised_words if quantised and not fsdp else {}),
        **({} if double is None else {"double_quantised": str(double)}),
    }
