"""Trackers by name."""

from collections.abc import Callable
from importlib import import_module

from autotune.request.component_names import require_installed
from autotune.trackers.tracker import TrackedJob, Tracker
from search_spaces.plugins import PluginGroup, load_plugin

BUILT_IN = {
    "wandb": "autotune.trackers.wandb_tracker:WandbTracker",
    "mlflow": "autotune.trackers.mlflow_tracker:MlflowTracker",
    "tensorboard": "autotune.trackers.tensorboard_tracker:TensorboardTracker",
}
"""Name -> module:attribute of the factory."""


def open_tracker(name: str, job: TrackedJob) -> Tracker:
    """Make the tracker of that name. Raises what `require_installed` and the tracker's library raise."""
    require_installed((name,))
    make: Callable[[TrackedJob], Tracker]
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        make = getattr(import_module(module), attribute)
    else:
        make = load_plugin(PluginGroup.TRACKERS, name)
    return make(job)
