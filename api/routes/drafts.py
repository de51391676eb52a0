"""Checks and estimates of submissions that open no job, for a form while it is filled in."""

from fastapi import APIRouter

from api.auth import Reader, SettingsOf, StoreOf
from api.computing import Computing
from api.prediction import estimate_draft, resolve_draft
from api.submission import JobSubmission
from autotune.wire.predictions import Draft, Estimate

router = APIRouter(prefix="/v1/drafts", tags=["jobs"])


@router.post("/check", operation_id="check_job")
async def check_job(body: JobSubmission, settings: SettingsOf, _: Reader, computing: Computing) -> Draft:
    """Check a submission as `POST /v1/jobs` does, without opening a job."""
    return await computing.run(resolve_draft, body, settings)


@router.post("/estimate", operation_id="estimate_job")
async def estimate_job(body: JobSubmission, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing) -> Estimate:
    """Predict the job's result and the duration of its trials, without running anything or opening a job."""
    return await computing.run(estimate_draft, body, settings, store)
