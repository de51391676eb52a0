"""A configuration file of another framework, whichever it is."""

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

ACCELERATE = frozenset({"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config", "megatron_lm_config"})
DEEPSPEED = frozenset({"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16"})
BEST_CONFIG = frozenset({"schema_version", "best"})
REMEDY = "give a DeepSpeed configuration (JSON), a file of `accelerate config` (YAML), or a best-config.json"


def read_imported(path: Path) -> Imported:
    """What the file says, by what keys it has.

    Raises:
        RequestError: it cannot be read, is none of the three, or has a value that cannot be.
    """
    content = read_table(path)
    if content.keys() >= BEST_CONFIG:
        return from_best_config(content, path.name)
    if ACCELERATE & content.keys():
        return from_accelerate(content, path, read_table)
    if DEEPSPEED & content.keys():
        return from_deepspeed(content, path.name)
    kind = kind_of(content)
    problem = f"{path} is {kind}" if kind else f"{path} has none of the keys of DeepSpeed or Accelerate"
    raise RequestError("from", problem, REMEDY)


def read_table(path: Path) -> Mapping[str, Any]:
    """The file's table, JSON or YAML by its ending.

    Raises:
        RequestError: it cannot be read, or holds no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise RequestError("from", f"{path} cannot be read ({error.strerror})", REMEDY) from error
    except (ValueError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())
        raise RequestError("from", f"{path} is neither JSON nor YAML ({told})", REMEDY) from error
    if not isinstance(content, Mapping):
        raise RequestError("from", f"{path} holds no table", REMEDY)
    return {str(key): value for key, value in content.items()}
