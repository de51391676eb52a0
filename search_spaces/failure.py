"""Classify failures: the rows of the failure table, and how they are matched."""

import dataclasses
import difflib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from search_spaces.errors import FailureTableError, PatternError
from search_spaces.outcome import Outcome
from search_spaces.patterns import compiled

LONGEST_PATTERN = 400
"""Maximum characters of a regular expression."""
MOST_PATTERNS = 100
"""Maximum number of regular expressions in all rows of a user's table."""
_PATTERNS = ("said", "message", "traceback", "output")


class Sign(StrEnum):
    """Evidence of a failure other than exceptions, exit codes and texts."""

    OOM_KILL = "oom_kill"
    """The kernel's OOM killer killed a process of the control group while the trial ran."""
    OUT_OF_REACH = "out_of_reach"
    """The worker or its node is gone, so it is unknown how the rank ended."""
    LEFTOVER = "leftover"
    """The memory that a warm process held in excess of a fresh one is at least what the allocator lacked."""
    HANG = "hang"
    """No rank made progress for much longer than a step takes."""
    TIME_LIMIT = "time_limit"
    """The trial exceeded its time limit."""
    NOT_MEASURED = "not_measured"
    """A user's script ended without an error and reported too few steps to time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence of how a rank or a script ended."""

    exceptions: tuple[str, ...] = ()
    """Names of the exception's class and its base classes; empty: there was no exception."""
    exit_code: int | None = None
    """Negative: the signal that ended it; None: it did not exit, or the code is unknown."""
    signs: tuple[Sign, ...] = ()
    message: str = ""
    """The exception as `Class: message`; for a script, the last line of its error."""
    traceback: str = ""
    output: str = ""
    """The last part of the process output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRow:
    """One row of the failure table. It matches if all of these hold:

    - one of `exceptions`, `exit_codes` and `signals` describes how the process ended;
    - all of `signs` are present;
    - one pattern of `said`, `message`, `traceback` and `output` is found.

    Empty fields are not checked; a row without criteria matches everything.

    Raises:
        FailureTableError: a field is invalid; the message names row and field.
    """

    name: str
    outcome: Outcome
    remedy: str
    """What the user should do, in one line."""
    exceptions: tuple[str, ...] = ()
    """Class names without modules; a base class also matches its subclasses."""
    exit_codes: tuple[int, ...] = ()
    signals: tuple[str, ...] = ()
    """Names, such as SIGKILL."""
    signs: tuple[Sign, ...] = ()
    said: tuple[str, ...] = ()
    """Regular expressions for both message and output; ^ and $ match at line boundaries."""
    message: tuple[str, ...] = ()
    """Regular expressions for `Class: message`."""
    traceback: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    """Regular expressions for the last part of the process output."""
    retries: int = 0
    """Maximum further attempts of the trial; earlier attempts with the same outcome count."""
    verify: bool = False
    """Whether the next attempt runs in fresh processes with no other trial: the outcome is kept only if it fails again."""
    quarantine: bool = False
    """Whether the node gets no further trial of this job."""
    retire: bool = False
    """Whether the rank processes are ended, whatever the outcome, because they may be unusable."""
    consequence: bool = False
    """Whether this usually follows from another rank's failure, which is then reported instead."""

    def __post_init__(self) -> None:
        self._require(bool(self.name), "name", "is empty", "give the row a name")
        problem = f"{self.outcome} is not the outcome of a failure"
        # Outcomes that a row may assign. Rules and users decide the other outcomes.
        outcomes = (Outcome.INFEASIBLE, Outcome.FAILED, Outcome.TIMEOUT, Outcome.LOST, Outcome.PREEMPTED)
        self._require(self.outcome in outcomes, "outcome", problem, f"use one of {', '.join(outcomes)}")
        self._require(isinstance(self.remedy, str) and bool(self.remedy), "remedy", "is empty", "say in one line what to do")
        whole = isinstance(self.retries, int) and not isinstance(self.retries, bool) and self.retries >= 0
        self._require(whole, "retries", f"{self.retries!r} is not a number of attempts", "give 0 or more")
        for name in ("verify", "quarantine", "retire", "consequence"):
            value = getattr(self, name)
            self._require(isinstance(value, bool), name, f"{value!r} is not a boolean", "give true or false")
        needs = not self.verify or self.retries > 0
        self._require(needs, "verify", "needs an attempt to verify with", "give retries of 1 or more")
        for name in self.exceptions:
            self._require(isinstance(name, str), "exceptions", f"{name!r} is not a class name", "give names")
        for name in self.signals:
            is_signal = isinstance(name, str) and name in signal.Signals.__members__
            self._require(is_signal, "signals", f"{name!r} is not a signal", "write SIGKILL, SIGTERM, …")
        for code in self.exit_codes:
            self._require(isinstance(code, int), "exit_codes", f"{code!r} is not an exit code", "give numbers")
        for field in _PATTERNS:
            for pattern in getattr(self, field):
                self._require_pattern(field, pattern)

    def matches(self, evidence: Evidence) -> bool:
        """Whether all criteria of the row hold."""
        return self._matches_end(evidence) and set(self.signs) <= set(evidence.signs) and self._matches_text(evidence)

    def line_in(self, text: str) -> str:
        """The last line of a text that matches one of the patterns for messages and output; empty: none."""
        patterns = [compiled(pattern) for pattern in (*self.said, *self.message, *self.output)]
        lines = (line.strip() for line in reversed(text.splitlines()))
        return next((line for line in lines if any(pattern.found_in(line) for pattern in patterns)), "")

    def _matches_end(self, evidence: Evidence) -> bool:
        if not (self.exceptions or self.exit_codes or self.signals):
            return True
        code = evidence.exit_code
        by_signal = code is not None and code < 0 and _signal_name(-code) in self.signals
        return by_signal or code in self.exit_codes or not set(self.exceptions).isdisjoint(evidence.exceptions)

    def _matches_text(self, evidence: Evidence) -> bool:
        texts = {"message": evidence.message, "traceback": evidence.traceback, "output": evidence.output}
        searches = [(pattern, text) for field, text in texts.items() for pattern in getattr(self, field)]
        searches += [(pattern, text) for text in (evidence.message, evidence.output) for pattern in self.said]
        return not searches or any(compiled(pattern).found_in(text) for pattern, text in searches)

    def _require_pattern(self, field: str, pattern: Any) -> None:
        short = isinstance(pattern, str) and 0 < len(pattern) <= LONGEST_PATTERN
        self._require(
            short, field, f"{pattern!r} is not a regular expression", f"give text of up to {LONGEST_PATTERN} characters"
        )
        try:
            compiled(pattern)
        except PatternError as error:
            raise FailureTableError(f"failures.{self.name}.{field}", error.problem, error.remedy) from error

    def _require(self, holds: bool, field: str, problem: str, remedy: str) -> None:
        if not holds:
            raise FailureTableError(f"failures.{self.name}.{field}" if self.name else "failures", problem, remedy)


