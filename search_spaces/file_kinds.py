"""Recognise a file's kind by its content, so that an error about a file of the wrong kind can name the actual kind."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEST_CONFIG = "a best-config.json"
MODEL_CONFIG = "a Hugging Face config.json"
DEEPSPEED = "a DeepSpeed configuration"
UNREAD = "which is not read"
LLAMA_FACTORY_1 = f"a recipe of LLaMA-Factory's v1, {UNREAD}"
NEMO_1 = f"a configuration of NeMo 1, {UNREAD}"
CLUSTER_FILE = "a description of a cluster"
SPACE_FILE = "a description of a space"
REQUEST_FILE = "a request (--config)"
KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    (BEST_CONFIG, frozenset({"schema_version", "best"})),
    ("an adapter_config.json", frozenset({"peft_type"})),
    (MODEL_CONFIG, frozenset({"model_type"})),
    (MODEL_CONFIG, frozenset({"architectures"})),
    (LLAMA_FACTORY_1, frozenset({"model", "dist_config"})),
    (LLAMA_FACTORY_1, frozenset({"model", "train_dataset"})),
    # Formats that spell some settings as DeepSpeed, torchtitan or Megatron-Bridge do, so they come before these.
    (f"a configuration of GPT-NeoX, {UNREAD}", frozenset({"pipe_parallel_size"})),
    (f"a configuration of GPT-NeoX, {UNREAD}", frozenset({"synchronize_each_layer"})),
    (f"a configuration of Nanotron, {UNREAD}", frozenset({"parallelism", "tokens"})),
    (f"a configuration of LLM Foundry, {UNREAD}", frozenset({"model", "train_loader"})),
    (f"a run of LLM Foundry, {UNREAD}", frozenset({"image", "command", "parameters"})),
    (f"a configuration of OLMo, {UNREAD}", frozenset({"model", "device_train_microbatch_size"})),
    (f"a configuration of Primus, {UNREAD}", frozenset({"modules", "workspace"})),
    (f"a configuration of NeuronX Distributed Training, {UNREAD}", frozenset({"trainer", "distributed_strategy"})),
    (NEMO_1, frozenset({"trainer", "exp_manager"})),
    (NEMO_1, frozenset({"trainer", "model"})),
    (DEEPSPEED, frozenset({"zero_optimization"})),
    (DEEPSPEED, frozenset({"train_batch_size"})),
    (DEEPSPEED, frozenset({"train_micro_batch_size_per_gpu"})),
    ("a file of `accelerate config`", frozenset({"distributed_type"})),
    (CLUSTER_FILE, frozenset({"devices_per_node"})),
    (SPACE_FILE, frozenset({"domains"})),
    (SPACE_FILE, frozenset({"extends"})),
    (f"a recipe of Megatron-SWIFT, {UNREAD}", frozenset({"model", "tuner_type", "micro_batch_size"})),
    (REQUEST_FILE, frozenset({"model"})),
)
"""Kind -> keys that such a file has; the first match decides."""


def kind_of(content: object) -> str:
    """Kind of a file with this content; empty: unknown."""
    if not isinstance(content, Mapping):
        return ""
    return next((kind for kind, keys in KINDS if keys <= {str(key).replace("-", "_") for key in content}), "")


def kind_of_file(path: Path) -> str:
    """Kind of the file; empty: unknown, or the file cannot be read."""
    endings = {".py": "Python source", ".sh": "a shell script", ".safetensors": "weights", ".bin": "weights", ".pt": "weights"}
    if path.suffix in endings:
        return endings[path.suffix]
    try:
        with path.open(encoding="utf-8") as file:
            # Maximum bytes read; configurations are smaller.
            text = file.read(4_000_000)
    except (OSError, ValueError):
        return ""
    return next(filter(None, (kind_of(content) for content in _readings(text))), "")


def mistaken(path: Path, expected: str) -> str:
    """`is a DeepSpeed configuration, not a best-config.json`; empty: the file is not of another known kind."""
    kind = kind_of_file(path)
    return f"is {kind}, not {expected}" if kind and kind != expected else ""


def _readings(text: str) -> list[Any]:
    """The text parsed as JSON, as TOML or, from the keys at the start of its lines, as YAML."""
    documents: list[Any] = []
    for read in (json.loads, tomllib.loads):
        try:
            documents.append(read(text))
        except ValueError:
            continue
    return documents or [dict.fromkeys(re.findall(r"^([A-Za-z_]\w*):", text, re.MULTILINE))]
