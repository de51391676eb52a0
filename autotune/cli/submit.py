"""`autotune submit`: submit a job to the workers."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.cli.fields import request_fields
from autotune.cli.jobs import print_submitted
from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status, print_note
from autotune.cli.watch import watch_job
from autotune.errors import RequestError


def submit_command(
    given_fields: Mapping[str, Any],
    config: Path | None,
    imported: Path | None,
    stated: Sequence[str],
    priority: int,
    *,
    watch: bool,
    url: str | None,
    database: str | None,
    json: bool,
) -> Status:
    """Submit the job, and print its id or follow it.

    Args:
        given_fields: request fields that were given as options.
        config: a TOML file with further ones.
        imported: a configuration of another framework that becomes the baseline.
        stated: NAME=VALUE of variables and arguments of a script that is imported.
        priority: jobs with a higher one run first.
        watch: follow the job.
        url: of a service; None: see `open_backend`.
        database: its URL; None: see `open_backend`.
        json: print a document.
    """
    if watch and json:
        raise RequestError("json", "prints one document, but --watch prints events", "leave one of them out")
    fields = request_fields(given_fields, config)
    if imported is not None:
        from autotune.cli.imported import with_imported

        ranks = () if fields.get("ranks") is None else (int(fields["ranks"]),)
        fields = with_imported(
            fields, imported, stated, ranks, lambda line: print(line, file=sys.stderr)  # noqa: T201
        )  # fmt: skip
    if isinstance(fields.get("knowledge"), str):
        from autotune.session.knowledge import knowledge_content

        fields["knowledge"] = knowledge_content(fields["knowledge"], print_note, database)
    with open_backend(url, database) as backend:
        job = backend.submit(fields, priority)
        if watch:
            return watch_job(backend, job)
    print_submitted(job, json)
    return Status.OK
