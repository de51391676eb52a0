"""`autotune.report`, `autotune.paused` and `autotune.batches`: how a user's training program reports its measurements."""

import contextlib
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
    """Append a JSON line with `values` and the time to the file that AUTOTUNE_REPORT names. Call it after each optimizer step.

    `samples` is how many samples all ranks together have trained on since the last report. Optional values are `loss`, and
    `waited`, the seconds for which this rank waited for data, if `batches` does not measure it. Scalars of torch and NumPy are
    accepted. The peak of torch's CUDA allocator is added if the program uses CUDA.

    Does nothing if the variable is not set, so that the call can stay in a program that runs without autotune.

    Raises:
        TypeError: a value cannot be written as JSON.
        OSError: the file cannot be written.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    reported = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
    clocks = {"time": time.time(), "clock": time.monotonic()}
    line = json.dumps({**clocks, **_waiting.take(), **_device_memory(), **reported})
    # A single write of a whole line in append mode, so that lines of several ranks do not mix.
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leave time out of the step: `with autotune.paused():` around an evaluation or a checkpoint. Blocks are not nested."""
    began = time.monotonic()
    try:
        yield
    finally:
        report(paused=time.monotonic() - began)


def batches(loader: Iterable[T]) -> "Batches[T]":
    """Wrap the loader and measure the time spent waiting for it: `for batch in autotune.batches(loader)`.

    The next `report` includes this time. `len` and all attributes are those of the loader.
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
    """Yield the items, and measure the time that each takes to arrive."""
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

    def take(self) -> dict[str, float]:
        """Return the seconds for a report and reset them; empty if nothing is measured."""
        if self._seconds is None:
            return {}
        seconds, self._seconds = self._seconds, 0.0
        return {"waited": seconds}


_waiting = _Waiting()


def _device_memory() -> dict[str, int]:
    """Peaks of torch's allocator, if the program has loaded torch and uses CUDA. Imports nothing."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return {}
    return {"device_bytes": cuda.max_memory_allocated(), "reserved_bytes": cuda.max_memory_reserved()}
