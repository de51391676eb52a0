"""Lists in pages that are bounded in bytes, whatever their items hold."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import Response
from pydantic_core import to_json

T = TypeVar("T")

MOST_BYTES = 4_000_000
"""Of the items of one answer. One that is longer is alone on its page."""
READ_AT_ONCE = 100
"""Items that are in memory before they are counted."""


def page(
    read: Callable[[int, int], Sequence[T]],
    start: int,
    limit: int,
    encode: Callable[[T], bytes],
    following: Callable[[T], int],
) -> tuple[list[bytes], int, bool]:
    """Return up to `limit` encoded items, where the next page starts, and whether it has any.

    Args:
        read: gives up to so many items (the second argument) from a start on.
        start: of this page, as `read` takes it.
        limit: items at most.
        encode: an item as JSON.
        following: the start of what comes after an item.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        wanted = min(READ_AT_ONCE, limit + 1 - len(parts))
        items = read(start, wanted)
        for item in items:
            part = encode(item)
            if len(parts) == limit or (parts and size + len(part) > MOST_BYTES):
                return parts, start, True
            parts.append(part)
            size += len(part)
            start = following(item)
        if len(items) < wanted:
            return parts, start, False


def page_response(parts: Sequence[bytes], following: str | int | None) -> Response:
    """The answer of a list: its items, and `next`."""
    body = b'{"items":[' + b",".join(parts) + b'],"next":' + to_json(following) + b"}"
    return Response(body, media_type="application/json")