@dataclass(frozen=True, slots=True)
class FailureTable:
    """Rows in the order in which they are checked. The last row matches everything."""

    rows: tuple[FailureRow, ...]

    def find(self, *evidence: Evidence) -> tuple[FailureRow, Evidence]:
        """The first row that matches one of the pieces of evidence, and that piece. The causes of an error are pieces too.

        Raises:
            LookupError: no row matches.
        """
        for row in self.rows:
            for piece in evidence:
                if row.matches(piece):
                    return row, piece
        raise LookupError("no row of the failure table matches; its last row must have no criteria")

    def row(self, name: str | None) -> FailureRow | None:
        """The row with this name, if there is one."""
        return next((row for row in self.rows if row.name == name), None)

    def with_rows(self, rows: Sequence[FailureRow]) -> "FailureTable":
        """The table in which these rows replace rows of the same name; new rows are checked first."""
        replacements = {row.name: row for row in rows}
        names = {row.name for row in self.rows}
        new = [row for row in rows if row.name not in names]
        return FailureTable((*new, *(replacements.get(row.name, row) for row in self.rows)))


def rows_from(tables: Any, base: FailureTable) -> tuple[FailureRow, ...]:
    """The rows described by a file's tables: name -> fields. A row that exists in `base` keeps the fields that are not given.

    Raises:
        FailureTableError: a row is invalid; the message names row and field.
    """
    if not isinstance(tables, Mapping):
        raise FailureTableError("failures", "is not a table of rows", "write [ROW] and its fields below it")
    fields = [row.get(field) for row in tables.values() if isinstance(row, Mapping) for field in _PATTERNS]
    _require_few(sum(len(patterns) for patterns in fields if isinstance(patterns, list | tuple)))
    rows = tuple(_row(str(name), fields, base.row(str(name))) for name, fields in tables.items())
    require_small(rows)
    return rows


