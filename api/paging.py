"""Splits lists into pages of bounded size in bytes."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import Response
from pydantic_core import to_json

T = TypeVar("T")

MOST_BYTES = 4_000_000
"""Most bytes of the items of one response. A longer item gets its own page."""
READ_AT_ONCE = 100
"""Most items that are read at once, before their bytes are counted."""


def page(
    read: Callable[[int, int], Sequence[T]],
    start: int,
    limit: int,
    encode: Callable[[T], bytes],
    following: Callable[[T], int],
) -> tuple[list[bytes], int, bool]:
    """Return up to `limit` encoded items, the start of the next page, and whether that page has items.

    Args:
        read: returns items from a start (first argument), at most as many as the second argument.
        start: the start of this page.
        limit: most items.
        encode: encodes an item as JSON.
        following: returns the start that follows an item.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        batch_size = min(READ_AT_ONCE, limit + 1 - len(parts))
        items = read(start, batch_size)
        for item in items:
            part = encode(item)
            if len(parts) == limit or (parts and size + len(part) > MOST_BYTES):
                return parts, start, True
            parts.append(part)
            size += len(part)
            start = following(item)
        if len(items) < batch_size:
            return parts, start, False


def page_response(parts: Sequence[bytes], following: str | int | None) -> Response:
    """The response of a list: its items, and `next`."""
    body = b'{"items":[' + b",".join(parts) + b'],"next":' + to_json(following) + b"}"
    return Response(body, media_type="application/json")
