"""A bounded buffer for a stream: keeps its beginning and its end.

This file imports only the standard library: Ray carries it by value to its workers with `rank_output`.
"""

import collections
from typing import Generic, TypeVar

T = TypeVar("T")


class HeadAndTail(Generic[T]):
    """A queue of pieces of a stream. If they arrive faster than they are taken, the middle is dropped and its size counted."""

    def __init__(self, head: int, tail: int) -> None:
        """
        Args:
            head: size up to which the first pieces are kept.
            tail: size of the latest further pieces that are kept.
        """
        self._head_size, self._tail_size = head, tail
        self._empty()

    def add(self, item: T, size: int) -> None:
        """Append a piece."""
        if self._kept < self._head_size:
            self._head.append((0, item))
            self._kept += size
            return
        self._tail.append((size, item))
        self._length += size
        while self._length > self._tail_size and len(self._tail) > 1:
            dropped, _ = self._tail.popleft()
            self._length -= dropped
            self._left_out += dropped

    def take(self) -> list[tuple[int, T]]:
        """Remove and return the pieces in order, each with the size of what was dropped just before it."""
        rest = [(0, item) for _, item in self._tail]
        if rest:
            rest[0] = (self._left_out, rest[0][1])
        taken = [*self._head, *rest]
        self._empty()
        return taken

    def _empty(self) -> None:
        self._head: list[tuple[int, T]] = []
        self._tail: collections.deque[tuple[int, T]] = collections.deque()
        self._kept = self._length = self._left_out = 0
