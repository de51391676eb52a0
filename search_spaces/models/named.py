"""Models by name: presets, ids of the Hugging Face hub, and the configurations in the hub's cache on this machine."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from search_spaces.preset_files import preset_tables

VARIANTS = {
    "instruct", "it", "pt", "base", "chat", "hf", "deduped", "think", "thinking", "sft", "dpo", "unsloth", "bnb", "awq", "gptq",
    "4bit", "8bit", "int4", "int8", "fp8", "bf16", "mxfp4",
}  # fmt: skip
"""Words in names of models that do not change the shape."""
BITS = {"4bit": 4, "int4": 4, "awq": 4, "mxfp4": 4, "8bit": 8, "int8": 8, "fp8": 8}
"""Words in names of models with quantised weights, and their bits."""


def model_names() -> tuple[str, ...]:
    """The names of all known models: presets, and others of the same or a similar shape."""
    return tuple(dict.fromkeys([*preset_tables("models"), *preset_tables("model_names")["shapes"]]))


def named_config(text: str) -> tuple[dict[str, Any], str, int] | None:
    """The configuration of the model that a name or a hub's id means, the known name, and the bits of its weights (16: not
    quantised); None: it is unknown. Models of other organisations are not guessed by their names."""
    organisation, slash, name = text.lower().rpartition("/")
    if slash and organisation not in preset_tables("model_names")["organisations"]["names"]:
        return None
    names, words = model_names(), [word for word in re.split(r"[-_]", name) if word]
    if words[:1] == ["meta"]:
        words = words[1:]
    plain = [word for word in words if word not in VARIANTS]
    undated = [word for word in plain if not re.fullmatch(r"\d{4}", word)]
    bits = next((BITS[word] for word in words if word in BITS), 16)
    spellings = ("-".join(spelling) for spelling in (words, plain, undated))
    return next(((_config(spelling), spelling, bits) for spelling in spellings if spelling in names), None)


def _config(name: str) -> dict[str, Any]:
    if name in preset_tables("models"):
        return {**preset_tables("models")[name]}
    shape: Mapping[str, Any] = preset_tables("model_names")["shapes"][name]
    config = _config(shape["like"]) | {key: value for key, value in shape.items() if key != "like"}
    return {key: value for key, value in config.items() if not (key == "rope_theta" and value == 0)}


def cached_config(model_id: str) -> Path | None:
    """The config.json of a model in the hub's cache; None: it is not there. No network is used, and no weights are read."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model_id) is None:
        return None
    for folder in _caches():
        model = folder / f"models--{model_id.replace('/', '--')}"
        reference = model / "refs" / "main"
        current = reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""
        files = sorted(model.glob("snapshots/*/config.json"), key=lambda file: file.parent.name != current)
        if files:
            return files[0]
    return None


def cached_ids() -> tuple[str, ...]:
    """The ids of models whose config.json is in the hub's cache."""
    names = {file.parts[-4] for folder in _caches() for file in folder.glob("models--*--*/snapshots/*/config.json")}
    return tuple(sorted(name.removeprefix("models--").replace("--", "/", 1) for name in names))


def _caches() -> Iterator[Path]:
    """Where huggingface_hub looks, in its order."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(name):
            yield Path(value).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    yield Path(home).expanduser() / "hub"
