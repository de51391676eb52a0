"""`autotune.report` and `autotune.batches`: how a training program of the user's own tells what it measured."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
VARIABLE = "AUTOTUNE_REPORT"


def report(**values: Any) -> None:
    """Append one JSON line with `values` and the time to the file that AUTOTUNE_REPORT names: after each optimizer step.

    `samples` is how many samples all ranks together have trained on since the last report. `loss` may be told too, and
    `waited`, the seconds of them in which this rank waited for data, where `batches` does not measure it. Numbers of torch and
    NumPy are taken as they are. The peak of torch's CUDA allocator is added where the program uses it.

    Does nothing where the variable is not set, so that the call can stay in a program that runs without autotune.

    Raises:
        TypeError: a value is not JSON.
        OSError: the file cannot be written.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    told = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    clocks = {"time": time.time(), "clock": time.monotonic()}
    waited = _waiting.told() if "samples" in told else {}  # a loss alone ends no step
    line = json.dumps({**clocks, **waited, **_device_memory(), **told})
    # One write of a whole line in append mode: lines of several ranks do not mix.
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def batches(loader: Iterable[T]) -> "Batches[T]":
    """The loader, with the time measured that is spent waiting for it: `for batch in autotune.batches(loader)`.

    The next `report` tells it. In all else it is the loader: `len`, and its attributes.
    """
    return Batches(loader)


class Batches(Generic[T]):
    """See `batches`."""

    def __init__(self, loader: Iterable[T]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        return timed(iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def timed(items: Iterator[T]) -> Iterator[T]:
    """The items, with the time measured that each takes to come."""
    while True:
        began = time.perf_counter()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            _waiting.add(time.perf_counter() - began)
        yield item


class _Waiting:
    """Seconds of waiting for data since the last report."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def add(self, seconds: float) -> None:
        self._seconds = (self._seconds or 0.0) + seconds

    def told(self) -> dict[str, float]:
        """What a report says of it; nothing where nothing is measured."""
        if self._seconds is None:
            return {}
        seconds, self._seconds = self._seconds, 0.0
        return {"waited": seconds}


_waiting = _Waiting()


def _device_memory() -> dict[str, int]:
    """Peaks of torch's own allocator, where the program has loaded torch and uses CUDA: nothing is imported for it."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    return {"device_bytes": cuda.max_memory_allocated(), "reserved_bytes": cuda.max_memory_reserved()}