def require_small(rows: Sequence[FailureRow]) -> None:
    """Refuse rows that would take too long to match.

    Raises:
        FailureTableError: they have too many regular expressions, or too large ones.
    """
    patterns = [pattern for row in rows for field in _PATTERNS for pattern in getattr(row, field)]
    _require_few(len(patterns))
    size = sum(compiled(pattern).instructions for pattern in patterns)
    # Maximum total RE2 instructions of these (`search_spaces.patterns`): all are searched in each failure.
    most_instructions = 5_000
    if size > most_instructions:
        problem = f"regular expressions have {size:,} RE2 instructions in total; the limit is {most_instructions:,}"
        raise FailureTableError("failures", problem, "repeat less: .{100} is nearly a thousand")


def _require_few(count: int) -> None:
    if count > MOST_PATTERNS:
        problem = f"has {count:,} regular expressions; the limit is {MOST_PATTERNS}"
        raise FailureTableError("failures", problem, "join some with |, or leave some out")


_FIELDS = tuple(item.name for item in dataclasses.fields(FailureRow) if item.name != "name")


def _row(name: str, fields: Any, base: FailureRow | None) -> FailureRow:
    table_name = f"failures.{name}"
    if not isinstance(fields, Mapping):
        raise FailureTableError(table_name, f"{fields!r} is not a row", f"write [{name}] and its fields below it")
    values: dict[str, Any] = {} if base is None else {item: getattr(base, item) for item in _FIELDS}
    lists = ("exceptions", "exit_codes", "signals", "signs", *_PATTERNS)
    for field, value in fields.items():
        if field not in _FIELDS:
            matches = difflib.get_close_matches(field, _FIELDS, n=1)
            remedy = f"did you mean {matches[0]}?" if matches else f"use some of {', '.join(_FIELDS)}"
            raise FailureTableError(f"{table_name}.{field}", "is not a field of a row", remedy)
        if field in lists and not isinstance(value, list | tuple):
            raise FailureTableError(f"{table_name}.{field}", f"{value!r} is not a list", "write [ … ]")
        values[field] = tuple(value) if field in lists else value
    for field in ("outcome", "remedy"):
        if field not in values:
            raise FailureTableError(f"{table_name}.{field}", "is missing", "a row of a new name needs outcome and remedy")
    values["outcome"] = _member(table_name, "outcome", Outcome, values["outcome"])
    values["signs"] = tuple(_member(table_name, "signs", Sign, sign) for sign in values.get("signs", ()))
    return FailureRow(name=name, **values)


def _member(table_name: str, field: str, kind: type[StrEnum], value: Any) -> Any:
    if value not in list(kind):
        raise FailureTableError(f"{table_name}.{field}", f"{value!r} is not known", f"use one of {', '.join(kind)}")
    return kind(value)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
