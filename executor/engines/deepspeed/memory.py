"""Finds the tensors that a DeepSpeed engine holds between steps, and tags each by its purpose."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from executor.engine import HOST
from search_spaces.trial_config import TrialConfig

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


def follow_gradients(module: nn.Module, follow: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Call `follow` with a parameter whenever a backward has computed its gradient. Returns the handles of the hooks."""
    trained: list[Any] = [value for value in module.parameters() if value.requires_grad]
    return [value.register_post_accumulate_grad_hook(follow) for value in trained]


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
