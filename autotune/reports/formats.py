"""A report as the text of a file, in the format that was asked for: the same on the command line and over the service."""

from collections.abc import Mapping
from importlib import import_module

from autotune.errors import UnknownFormatError
from autotune.reports.report import report_of
from storage.store import Store

WRITERS: Mapping[str, tuple[str, str]] = {
    "html": ("autotune.reports.page", "page_of"),
    "md": ("autotune.reports.markdown", "markdown_of"),
}
"""Format -> the module and the function that write it; loaded when it is asked for, since the page needs the plots."""


def report_text(store: Store, job: str | None, format_name: str) -> str:
    """The job's report.

    Args:
        store: where the job is.
        job: its id or the beginning of it; None: the latest.
        format_name: one of `WRITERS`.

    Raises:
        UnknownFormatError: there is no such format.
        UnknownJobError: there is no such job.
    """
    require_format(format_name)
    module, function = WRITERS[format_name]
    text: str = getattr(import_module(module), function)(report_of(store, job))
    return text


def require_format(name: str) -> None:
    """Refuse a format that no report has.

    Raises:
        UnknownFormatError: there is no such format.
    """
    if name not in WRITERS:
        raise UnknownFormatError("format", f"there is none named {name}", f"use {' or '.join(WRITERS)}")
