"""What the ranks of a trial printed, as lines of text."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from storage.log_records import LogRecord

HELD_CHARACTERS = 16_384
"""Of a line without an end, after which it is given as it is: some programs never end theirs."""
_ENDS = re.compile(r"\r\n|\n|\r(?=.)", re.DOTALL)
"""Progress bars end their lines with a carriage return. One at the end of a part may be half of a line's end on Windows."""


class LogText:
    """Makes whole lines of parts, which may begin and end within one; each says whose it is, where there are several.

    A line of its own tells where another attempt begins, and how much was left out.
    """

    def __init__(self, named: bool) -> None:
        """
        Args:
            named: whether each line begins with its rank.
        """
        self._named = named
        self._attempt: int | None = None
        self._ends: dict[int, int] = {}
        """Attempt -> bytes that it had printed up to the last part that was seen."""
        self._begun: dict[int, str] = {}
        """Rank -> its line that has no end yet."""

    def lines(self, parts: Iterable[LogRecord], gaps: bool = True) -> Iterator[str]:
        """The lines that the parts end. Without `gaps` parts may be missing for another reason than their age."""
        for part in parts:
            if part.attempt != self._attempt:
                yield from self.rest()
                if self._attempt is not None or part.attempt > 1:
                    yield f"--- attempt {part.attempt} ---"
                self._attempt = part.attempt
            missing = part.start - self._ends.get(part.attempt, 0)
            if gaps and missing > 0:
                yield from self.rest()
                yield f"--- {missing:,} bytes left out ---"
            self._ends[part.attempt] = part.start + part.size
            yield from self._of(part)

    def rest(self) -> Iterator[str]:
        """Lines that were begun and not ended."""
        begun, self._begun = self._begun, {}
        for rank in sorted(begun):
            yield self._told(rank, begun[rank])

    def _of(self, part: LogRecord) -> Iterator[str]:
        *ended, begun = _ENDS.split(self._begun.pop(part.rank, "") + part.text)
        if len(begun) > HELD_CHARACTERS:
            ended, begun = [*ended, begun], ""
        if begun:
            self._begun[part.rank] = begun
        for line in ended:
            yield self._told(part.rank, line)

    def _told(self, rank: int, line: str) -> str:
        line = line.removesuffix("\r")
        return f"[rank {rank}] {line}" if self._named else line


def has_several_ranks(request: Mapping[str, Any]) -> bool:
    """Whether the trials of a job with this request have several ranks, as far as it tells."""
    cluster = request.get("resolved_cluster") or {}
    ranks = cluster.get("nodes", 0) * cluster.get("devices_per_node", 0) or request.get("ranks")
    return ranks != 1
