"""Places for requests that compute for long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

PATIENCE_SECONDS = 5.0


async def _computing(request: Request) -> asyncio.Semaphore:
    places: asyncio.Semaphore = request.app.state.counting
    return places


Computing = Annotated[asyncio.Semaphore, Depends(_computing)]


@asynccontextmanager
async def place(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """One of the places for requests that compute for long. Who waits for one holds no thread."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await places.acquire()
    except TimeoutError:
        raise HTTPException(503, "too much is being computed; try again", {"Retry-After": "5"}) from None
    try:
        yield
    finally:
        places.release()
