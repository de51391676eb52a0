"""Finds the cause of a script's failure at the end of its output."""

import builtins
import re
from dataclasses import dataclass

from search_spaces.failure import Evidence, Sign

_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_TRACEBACK = "Traceback (most recent call last):"
_ERROR_LINE = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Iteration)|[A-Za-z_]\w*\.[\w.]+)(?::|$)"
)
"""The last line of a traceback: the name of a class, with or without its package."""
_RANK_MARK = re.compile(r"\[rank\d+\]:\s?")
"""torch's prefix for the lines of an uncaught error."""
_PROGRESS = re.compile(r"^\s*\d+%\|")
"""A progress bar, which is redrawn on one line."""
_HANDLER_WORDS = (
    "Fatal Python error: Aborted",
    "Extension modules: ",
    "Current thread's C stack trace",
    "Python runtime state",
)
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ ")
MOST_LINES = 60
"""Lines of output that are shown if it contains no traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The cause of a script's failure, according to its output."""

    line: str
    """The error in one line; empty: the script printed nothing."""
    text: str
    """Its traceback, or the last lines of the output."""
    port_taken: bool
    """Whether another program took the port that was chosen for the script."""
    raised: bool
    """Whether `text` is a traceback."""

    def evidence(self, exit_code: int | None, killed_for_memory: bool) -> Evidence:
        """The evidence to look up in the failure table."""
        return Evidence(
            exceptions=_classes(self.line) if self.raised else (),
            exit_code=exit_code,
            signs=(Sign.OOM_KILL,) if killed_for_memory else (),
            message=self.line,
            traceback=self.text if self.raised else "",
            output=self.text,
        )


def read_failure(tail: str) -> Failure:
    """Find the failure in the end of the output."""
    # A traceback may begin where a progress bar ended.
    plain = _RANK_MARK.sub("", tail).replace("\r", "\n").replace(_TRACEBACK, f"\n{_TRACEBACK}")
    text, line = _last_traceback(plain)
    return Failure(line=line, text=text, port_taken=_PORT_TAKEN.search(text) is not None, raised=_TRACEBACK in text)


def without_handler_words(text: str) -> str:
    """The stack traces that Python's fault handler printed, without its lines about the interpreter."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_HANDLER_WORDS)]
    return "\n".join(_THREAD.sub(r"\1 ", line) for line in lines)


def _last_traceback(output: str) -> tuple[str, str]:
    """The last error with the errors that it is chained to, and its own line."""
    lines = output.splitlines()
    starts = [at for at, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        shown = [line for line in lines if not _PROGRESS.match(line)][-MOST_LINES:]
        return "\n".join(shown), next((line.strip() for line in reversed(shown) if line.strip()), "")
    end = next((at for at in range(starts[-1] + 1, len(lines)) if _ERROR_LINE.match(lines[at])), len(lines) - 1)
    # An error's message may have several lines; the class name is on the first.
    first = _first_of_chain(lines, starts)
    shown = [line for line in lines[first : end + 1 + MOST_LINES] if not _PROGRESS.match(line)]
    return "\n".join(shown), lines[end].strip()


def _first_of_chain(lines: list[str], starts: list[int]) -> int:
    """Line index of the first traceback that Python chains to the last one."""
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = " ".join(lines[start:first])
        if "During handling of the above exception" not in between and "direct cause of the following" not in between:
            break
        first = start
    return first


def _classes(line: str) -> tuple[str, ...]:
    """The class named in a traceback's last line and, if it is a builtin, its base classes."""
    name = line.partition(":")[0].strip().rpartition(".")[2]
    kind = getattr(builtins, name, None)
    bases = kind.__mro__ if isinstance(kind, type) and issubclass(kind, BaseException) else (BaseException,)
    return tuple(dict.fromkeys((name, *(base.__name__ for base in bases))))
