"""A recipe of the Trainer, TRL, Axolotl or LLaMA-Factory as fields of `autotune fit`: what it trains, not how it is divided."""

from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.read import FRAMEWORKS, read_written
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import known_model
from search_spaces.training.adapters import FROZEN_BITS, TARGETS

OF_WAYS = ("states", "sharding", "parameter_width", "whole_norms", "whole_tables")
"""Words of `Transformers` that a way of `fit` decides itself."""


def fields_of_recipe(path: Path, cluster: str | None) -> dict[str, Any]:
    """The fields that the recipe states: the model, the samples, adapters, and what the libraries do.

    Raises:
        RequestError: it cannot be read, is not of such a program, or names a model that is not known here.
    """
    written = read_written(path)[0]
    framework = FRAMEWORKS.get(written.format)
    if framework is None or framework.memory_arguments is None or written.format not in ("trainer", "axolotl", "llama-factory"):
        problem = f"{path} is no recipe of the Trainer, TRL, Axolotl or LLaMA-Factory"
        raise RequestError("from", problem, "give such a file, or state what you train by options")
    imported = written.read()
    if imported.unreadable is not None:
        raise imported.unreadable
    knobs, words = imported.knobs, framework.memory_arguments(imported.settings) or {}
    fields: dict[str, Any] = {
        "libraries": tuple(f"{name}={value.lower()}" for name, value in words.items() if name not in OF_WAYS),
        "training_steps": None,
    }
    if imported.model is not None and known_model(imported.model.name) is not None:
        fields["model"] = imported.model.name
    if imported.sequence_length is not None:
        fields["sequence_length"] = imported.sequence_length
    ranks = imported.ranks or (None if cluster in (None, "local", "ray") else resolve_cluster(cluster).world_size)
    if imported.samples_per_rank is not None and ranks is not None:
        fields["global_batch_size"] = imported.samples_per_rank * ranks
    if knobs.get("lora_rank"):
        targets = TARGETS[str(knobs.get("lora_targets", "attention"))]
        fields |= {
            "lora_rank": knobs["lora_rank"],
            "lora_targets": tuple(name for name in targets if "_" not in name),
            "frozen_bits": FROZEN_BITS[str(knobs.get("frozen_dtype", "same"))],
        }
    else:
        half = words.get("parameter_width") == "2"
        of_optimizer = ("full-8bit",) if knobs.get("optimizer") == "adamw8bit" else ("full-bf16",) if half else ("full",)
        fields["methods"] = of_optimizer
    return {name: value for name, value in fields.items() if value is not None}
