"""Reads a configuration file of another framework, and detects which framework it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import RequestError
from autotune.imports.accelerate import from_accelerate
from autotune.imports.best_config import from_best_config
from autotune.imports.deepspeed import from_deepspeed
from autotune.imports.imported import Imported
from search_spaces.file_kinds import kind_of
from search_spaces.plugins import Group, load_plugins

ACCELERATE = frozenset({"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config", "megatron_lm_config"})
DEEPSPEED = frozenset({"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16"})
BEST_CONFIG = frozenset({"schema_version", "best"})
REMEDY = "give a DeepSpeed configuration (JSON), a file of `accelerate config` (YAML), or a best-config.json"


def read_imported(path: Path) -> Imported:
    """Read the file; its keys decide the format.

    Raises:
        RequestError: the file cannot be read, has none of the three formats, or has an invalid value.
    """
    content = read_table(path)
    if content.keys() >= BEST_CONFIG:
        return from_best_config(content, path.name)
    if ACCELERATE & content.keys():
        return from_accelerate(content, path, read_table)
    if DEEPSPEED & content.keys():
        return from_deepspeed(content, path.name)
    for importer in load_plugins(Group.IMPORTERS).values():
        imported: Imported | None = importer(content, path.name)
        if imported is not None:
            return imported
    kind = kind_of(content)
    problem = f"{path} is {kind}" if kind else f"{path} has none of the keys of DeepSpeed or Accelerate"
    raise RequestError("from", problem, REMEDY)


def read_table(path: Path) -> Mapping[str, Any]:
    """Return the file's table: JSON if the suffix is `.json`, else YAML.

    Raises:
        RequestError: the file cannot be read, or does not hold a table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise RequestError("from", f"{path} cannot be read ({error.strerror})", REMEDY) from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RequestError("from", f"{path} is neither JSON nor YAML ({reason})", REMEDY) from error
    if not isinstance(content, Mapping):
        raise RequestError("from", f"{path} does not hold a table", REMEDY)
    return {str(key): value for key, value in content.items()}
