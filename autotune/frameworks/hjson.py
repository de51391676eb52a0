"""Hjson (https://hjson.github.io), as DeepSpeed reads its file: JSON with comments, commas at ends, bare keys and texts."""

import json
import re
from collections import Counter
from typing import Any

SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
LITERAL = re.compile(r"(true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)[^\S\n]*(?=[,\]}\n#]|//|/\*|$)")
BARE_KEY = re.compile(r"[^\s{}\[\],:]+")


class HjsonReader:
    """One reading of a text.

    Raises:
        ValueError: the text is not of this language.
        RecursionError: it is nested too deeply.
    """

    def __init__(self, text: str) -> None:
        self._text, self._position = text, 0
        self.repeated: list[str] = []
        """Keys that one table states twice."""
        self.content = self._document()

    def _document(self) -> Any:
        self._skip()
        braces = self._text.startswith(("{", "["), self._position)
        content = self._value() if braces else self._table("")
        self._skip()
        if self._position < len(self._text):
            raise self._error("nothing after the table")
        return content

    def _skip(self) -> str:
        """Go to the next character that means something, and return it; empty: the end."""
        match = SPACE.match(self._text, self._position)
        self._position = match.end() if match else self._position
        return self._text[self._position : self._position + 1]

    def _value(self) -> Any:
        first = self._skip()
        if first in ("{", "["):
            self._position += 1
            return self._table("}") if first == "{" else self._list()
        if self._text.startswith("'''", self._position):
            end = self._text.find("'''", self._position + 3)
            if end < 0:
                raise self._error("'''")
            text, self._position = self._text[self._position + 3 : end], end + 3
            return "\n".join(line.strip() for line in text.split("\n")).strip("\n")
        if first in ('"', "'"):
            return self._quoted()
        if match := LITERAL.match(self._text, self._position):
            self._position = match.end()
            return json.loads(match[1])
        line = self._text[self._position :].partition("\n")[0]
        if not line or first in ("}", "]", ",", ":"):
            raise self._error("a value")
        self._position += len(line)
        return line.strip()

    def _matched(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self._text, self._position)
        if match is None:
            raise self._error(expected)
        self._position = match.end()
        return match[0]

    def _quoted(self) -> str:
        text = self._matched(QUOTED, "the end of a text")
        if text.startswith("'"):
            text = '"' + text[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
        return str(json.loads(text, strict=False))

    def _list(self) -> list[Any]:
        items: list[Any] = []
        first = self._skip()
        while first != "]":
            items.append(self._value())
            first = self._next_item()
        self._position += 1
        return items

    def _table(self, end: str) -> dict[str, Any]:
        pairs: list[tuple[str, Any]] = []
        first = self._skip()
        while first != end:
            key = self._quoted() if first in ('"', "'") else self._matched(BARE_KEY, "a key")
            if self._skip() != ":":
                raise self._error(":")
            self._position += 1
            pairs.append((key, self._value()))
            first = self._next_item()
        self._position += len(end)
        self.repeated += [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        return dict(pairs)

    def _next_item(self) -> str:
        """Skip a comma, which is optional, and return the next character."""
        if self._skip() == ",":
            self._position += 1
        return self._skip()

    def _error(self, expected: str) -> ValueError:
        line = self._text.count("\n", 0, self._position) + 1
        return ValueError(f"line {line}: expected {expected}")
