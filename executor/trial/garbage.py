"""When Python collects reference cycles in a trial: by itself, or at chosen steps, the same on every rank."""

import contextlib
import gc
from collections.abc import Iterator

_YOUNG = 1
"""The oldest generation that is looked at: what outlives a collection is never looked at again, so that one stays short."""


@contextlib.contextmanager
def collected_by_steps(interval: int) -> Iterator[None]:
    """Inside, Python collects nothing by itself where `interval` (steps) is not 0; after it, as before.

    Everything that is alive is collected and put among the old first: what a model is made of is looked at in no step.
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
    """Collect what came lately, where this step is one of every `interval`."""
    if interval and step and step % interval == 0:
        gc.collect(_YOUNG)
