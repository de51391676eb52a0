"""`autotune submit`: submit a job to the workers."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cli.fields import request_fields
from autotune.cli.jobs import print_submitted
from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status, print_note
from autotune.cli.watch import watch_job
from autotune.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """Parsed options of the command."""

    fields: dict[str, Any]
    """Request fields that were given as options."""
    imported: Path | None
    """A configuration of another framework that becomes the baseline."""
    stated: tuple[str, ...]
    """NAME=VALUE of variables and arguments of a script that is imported."""
    config: Path | None
    priority: int
    watch: bool
    url: str | None
    database: str | None
    json: bool


def submit_command(options: SubmitOptions) -> Status:
    """Submit the job, and print its id or follow it."""
    if options.watch and options.json:
        raise RequestError("json", "prints one document, but --watch prints events", "leave one of them out")
    fields = request_fields(options.fields, options.config)
    if options.imported is not None:
        from autotune.cli.imported import with_imported

        ranks = () if fields.get("ranks") is None else (int(fields["ranks"]),)
        fields = with_imported(
            fields, options.imported, options.stated, ranks, lambda line: print(line, file=sys.stderr)  # noqa: T201
        )  # fmt: skip
    if isinstance(fields.get("knowledge"), str):
        from autotune.session.knowledge import knowledge_content

        fields["knowledge"] = knowledge_content(fields["knowledge"], print_note, options.database)
    with open_backend(options.url, options.database) as backend:
        job = backend.submit(fields, options.priority)
        if options.watch:
            return watch_job(backend, job)
    print_submitted(job, options.json)
    return Status.OK
