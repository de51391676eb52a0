"""What holds for every test: garbage collections look at what the tests of a module made, not at all that others imported."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """Set aside what is there when a module begins: with torch and Ray imported, each full collection would take half a second.

    Services collect when they start, and measurements before they measure. Nothing stays set aside that a test may wait for:
    the garbage of earlier modules is collected first.
    """
    gc.collect()
    gc.freeze()
    yield
