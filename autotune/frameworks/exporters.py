"""The formats that a best configuration is exported to, and the part of a space that one expresses without loss."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autotune.errors import ExportRefusedError, RequestError, UnknownFormatError
from autotune.frameworks.accelerate import export_accelerate_deepspeed, export_accelerate_fsdp
from autotune.frameworks.best_config import Stated, Winner, best_config_text, winner_of
from autotune.frameworks.deepspeed import export_deepspeed
from autotune.frameworks.export import Export
from autotune.frameworks.fsdp2 import export_torch
from autotune.frameworks.launch import export_ray, export_slurm, export_torchrun
from autotune.frameworks.lightning import export_lightning
from autotune.frameworks.megatron_script import export_megatron
from autotune.frameworks.torchtitan import export_torchtitan
from autotune.frameworks.transformers import export_transformers
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.plugins import PluginGroup, load_plugin, plugin_names
from search_spaces.space import SearchSpace
from search_spaces.spaces import COMPILED, settled
from search_spaces.trial_config import TrialConfig

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


NEEDS = {
    "virtual_stages": ("pipeline_schedule",),
    "offload_optimizer": ("offload_param",),
    "offload_ratio": ("offload_optimizer", "offload_param"),
    "context_parallel_method": ("context_parallel_size",),
    "async_tensor_parallel": ("sequence_parallel",),
}
"""Knob -> further companions, without whose values no configuration with it is legal, or each has a note."""


def expressible(space: SearchSpace, target: str, pinned: frozenset[str] = frozenset()) -> SearchSpace:
    """The space without the values that the target's export cannot express.

    A value of a knob is kept if the export of some legal configuration with it has no note `KNOB=VALUE: …`: then it is
    neither left out, nor approximated, nor left to the user. A knob without kept values is not searched and keeps the value
    of the space's base. The micro-batch size is always kept: every framework has it, even if not in this file.

    Args:
        space: the space to reduce.
        target: one of `SIMPLE_TARGETS`.
        pinned: knobs with values from the user; at least one of these values must be kept.

    Raises:
        RequestError: the export can express no value of a pinned knob.
    """
    # Knobs that decide whether others matter. A value is tested with each of their values; of degrees, only 1 and one more.
    deciding = ("zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "virtual_stages", "activation_checkpointing")
    export, domains = MAKERS[target], dict(space.domains)
    for knob in space.domains.keys() - {"micro_batch_size"}:
        companions = [*_companions(space, (*deciding, *NEEDS.get(knob, ())))]
        expressibility = {value: _is_expressible(space, companions, export, knob, value) for value in space.domains[knob]}
        # A value without a tested legal configuration is kept if another value besides the base's is expressible.
        any_expressible = any(expressibility[value] for value in expressibility if value != getattr(space.base, knob))
        expressible_values = tuple(value for value, ok in expressibility.items() if (any_expressible if ok is None else ok))
        if not expressible_values and knob in pinned:
            problem = f"{target} has no place for {knob}={','.join(map(value_text, expressibility))}"
            raise RequestError("simple", problem, "leave that pin out, or --simple")
        domains[knob] = expressible_values
    return dataclasses.replace(space, domains={knob: values for knob, values in domains.items() if values})


def _companions(space: SearchSpace, names: Sequence[str]) -> Iterator[TrialConfig]:
    """The base combined with the values of these companion knobs, the simplest first."""
    most_values = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_stages": 2}
    choices = [
        [(name, value) for value in space.domains.get(name, (getattr(space.base, name),))[: most_values.get(name)]]
        for name in names
    ]
    for chosen in itertools.product(*choices):
        yield space.base.replace(dict(chosen))


def _is_expressible(
    space: SearchSpace, companions: list[TrialConfig], export: Callable[[Winner], Export], knob: str, value: Value
) -> bool | None:
    """Whether some legal configuration with the value exports without a note about the knob; None: no legal one was found."""
    found_legal = False
    # If blocks are compiled only by default, compilation is off in combination with knobs that exclude it.
    explicit = () if knob != COMPILED and False in space.domains.get(COMPILED, ()) else (COMPILED,)
    for companion in companions:
        config = space.canonical(settled(companion.replace({knob: value}), space.context, explicit))
        if getattr(config, knob) != value or space.check(config):
            continue
        found_legal = True
        noted = _noted(space, config, export)
        if noted is not None and knob not in noted:
            return True
    return False if found_legal else None


def is_lossless(space: SearchSpace, target: str, config: TrialConfig) -> bool:
    """Whether the configuration's export has no note about a searched knob, also none about combinations of them."""
    noted = _noted(space, config, MAKERS[target])
    return noted is not None and not noted & (space.domains.keys() - {"micro_batch_size"})


def _noted(space: SearchSpace, config: TrialConfig, export: Callable[[Winner], Export]) -> set[str] | None:
    """Knobs that the notes of a configuration's export mention; None: the export refuses the configuration."""
    winner = Winner(
        job="", config=config, baseline=None, model=space.model, workload=space.workload, engine="native",
        world_size=space.world_size, ranks_per_node=min(space.cluster.devices_per_node, space.world_size),
        on_gpus=space.cluster.device.kind == "cuda", verified="native-only", env={}, answer_for=None,
        hyperparameters=Stated(), script=(), launch="",
    )  # fmt: skip
    try:
        notes = export(winner).notes
    except ExportRefusedError:
        return None
    # Matches the knobs at the start of a note: `KNOB=VALUE: …`, or several.
    return {knob for note in notes for knob in re.findall(r"(?:^|, )([a-z_]+)=", note.partition(":")[0])}
