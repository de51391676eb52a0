"""Checks and estimates of submissions that open no job, for a form while it is filled in; predictions and plans."""

from fastapi import APIRouter

from api.auth import Reader, SettingsOf, StoreOf
from api.computing import Computing
from api.prediction import PlanRequest, PredictionRequest, estimate_draft, predict_config, rank_plans, resolve_draft
from api.submission import JobSubmission
from autotune.wire.plans import Plans
from autotune.wire.predictions import Draft, Estimate, Prediction

router = APIRouter(prefix="/v1")


@router.post("/drafts/check", operation_id="check_job", tags=["jobs"])
async def check_job(body: JobSubmission, settings: SettingsOf, _: Reader, computing: Computing) -> Draft:
    """Check a submission as `POST /v1/jobs` does, without opening a job."""
    return await computing.run(resolve_draft, body, settings)


@router.post("/drafts/estimate", operation_id="estimate_job", tags=["jobs"])
async def estimate_job(body: JobSubmission, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing) -> Estimate:
    """Predict the job's result and the duration of its trials, without running anything or opening a job."""
    return await computing.run(estimate_draft, body, settings, store)


@router.post("/predictions", operation_id="predict", tags=["predictions"])
async def predict(body: PredictionRequest, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing) -> Prediction:
    """Predict step time and memory of one configuration without running it."""
    return await computing.run(predict_config, body, settings, store)


@router.post("/plans", operation_id="plan", tags=["predictions"])
async def plan(body: PlanRequest, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing) -> Plans:
    """Rank all configurations of a space by their predictions. 422 if it takes too long, or if no configuration fits."""
    return await computing.run(rank_plans, body, settings, store)
