"""Submissions that open no job: what a form asks while it is filled in."""

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from api.auth import Reader, SettingsOf, StoreOf
from api.computing import Computing, place
from api.draft import DraftView, EstimateView, drafted, estimated
from api.submission import JobSubmission

router = APIRouter(prefix="/v1/drafts", tags=["jobs"])


@router.post("/check", operation_id="check_job")
def check_job(body: JobSubmission, settings: SettingsOf, _: Reader) -> DraftView:
    """Check a submission as `POST /v1/jobs` does, and open no job."""
    return drafted(body, settings)


@router.post("/estimate", operation_id="estimate_job")
async def estimate_job(
    body: JobSubmission, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing
) -> EstimateView:
    """Predict what the job may find and what its trials take. Nothing is run, and no job is opened."""
    async with place(computing):
        return await run_in_threadpool(estimated, body, settings, store)
