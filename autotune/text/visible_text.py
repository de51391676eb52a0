"""The output of trials and other untrusted text, as whole lines that are harmless for a terminal.

A terminal would obey escape sequences in the output of trials and the names of jobs: characters that would move the cursor or
hide text become visible."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from search_spaces.shared_records import LogPart

_VISIBLE = (
    # The Unicode block with a picture of each ASCII control character, such as ␛ for escape.
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
    | {0x7F: 0x2421}
    | dict.fromkeys([*range(0x80, 0xA0), 0x2028, 0x2029], 0xFFFD)
    # Characters that change the display order of other characters.
    | dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C], 0xFFFD)
)


def visible(text: str) -> str:
    """The text with pictures in place of control characters, except line breaks and tabs."""
    return text.translate(_VISIBLE)


def visible_line(text: str) -> str:
    """The same on one line: text after a line break could pass for a line of another origin."""
    return visible(text).replace("\n", "␊")


class LogText:
    """Assembles whole lines from parts, which may begin and end within a line. Lines can be prefixed with their rank.

    Extra lines mark the beginning of another attempt, and omitted output.
    """

    def __init__(self, with_ranks: bool) -> None:
        """
        Args:
            with_ranks: whether each line begins with its rank.
        """
        self._with_ranks = with_ranks
        self._attempt: int | None = None
        self._ends: dict[int, int] = {}
        """Attempt -> bytes that it had printed up to the end of its last part."""
        self._begun: dict[int, str] = {}
        """Rank -> its unfinished line."""

    def lines(self, parts: Iterable[LogPart], gaps: bool = True) -> Iterator[str]:
        """Yield the lines that the parts complete. `gaps`: mark missing parts as left out; False if they may be filtered."""
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
        """Yield the unfinished lines."""
        begun, self._begun = self._begun, {}
        for rank in sorted(begun):
            yield self._format(rank, begun[rank])

    def _of(self, part: LogPart) -> Iterator[str]:
        # Progress bars end lines with a carriage return. At the end of a part, it may be the first half of a Windows line end.
        *ended, begun = re.split(r"\r\n|\n|\r(?=.)", self._begun.pop(part.rank, "") + part.text, flags=re.DOTALL)
        if len(begun) > 16_384:  # some programs never end their lines
            ended, begun = [*ended, begun], ""
        if begun:
            self._begun[part.rank] = begun
        for line in ended:
            yield self._format(part.rank, line)

    def _format(self, rank: int, line: str) -> str:
        line = line.removesuffix("\r")
        return f"[rank {rank}] {line}" if self._with_ranks else line


def has_several_ranks(request: Mapping[str, Any]) -> bool:
    """Whether the trials of a job with this request have several ranks; True if the request does not state it."""
    cluster = request.get("resolved_cluster") or {}
    ranks = cluster.get("nodes", 0) * cluster.get("devices_per_node", 0) or request.get("ranks")
    return ranks != 1
