"""Submissions that open no job: what a form asks while it is filled in."""

from fastapi import APIRouter

from api.auth import Reader, SettingsOf, StoreOf
from api.computing import Computing
from api.draft import DraftView, EstimateView, drafted, estimated
from api.submission import JobSubmission

router = APIRouter(prefix="/v1/drafts", tags=["jobs"])


@router.post("/check", operation_id="check_job")
async def check_job(body: JobSubmission, settings: SettingsOf, _: Reader, computing: Computing) -> DraftView:
    """Check a submission as `POST /v1/jobs` does, and open no job."""
    return await computing.run(drafted, body, settings)


@router.post("/estimate", operation_id="estimate_job")
async def estimate_job(
    body: JobSubmission, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing
) -> EstimateView:
    """Predict what the job may find and what its trials take. Nothing is run, and no job is opened."""
    return await computing.run(estimated, body, settings, store)
