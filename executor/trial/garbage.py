"""Decides when Python collects reference cycles in a trial: automatically, or at chosen steps, the same on every rank."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_by_steps(interval: int) -> Iterator[None]:
    """Disable automatic collection inside the block if `interval` (steps) is not 0; restore it afterwards.

    A full collection runs first, which moves all live objects to the oldest generation: no step scans the model's objects.
    """
    if not interval or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_at(step: int, interval: int) -> None:
    """Collect the young generations if this step is a multiple of `interval`."""
    if interval and step and step % interval == 0:
        # Not the oldest generation: objects that survive are never scanned again, so a collection stays short.
        gc.collect(1)
