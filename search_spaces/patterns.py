"""User-supplied regular expressions, matched by RE2 in time linear in the text for any expression.

Python's engine backtracks: `(?:(?:.|.)*)*x` on one line practically never ends, and blocks the whole process because the engine
holds the GIL. RE2 does not backtrack, and has no lookaround and no backreferences. Only rank processes may run without RE2, on
nodes that only have torch: they use Python's engine, and a rank that makes no progress is ended as hanging.
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
"""Maximum characters of an expression."""
MOST_INSTRUCTIONS = 1000
"""Maximum size of an expression's RE2 program: a repetition such as `.{100}` is nearly a thousand. Search time is up to
instructions times bytes: half a second for this many in 142 kB."""
SEARCHED_BYTES = 65_536
"""Length of the end of a text in which an expression is searched."""
LINE_BYTES = 8_192
"""Length of the start of a log line that is searched, again after each match, for up to `LINE_MATCHES` matches."""
LINE_MATCHES = 100
_REMEDY = "write it as RE2 reads it, without lookaround and backreferences (github.com/google/re2/wiki/Syntax)"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression; ^ and $ match at line boundaries, and \\w, \\d, \\s match ASCII characters."""

    text: str
    instructions: int
    """Size of its RE2 program; 0 if RE2 is not installed."""
    groups: frozenset[str]
    """Names of its groups."""
    _engine: Any

    def found_in(self, text: str) -> bool:
        """Whether it matches in the end of the text."""
        return self._engine.search(text.encode("utf-8", "replace")[-SEARCHED_BYTES:]) is not None

    def readings(self, line: str) -> Iterator[dict[str, str]]:
        """The named groups of each match in the start of a line, without groups that did not participate."""
        matches = self._engine.finditer(line.encode("utf-8", "replace")[:LINE_BYTES])
        for match in islice(matches, LINE_MATCHES):
            yield {name: value.decode("utf-8", "replace") for name, value in match.groupdict().items() if value is not None}


_EVEN = r"(?<!\\)(?:\\\\)*"
_READ_DIFFERENTLY = (
    (re.compile(_EVEN + r"\{,[0-9]+\}"), ("has {,n}, which RE2 reads as literal text", "write {0,n}")),
    (re.compile(_EVEN + r"\[\^?\[:"), ("has a class of POSIX, which Python lacks", "write [a-z] or \\w")),
    (re.compile(_EVEN + r"\\[pPzCQ]"), ("has \\p, \\z, \\C or \\Q, which Python lacks", "write [a-z], $ or .")),
)
"""Syntax that RE2 and Python's engine silently interpret differently -> problem and remedy."""


@lru_cache(512)  # each takes a few kB until it is first searched
def compiled(pattern: str) -> Pattern:
    """Compile an expression.

    Raises:
        PatternError: RE2 cannot read it, or it is too large; the message names the expression and the remedy.
    """
    if not isinstance(pattern, str) or not 0 < len(pattern) <= LONGEST_PATTERN:
        shown = repr(pattern)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        problem = f"{shown} is not a regular expression"
        raise PatternError("pattern", problem, f"give text of up to {LONGEST_PATTERN} characters")
    for syntax, meaning in _READ_DIFFERENTLY:
        if syntax.search(pattern):
            raise PatternError("pattern", f"{pattern!r} {meaning[0]}", meaning[1])
    lines = f"(?m){pattern}".encode("utf-8", "replace")
    if re2 is None:
        return _of_python(pattern, lines)
    options = re2.Options()
    # Enough for the program of the expression; without memory for more states it continues without caching.
    options.max_mem, options.log_errors = 2**18, False
    try:
        engine = re2.compile(lines.decode(), options)  # as str, so that group names are str
    except re2.error as error:
        why = error.args[0]
        why = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)
        if "too large" in why:
            raise _too_large(pattern) from None
        raise PatternError("pattern", f"{pattern!r} is not a regular expression ({why})", _REMEDY) from None
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
        raise PatternError("pattern", f"{pattern!r} is not a regular expression ({error})", _REMEDY) from None
    return Pattern(pattern, 0, frozenset(engine.groupindex), engine)
