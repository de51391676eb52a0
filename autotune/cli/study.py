"""`autotune study export`: write a job as an Optuna study."""

import sys

from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.frameworks.optuna import write_study


def study_command(job: str | None, storage: str, name: str | None, url: str | None, database: str | None) -> Status:
    """Write the study and print its name to standard output."""
    with open_backend(url, database) as backend:
        record = backend.job(job)
        written = write_study(storage, name or record.id, record, list(backend.trials(record.id)))
    sys.stdout.write(f"{written}\n")
    return Status.OK
