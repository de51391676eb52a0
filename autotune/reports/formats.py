"""Writes a report in the requested format, for the command line and the service."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from autotune.errors import UnknownFormatError
from autotune.reports.report import report_of

if TYPE_CHECKING:
    from storage.store import Store

WRITERS: Mapping[str, tuple[str, str]] = {
    "html": ("autotune.reports.page", "page_of"),
    "md": ("autotune.reports.markdown", "markdown_of"),
}
"""Format -> the module and function that write it; imported on demand, since the page needs jinja2."""


def report_text(store: "Store", job: str | None, format_name: str) -> str:
    """Return the job's report.

    Args:
        store: the store that has the job.
        job: its id or a unique prefix; None: the latest job.
        format_name: one of `WRITERS`.

    Raises:
        UnknownFormatError: there is no such format.
        UnknownJobError: there is no such job.
    """
    require_format(format_name)
    module, function = WRITERS[format_name]
    text: str = getattr(import_module(module), function)(report_of(store, job, has_points=format_name == "html"))
    return text


def require_format(name: str) -> None:
    """Check that a report format exists.

    Raises:
        UnknownFormatError: there is no such format.
    """
    if name not in WRITERS:
        raise UnknownFormatError("format", f"{name!r} is not known", f"use {' or '.join(WRITERS)}")
