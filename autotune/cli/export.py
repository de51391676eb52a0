"""`autotune export`: a job's best configuration in a framework's format."""

import sys
from pathlib import Path

from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.ops.output import require_writable, write_whole
from autotune.text.console import Console


def export_command(job: str | None, format_name: str, out: Path | None, url: str | None, database: str | None) -> Status:
    """The file on standard output or at `out`; what the format cannot say on standard error."""
    if out is not None:
        require_writable(out)
    with open_backend(url, database) as desk:
        made = desk.export(job, format_name)
    if out is None:
        sys.stdout.write(made.text)
    else:
        write_whole(out, made.text)
    for note in made.notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    return Status.OK
