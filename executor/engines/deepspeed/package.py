"""Loads DeepSpeed in a rank, lazily and without its launcher, silences it, and undoes its global changes after each trial."""

import contextlib
import functools
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.nn import functional

from executor.engine import RankContext
from executor.engines.deepspeed.capability import installed_version, unusable
from executor.engines.leftovers import VARIABLE, extensions_folder, remove_orphaned_memory
from executor.errors import EngineRefusalError


def load(context: RankContext) -> Any:
    """Return the package, ready to initialize an engine on this rank. The default process group must exist.

    Raises:
        EngineRefusalError: the package is not installed, or too old.
    """
    refusal = unusable(installed_version())
    if refusal is not None:
        raise EngineRefusalError(refusal.rule, f"engine deepspeed: {refusal.message}; {refusal.remedy}")
    _set_environment(context)
    package = _imported()
    with quiet():
        # Creates DeepSpeed's backend on the first call; the process group is the rank's.
        package.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
    return package


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence DeepSpeed, which prints layers, groups and settings on standard output."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Traces:
    """Global changes that a trial makes in this process, to be undone, since the next trial may use another engine.

    Stage 3 replaces `torch.nn.functional.linear`; process groups, the mesh and AutoTP's mode are global; and a cache and a list
    of stage 3 keep every module that they have seen alive, with all its tensors.
    """

    def __init__(self) -> None:
        self._linear = functional.linear
        self._groups = set(_process_groups())

    def remove(self, package: Any) -> None:
        """Undo the changes. Every rank must call it, with no collective in flight."""
        functional.linear = self._linear
        for group in [group for group in _process_groups() if group not in self._groups]:
            dist.destroy_process_group(group)
        package.utils.groups._release_process_group_references()
        package.set_autotp_mode(training=False)
        _forget_modules()


@contextlib.contextmanager
def some_group() -> Iterator[None]:
    """Ensure that a process group exists while DeepSpeed frees objects, which ask for a rank. If all groups were aborted after
    a failure, create one of this rank only."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def _process_groups() -> list[dist.ProcessGroup]:
    """Every process group of this process, in order of creation."""
    return list(dist.distributed_c10d._world.pg_map)


def _forget_modules() -> None:
    importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
    coordinator = importlib.import_module(
        "deepspeed.runtime.zero.partitioned_param_coordinator"
    ).PartitionedParameterCoordinator
    release = coordinator.__dict__.get("_PartitionedParameterCoordinator__params_to_release")
    # The cache is inside a wrapper that does not expose the wrapped function.
    for cell in getattr(release, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def _set_environment(context: RankContext) -> None:
    """Set the variables that DeepSpeed's launcher would set; the others were set when the rank joined its gang."""
    os.environ["DS_ACCELERATOR"] = context.device.type
    os.environ["LOCAL_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", str(context.world_size))
    if context.device.type == "cuda" and context.device.index is not None:
        # DeepSpeed uses the device of this index; if each rank sees only one device, the index is 0 on every rank.
        os.environ["LOCAL_RANK"] = str(context.device.index)
    os.environ.setdefault("LOCAL_RANK", str(context.rank))


@functools.lru_cache(maxsize=1)
def _imported() -> Any:
    """The package, imported on the first call, without the extension that it would compile for every rank."""
    remove_orphaned_memory()
    os.environ[VARIABLE] = str(extensions_folder())
    with quiet():
        package = importlib.import_module("deepspeed")
        # By its full name: the attribute `deepspeed.comm.torch` is torch itself. The shared-memory operator needs compilation,
        # leaves files of killed ranks behind, and bypasses the network that a trial must measure.
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
        # Import it here, since it takes seconds in the first trial of stage 1, 2 or 3, whose optimizers test for Muon.
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    package.logger.setLevel(logging.ERROR)
    for handler in package.logger.handlers:
        handler.setLevel(logging.ERROR)
        handler.setStream(sys.stderr)
    # DeepSpeed calls collectives by old names, and torch warns about that at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"deepspeed\.|torch\.distributed")
    return package
