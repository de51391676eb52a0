"""`autotune report`: write a report of a job as one HTML file, or as Markdown."""

import sys
from pathlib import Path

from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.ops.output import require_writable, write_whole
from autotune.reports.formats import require_format
from autotune.text.visible_text import visible


def report_command(job: str | None, format_name: str | None, out: Path | None, url: str | None, database: str | None) -> Status:
    """Write the report to `out`, or Markdown to standard output without a path."""
    chosen = format_of(format_name, out)
    if out is not None:
        require_writable(out)
    with open_backend(url, database) as backend:
        text = backend.report(job, chosen)
    if out is None:
        sys.stdout.write(visible(text))
    else:
        write_whole(out, text)
    return Status.OK


def format_of(name: str | None, out: Path | None) -> str:
    """The given format, else by the path's suffix, else HTML.

    Raises:
        UnknownFormatError: there is no such format.
        RequestError: HTML (more than a megabyte) would go to standard output.
    """
    by_path = "md" if out is not None and out.suffix.lower() in (".md", ".markdown") else "html"
    chosen = name or by_path
    require_format(chosen)
    if chosen == "html" and out is None:
        raise RequestError("out", "is missing", "give --out FILE.html, or --format md for standard output")
    return chosen
