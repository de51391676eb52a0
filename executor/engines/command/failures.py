"""What the end of a script's output says of why it failed."""

import re
from dataclasses import dataclass

_OUT_OF_MEMORY = re.compile(
    r"""
    \bOutOfMemoryError\b            # torch, torch.cuda, ray
    | \b(?:CUDA|HIP|XPU|MPS|NPU)\ (?:error:\ )?out\ of\ memory\b
    | ^\s*MemoryError\b             # Python's own, and NumPy's by its traceback's last line
    | _ArrayMemoryError\b
    | can't\ allocate\ memory       # DefaultCPUAllocator
    | \bstd::bad_alloc\b
    | \[Errno\ 12\]
    | \bCU(?:BLAS|DNN)_STATUS_ALLOC_FAILED\b
    """,
    re.VERBOSE | re.MULTILINE,
)
_BROKEN_COLLECTIVE = re.compile(
    r"gloo/|Connection closed by peer|Connection reset by peer|Broken pipe|\bNCCL\b|DistBackendError|DistNetworkError|"
    r"Socket Timeout|connection was closed"
)
_PORT_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_TRACEBACK = "Traceback (most recent call last):"
_ERROR_LINE = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Iteration)|[A-Za-z_]\w*\.[\w.]+)(?::|$)"
)
"""The last line of a traceback: a class by its name, with or without its package."""
_RANK_MARK = re.compile(r"\[rank\d+\]:\s?")
"""torch puts it before the lines of an uncaught error."""
_PROGRESS = re.compile(r"^\s*\d+%\|")
"""A progress bar, which is drawn again and again on one line."""
MOST_LINES = 60
"""Of output that is shown where it holds no traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a script failed, as far as its output says."""

    line: str
    """The error in one line; empty: it printed nothing."""
    text: str
    """Its traceback, or the last lines of the output."""
    out_of_memory: bool
    collective: bool
    """Whether this looks like the consequence of another rank's end: then that rank's failure is the one to tell."""
    port_taken: bool
    """Whether another program has taken the port that was chosen for the script."""


def read_failure(tail: str) -> Failure:
    """What the end of the output says."""
    # A traceback may begin where a progress bar ended.
    plain = _RANK_MARK.sub("", tail).replace("\r", "\n").replace(_TRACEBACK, f"\n{_TRACEBACK}")
    text, line = _last_traceback(plain)
    memory = _OUT_OF_MEMORY.search(text)
    if memory is not None and not _OUT_OF_MEMORY.search(line):
        line = next(found for found in reversed(text.splitlines()) if _OUT_OF_MEMORY.search(found)).strip()
    return Failure(
        line=line,
        text=text,
        out_of_memory=memory is not None,
        collective=_BROKEN_COLLECTIVE.search(line) is not None,
        port_taken=_PORT_TAKEN.search(text) is not None,
    )


def _last_traceback(output: str) -> tuple[str, str]:
    """The last error with those that led to it, and its own line."""
    lines = output.splitlines()
    starts = [at for at, line in enumerate(lines) if line.strip() == _TRACEBACK]
    if not starts:
        shown = [line for line in lines if not _PROGRESS.match(line)][-MOST_LINES:]
        return "\n".join(shown), next((line.strip() for line in reversed(shown) if line.strip()), "")
    end = next((at for at in range(starts[-1] + 1, len(lines)) if _ERROR_LINE.match(lines[at])), len(lines) - 1)
    # What an error says may go on for lines; the interpreter's own words stand on its first.
    first = _first_of_chain(lines, starts)
    shown = [line for line in lines[first : end + 1 + MOST_LINES] if not _PROGRESS.match(line)]
    return "\n".join(shown), lines[end].strip()


def _first_of_chain(lines: list[str], starts: list[int]) -> int:
    """Where the first of the tracebacks begins that Python joins to the last one, in its own words."""
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = " ".join(lines[start:first])
        if "During handling of the above exception" not in between and "direct cause of the following" not in between:
            break
        first = start
    return first
