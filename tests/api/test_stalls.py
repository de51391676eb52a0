"""The detector of stalls sees one, and only what it should see."""

import asyncio
import time

import pytest

from tests.api.stalls import LIMIT_SECONDS, limit_now, noticed_stalls


@pytest.fixture(autouse=True)
def _no_stalls() -> None:
    """Here stalls are made."""


def computed(seconds: float) -> None:
    """Compute for so many CPU seconds of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.prove
def test_a_callback_that_computes_is_noticed() -> None:
    async def work() -> None:
        computed(1.5 * limit_now())

    with noticed_stalls() as stalls:
        asyncio.run(work())
    assert len(stalls) == 1 and "work" in stalls[0]


def test_threads_and_waiting_are_no_stalls() -> None:
    async def work() -> None:
        await asyncio.to_thread(computed, 1.2 * LIMIT_SECONDS)
        time.sleep(1.2 * LIMIT_SECONDS)

    with noticed_stalls() as stalls:
        asyncio.run(work())
    assert stalls == []
