"""Counts collectives that a rank waits for at the call: with `async_op=False` nothing overlaps with them on gloo.

Import it before modules that store torch's functions. Calls from C++, like DDP's, are not counted.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

FUNCTIONS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "broadcast", "reduce", "all_to_all", "all_to_all_single",
)  # fmt: skip


@dataclass(slots=True)
class Calls:
    """Counts since the last reset."""

    seen: int = 0
    waited: int = 0
    """Calls that waited for the result."""


CALLS = Calls()


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS.seen += 1
        CALLS.waited += not signature.bind_partial(*args, **kwargs).arguments.get("async_op", False)
        return function(*args, **kwargs)

    return call


for _name in FUNCTIONS:
    if hasattr(dist, _name):
        setattr(dist, _name, _counted(getattr(dist, _name)))
