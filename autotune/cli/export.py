"""`autotune export`: write a job's best configuration in a framework's format."""

import sys
from pathlib import Path

from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.ops.output import require_writable, write_whole
from autotune.text.console import Console


def export_command(job: str | None, format_name: str, out: Path | None, url: str | None, database: str | None) -> Status:
    """Write the file to standard output or `out`, and notes on what the format cannot express to standard error."""
    if out is not None:
        require_writable(out)
    with open_backend(url, database) as backend:
        exported = backend.export(job, format_name)
    if out is None:
        sys.stdout.write(exported.text)
    else:
        write_whole(out, exported.text)
    for note in exported.notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    return Status.OK
