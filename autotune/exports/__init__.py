"""Exports the best configuration to the formats of other frameworks."""

from collections.abc import Callable, Mapping
from typing import Any

from autotune.errors import UnknownFormatError
from autotune.exports.accelerate import export_accelerate_deepspeed, export_accelerate_fsdp
from autotune.exports.best_config_file import best_config_text
from autotune.exports.deepspeed import export_deepspeed
from autotune.exports.export import Export
from autotune.exports.launch import export_slurm, export_torchrun
from autotune.exports.lightning import export_lightning
from autotune.exports.megatron import export_megatron
from autotune.exports.ray_train import export_ray
from autotune.exports.torch_code import export_torch
from autotune.exports.torchtitan import export_torchtitan
from autotune.exports.transformers import export_transformers
from autotune.exports.winner import Winner, winner_of
from search_spaces.plugins import PluginGroup, load_plugin, plugin_names

Exporter = Callable[[dict[str, Any]], Export]


MAKERS: Mapping[str, Callable[[Winner], Export]] = {
    "deepspeed": export_deepspeed,
    "accelerate-fsdp": export_accelerate_fsdp,
    "accelerate-deepspeed": export_accelerate_deepspeed,
    "transformers": export_transformers,
    "torchtitan": export_torchtitan,
    "megatron": export_megatron,
    "lightning": export_lightning,
    "torch": export_torch,
}
"""Framework -> the function that makes its format; `jobs.request.SIMPLE_TARGETS` has the same names."""


def _reading(make: Callable[[Winner], Export]) -> Exporter:
    return lambda document: make(winner_of(document))


def _of_plugin(name: str) -> Exporter:
    """Loaded when it is used."""
    return lambda document: load_plugin(PluginGroup.EXPORTERS, name)(winner_of(document))


EXPORTERS: Mapping[str, Exporter] = {
    "json": lambda document: Export(text=best_config_text(document)),
    **{name: _reading(make) for name, make in MAKERS.items()},
    "ray": _reading(export_ray),
    "slurm": _reading(export_slurm),
    "torchrun": _reading(export_torchrun),
    **{name: _of_plugin(name) for name in plugin_names(PluginGroup.EXPORTERS)},
}
"""Format -> the function that makes it from a best-config document."""

__all__ = ["EXPORTERS", "MAKERS", "Export", "Exporter", "exporter"]


def exporter(name: str) -> Exporter:
    """Return the exporter of that name. The exporter raises what `winner_of` raises, and ExportRefusedError.

    Raises:
        UnknownFormatError: there is no exporter of that name.
    """
    if name not in EXPORTERS:
        raise UnknownFormatError("format", f"{name!r} is not known", f"use one of {', '.join(EXPORTERS)}")
    return EXPORTERS[name]
