"""Plug-ins of other distributions, discovered through entry points.

A distribution declares an entry point in one of the groups of `PluginGroup`, for example in its pyproject.toml:

    [project.entry-points."autotune.strategies"]
    annealing = "my_package.annealing:AnnealingStrategy"

Plug-ins are part of the installation and are loaded without confirmation, as in pytest. `AUTOTUNE_PLUGINS=none` disables all.
"""

import os
from enum import StrEnum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from search_spaces.errors import PluginError

VARIABLE = "AUTOTUNE_PLUGINS"


class PluginGroup(StrEnum):
    """Entry-point groups, and the type of the objects in them."""

    KNOBS = "autotune.knobs"
    """A class of knobs, like those in `search_spaces.knobs`."""
    RULES = "autotune.rules"
    """A `search_spaces.capability.Rule`, or a tuple of them."""
    ENGINES = "autotune.engines"
    """An `executor.engine.Engine`, with the same name as its capability."""
    CAPABILITIES = "autotune.capabilities"
    """The `search_spaces.capability.Capability` of an engine, in a module that does not import torch."""
    STRATEGIES = "autotune.strategies"
    """Called with the score: returns an `autotune.strategies.strategy.Strategy`."""
    EXPORTERS = "autotune.exporters"
    """Called with an `autotune.frameworks.best_config.Winner`: returns an `autotune.frameworks.export.Export`."""
    IMPORTERS = "autotune.importers"
    """Called with the table of a file and the file's name: returns an `autotune.frameworks.imported.Imported`, or None if
    the file has another format."""
    TRACKERS = "autotune.trackers"
    """Called with an `autotune.trackers.tracker.TrackedJob` if its request names the tracker: returns an
    `autotune.trackers.tracker.Tracker`."""


@cache
def _found() -> dict[str, tuple[EntryPoint, ...]]:
    if os.environ.get(VARIABLE, "").lower() == "none":
        return {}
    points = entry_points()
    return {group: tuple(sorted(points.select(group=group), key=lambda point: point.name)) for group in PluginGroup}


def plugin_names(group: PluginGroup) -> tuple[str, ...]:
    """The names of a group's plug-ins, sorted. Does not import them."""
    return tuple(point.name for point in _found().get(group, ()))


def load_plugin(group: PluginGroup, name: str) -> Any:
    """Import one plug-in.

    Raises:
        PluginError: it is not installed, or cannot be imported.
    """
    for point in _found().get(group, ()):
        if point.name == name:
            try:
                return point.load()
            except Exception as error:
                source = point.dist.name if point.dist is not None else point.value
                problem = f"{point.value} of {source} cannot be loaded ({type(error).__name__}: {error})"
                raise PluginError(f"plug-in {name}", problem, f"repair or uninstall it, or set {VARIABLE}=none") from error
    raise PluginError(f"plug-in {name}", f"is not installed in the group {group}", "install its distribution")


def load_plugins(group: PluginGroup) -> dict[str, Any]:
    """Import all plug-ins of a group, by name. Raises as `load_plugin`."""
    return {name: load_plugin(group, name) for name in plugin_names(group)}
