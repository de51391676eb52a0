"""`autotune clean`: remove jobs from the database."""

from autotune.cli.status import Status
from autotune.text.console import Console
from autotune.text.jobs import state_word
from storage.address import default_database_url
from storage.errors import LeaseHeldError
from storage.records import JobRecord
from storage.store import Store, open_store


def clean_command(job_id: str | None, every: bool, yes: bool, database: str | None) -> Status:
    """Remove one job, or all; a job whose lease a live process holds is kept."""
    console, status = Console(stderr=True), Status.OK
    with open_store(database or default_database_url()) as store:
        for job in _every_job(store) if every else [store.job(job_id)]:
            if not yes:
                word = state_word(job.state, job.reason)
                console.print(f"would remove job {job.id} ({word}); add --yes to do it", highlight=False)
                continue
            try:
                store.delete_job(job.id)
            except LeaseHeldError as error:
                console.print(f"kept job {job.id}: {error}", highlight=False, soft_wrap=True)
                status = Status.FAILURE
            else:
                console.print(f"removed job {job.id}", highlight=False)
    return status


def _every_job(store: Store) -> list[JobRecord]:
    found: list[JobRecord] = []
    while page := store.jobs(before=found[-1].id if found else None):
        found += page
    return found
