"""DeepSpeed as a package in a rank: loaded lazily and without its launcher, silenced, undone after each trial; and the tensors
that its engine holds between steps, by purpose.
"""

import contextlib
import functools
import importlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from executor.engine import HOST, RankContext
from executor.engines.deepspeed.capability import installed_version, unusable
from executor.errors import EngineRefusalError
from executor.process_tree import EXTENSIONS_VARIABLE, extensions_folder, remove_orphaned_memory
from search_spaces.trial_config import TrialConfig


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
    os.environ[EXTENSIONS_VARIABLE] = str(extensions_folder())
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


_GRADIENT = re.compile("grad|ipg|bucket")
"""Matches names of attributes that hold gradients or the buffers in which gradients are reduced."""
_PARTITIONS = ("ds_tensor", "ds_secondary_tensor")
"""Attributes of a stage-3 parameter that hold this rank's partition of it."""


def held_tensors(engine: Any, config: TrialConfig, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its tag, once per storage. Offloaded tensors and those on another device are `HOST`.

    1. The module's parameters, this rank's partition of them, and their gradients.
    2. The master weights and the state of the wrapped optimizer.
    3. All other tensors reachable from DeepSpeed's objects: gradients by the name of their attribute, else buffers.
    """
    addresses: set[int] = set()
    for tag, value in _all(engine, config):
        address = value.untyped_storage().data_ptr()
        if address and address not in addresses:
            addresses.add(address)
            yield (tag if value.device.type == device.type else HOST), value


def follow_gathers(module: nn.Module, follow: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Call `follow` with a parameter whenever a forward is about to use it. Call this after DeepSpeed has added its hooks."""

    def before(used: nn.Module, _: object) -> None:
        for parameter in used.parameters(recurse=False):
            follow(parameter)

    return [
        child.register_forward_pre_hook(before)
        for child in module.modules()
        if any(True for _ in child.parameters(recurse=False))
    ]


def bucket_tensors(engine: Any) -> list[Tensor]:
    """The buffers in which a ZeRO optimizer collects gradients before it reduces them."""
    buckets = getattr(engine.optimizer, "ipg_buckets", {})
    buffers: list[Any] = [getattr(bucket, "buffer", None) for bucket in buckets.values()]
    return [value for buffer in buffers for value in (buffer if isinstance(buffer, list) else [buffer]) if _is_tensor(value)]


def _all(engine: Any, config: TrialConfig) -> Iterator[tuple[str, Tensor]]:
    share = HOST if config.offload_param != "none" else "parameters"
    state = HOST if config.offload_optimizer != "none" else "optimizer_state"
    for parameter in engine.module.parameters():
        if not is_partitioned(parameter):
            yield "parameters", parameter.data
        yield from ((share, getattr(parameter, name)) for name in _PARTITIONS if _is_tensor(getattr(parameter, name, None)))
        if parameter.grad is not None:
            yield "gradients", parameter.grad
    yield from (("buffers", buffer) for buffer in engine.module.buffers())
    inner = engine.basic_optimizer
    for group in inner.param_groups:
        for master in group["params"]:
            yield state, master.data
            if master.grad is not None:
                yield (HOST if state == HOST else "gradients"), master.grad
    for values in inner.state.values():
        yield from ((state, value) for value in values.values() if _is_tensor(value))
    yield from ((_tag(name, state), value) for name, value in _reached(engine))


def _tag(name: str, state: str) -> str:
    """Tag for the name of an attribute. Gradients of an offloaded optimizer are on the host, except those not yet copied."""
    if "fp32" in name:
        return state
    if state == HOST and any(word in name for word in ("cpu", "grad_partitions", "accumulated")):
        return HOST
    return "gradients" if _GRADIENT.search(name) else "buffers"


def _reached(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors reachable from DeepSpeed's objects, each with the name of the attribute that holds it."""
    visited: set[int] = set()
    todo: list[tuple[str, Any]] = [*vars(engine).items(), *vars(engine.optimizer).items()]
    while todo:
        name, value = todo.pop()
        if _is_tensor(value):
            if not is_partitioned(value):
                yield name, value
            if value.is_leaf and value.grad is not None:
                yield f"{name}.grad", value.grad
        elif id(value) not in visited:
            visited.add(id(value))
            todo += _children(name, value)


def _children(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        return []
    if isinstance(value, Mapping):
        return [(name, item) for item in list(value.values())]
    if isinstance(value, list | tuple | set) or type(value).__name__ == "deque":
        return [(name, item) for item in value]
    if type(value).__module__.startswith("deepspeed.") and hasattr(value, "__dict__"):
        # Keep a name that identifies gradients as a prefix: a bucket's `buffer` is a buffer of gradients.
        return [(f"{name}.{key}" if _GRADIENT.search(name) else key, item) for key, item in vars(value).items()]
    return []


def is_partitioned(parameter: Tensor) -> bool:
    """Whether stage 3 partitions it. If such a parameter is whole between steps, a step frees and reallocates that tensor."""
    return hasattr(parameter, _PARTITIONS[0])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided
