"""How a script starts a program that trains with the Trainer, and which program a table of settings is for."""

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.accelerate import OPTIONS as OF_ACCELERATE
from autotune.frameworks.axolotl import AXOLOTL
from autotune.frameworks.imported import flat, named_file, read_table
from autotune.frameworks.llama_factory import LLAMA_FACTORY
from autotune.frameworks.shell import LAUNCHER, Script
from autotune.frameworks.trainer_checks import COMMAND, TRAINER, fields_of
from autotune.frameworks.trainer_table import STARTED

TRAINERS = {framework.name: framework for framework in (TRAINER, AXOLOTL, LLAMA_FACTORY)}
OF_LAUNCHER = frozenset(option.key.rpartition(".")[2] for option in OF_ACCELERATE) | {
    "config_file", "use_deepspeed", "use_fsdp", "use_megatron_lm", "multi_gpu", "gpu_ids", "zero_stage",
    "deepspeed_config_file", "num_cpu_threads_per_process", "max_restarts", "rdzv_conf", "accelerate_config", "cpu",
}  # fmt: skip
"""Options of `accelerate launch`, which TRL's commands hand on."""


def trainer_format(keys: Collection[str]) -> str:
    """The format of a table with these keys; empty: it is no recipe of a trainer."""
    names = set(keys)
    if names & {"base_model", "sequence_len"} and names & {
        "sequence_len", "micro_batch_size", "datasets", "pretraining_dataset", "adapter", "sample_packing",
    }:  # fmt: skip
        return AXOLOTL.name
    batch = {"per_device_train_batch_size", "per_gpu_train_batch_size"}
    if names & {*batch, "model_name_or_path"} and names & {"stage", "finetuning_type", "cutoff_len", "dataset_dir", "template"}:
        return LLAMA_FACTORY.name
    if names >= {"tuner_type", "micro_batch_size"}:  # Megatron-SWIFT
        return ""
    trains = names & {"output_dir", "learning_rate", "dataset_name", "max_seq_length", "gradient_accumulation_steps"}
    return TRAINER.name if names & batch or (names & {"model_name_or_path", "tuner_type", "train_type"} and trains) else ""


def launched(script: Script, path: Path, format_name: str) -> tuple[str, dict[str, Any]]:
    """The format and the settings of the program that a script starts: those of the file that it names, which options override.

    Args:
        script: what was read of the script.
        path: of the script.
        format_name: the format that it is said to have; empty: the script decides it.

    Raises:
        RequestError: the file is not there, or is none, or no other file is read here.
    """
    settings, words = dict[str, Any](), script.arguments
    program = script.program.rsplit("/", 1)[-1]
    # Word that starts a program -> the format of its settings.
    programs = {
        "axolotl": AXOLOTL.name, "axolotl.cli.train": AXOLOTL.name, "llamafactory-cli": LLAMA_FACTORY.name, "trl": TRAINER.name,
    }  # fmt: skip
    kind = format_name or programs.get(program, "")
    for key, value in script.settings.items():
        name = key.removeprefix("--").replace("-", "_") if key.startswith("--") else key
        negated = name.startswith("no_") and value is True
        settings[name.removeprefix("no_") if negated else name] = False if negated else value
    kind = kind or trainer_format(settings)
    # `axolotl train FILE`, `train.py FILE`, and `--config FILE`
    positional = [word for word in itertools.takewhile(lambda word: not word.startswith("-"), words) if "=" not in word]
    # Programs whose first argument is a command.
    names = [*positional[program in ("axolotl", "llamafactory-cli", "trl", "swift") :][:1], str(settings.get("config"))]
    named = next((name for name in names if name.endswith((".yaml", ".yml", ".json"))), "")
    if named and (kind or script.program):
        content = _content(path, named, kind)
        kind = kind or trainer_format(content)
        settings = {**content, **settings} if kind else settings
    if kind == LLAMA_FACTORY.name:
        overrides = (word.partition("=") for word in words)
        settings |= {name: value for name, equals, value in overrides if equals and name.isidentifier() and name.islower()}
    if program == "trl":
        settings[COMMAND] = words[0] if words else ""
        known_fields = fields_of("transformers", "trl")
        moved = {key for key in settings if key in OF_LAUNCHER and key not in known_fields}
        settings = {f"{LAUNCHER}{key}" if key in moved else key: value for key, value in settings.items()}
    settings.pop("config", None)
    if script.program and kind == TRAINER.name:
        settings[STARTED] = Path(script.program).stem
    return kind, settings


def _content(path: Path, name: str, kind: str) -> dict[str, Any]:
    """The settings of the file that a script names; none if it is not there and nothing says that it is a recipe."""
    if (file := named_file(path, name)) is not None:
        return dict(flat(read_table(file)))
    if kind:
        raise RequestError("from", f"{path} names {name}, which is not there", "put it where the script names it")
    return {}
