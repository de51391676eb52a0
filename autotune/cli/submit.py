"""`autotune submit`: a job for the workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cli.desk import open_desk
from autotune.cli.fields import request_fields
from autotune.cli.jobs import tell_submitted
from autotune.cli.status import Status
from autotune.cli.watch import watch_job
from autotune.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """What the command line gave."""

    fields: dict[str, Any]
    """Fields of the request that were given as options."""
    pins: tuple[str, ...]
    baseline: Path | None
    config: Path | None
    priority: int
    watch: bool
    url: str | None
    database: str | None
    json: bool


def submit_command(options: SubmitOptions) -> Status:
    """Open the job, and tell its id or follow it."""
    if options.watch and options.json:
        raise RequestError("json", "is one document, and --watch prints what happens", "leave one of them out")
    fields = request_fields(options.fields, options.pins, options.baseline, options.config)
    with open_desk(options.url, options.database) as desk:
        job = desk.submit(fields, options.priority)
        if options.watch:
            return watch_job(desk, job)
    tell_submitted(job, options.json)
    return Status.OK
