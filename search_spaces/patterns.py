"""Regular expressions that people write, matched by RE2: in time linear in the text, whatever the expression.

Python's engine backtracks. `(?:(?:.|.)*)*x` on one line takes longer than anybody waits, and nothing else of the process runs
meanwhile, because the engine holds the interpreter's lock. RE2 does not backtrack, and has no lookaround and no backreferences.
Only rank processes may run where RE2 is missing, on nodes with torch alone: Python's engine takes its place there, and a rank
that does not come on is ended as one that hangs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from search_spaces.errors import PatternError

try:
    import re2
except ImportError:
    re2 = None

LONGEST_PATTERN = 1000
"""Characters."""
MOST_INSTRUCTIONS = 1000
"""Of the program that RE2 makes of one expression: a repetition such as `.{100}` is nearly a thousand. A search takes up to
instructions times bytes: half a second for this many in 142 kB."""
SEARCHED_BYTES = 65_536
"""The end of a text in which an expression is searched."""
LINE_BYTES = 8_192
"""The beginning of a line of a log that is read. It is searched again after each match, for up to `LINE_MATCHES` matches."""
LINE_MATCHES = 100
_MEMORY_BYTES = 2**18
"""That RE2 takes for one expression: enough for its program; where it runs out of states it goes on without keeping them."""
_KEPT = 512
"""Expressions that stay compiled. Those that were not searched yet take some kB each."""
_REMEDY = "write it as RE2 reads it, without lookaround and backreferences (github.com/google/re2/wiki/Syntax)"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression; ^ and $ stand for the ends of lines, and \\w, \\d, \\s for characters of ASCII."""

    text: str
    instructions: int
    """What it costs; 0 where RE2 is missing."""
    groups: frozenset[str]
    """Names of its groups."""
    _engine: Any

    def found_in(self, text: str) -> bool:
        """Whether it is found in the end of the text."""
        return self._engine.search(text.encode("utf-8", "replace")[-SEARCHED_BYTES:]) is not None

    def readings(self, line: str) -> Iterator[dict[str, str]]:
        """The named groups of each match in the beginning of a line, without those that took no part."""
        matches = self._engine.finditer(line.encode("utf-8", "replace")[:LINE_BYTES])
        for match in islice(matches, LINE_MATCHES):
            yield {name: value.decode("utf-8", "replace") for name, value in match.groupdict().items() if value is not None}


_EVEN = r"(?<!\\)(?:\\\\)*"
_READ_DIFFERENTLY = (
    (re.compile(_EVEN + r"\{,[0-9]+\}"), ("has {,n}, which RE2 takes for text", "write {0,n}")),
    (re.compile(_EVEN + r"\[\^?\[:"), ("has a class of POSIX, which Python lacks", "write [a-z] or \\w")),
    (
        re.compile(_EVEN + r"\\[pPzCQ]"),
        ("has \\p, \\z, \\C or \\Q, which Python lacks", "write [a-z], $ or ."),
    ),
)
"""What RE2 and Python's engine, which ranks without RE2 use, read differently without a word: the problem, and the remedy."""


@lru_cache(_KEPT)
def compiled(pattern: str) -> Pattern:
    """The expression, ready to be searched.

    Raises:
        PatternError: RE2 cannot read it, or it is too large; the line names the expression and the remedy.
    """
    if not isinstance(pattern, str) or not 0 < len(pattern) <= LONGEST_PATTERN:
        shown = repr(pattern)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        told = f"{shown} is no regular expression"
        raise PatternError("pattern", told, f"give text of up to {LONGEST_PATTERN} characters")
    for found, meaning in _READ_DIFFERENTLY:
        if found.search(pattern):
            raise PatternError("pattern", f"{pattern!r} {meaning[0]}", meaning[1])
    lines = f"(?m){pattern}".encode("utf-8", "replace")
    if re2 is None:
        return _of_python(pattern, lines)
    options = re2.Options()
    options.max_mem, options.log_errors = _MEMORY_BYTES, False
    try:
        engine = re2.compile(lines.decode(), options)  # as text, for then names of groups are text
    except re2.error as error:
        why = error.args[0]
        why = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)
        if "too large" in why:
            raise _too_large(pattern) from None
        raise PatternError("pattern", f"{pattern!r} is no regular expression ({why})", _REMEDY) from None
    if engine.programsize > MOST_INSTRUCTIONS:
        raise _too_large(pattern)
    return Pattern(pattern, engine.programsize, frozenset(engine.groupindex), engine)


def _too_large(pattern: str) -> PatternError:
    problem = f"{pattern!r} is too large ({MOST_INSTRUCTIONS:,} steps of RE2 at most)"
    return PatternError("pattern", problem, "repeat less: .{100} is nearly a thousand")


def _of_python(pattern: str, lines: bytes) -> Pattern:
    try:
        engine = re.compile(lines)
    except re.error as error:
        raise PatternError("pattern", f"{pattern!r} is no regular expression ({error})", _REMEDY) from None
    return Pattern(pattern, 0, frozenset(engine.groupindex), engine)
