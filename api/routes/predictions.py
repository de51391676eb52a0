"""Predictions and plans, without trials."""

from fastapi import APIRouter

from api.auth import Reader, SettingsOf, StoreOf
from api.computing import Computing
from api.prediction import PlanRequest, PredictionRequest, predict_config, rank_plans
from autotune.wire.plans import Plans
from autotune.wire.predictions import Prediction

router = APIRouter(prefix="/v1", tags=["predictions"])


@router.post("/predictions", operation_id="predict")
async def predict(body: PredictionRequest, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing) -> Prediction:
    """Predict step time and memory of one configuration without running it."""
    return await computing.run(predict_config, body, settings, store)


@router.post("/plans", operation_id="plan")
async def plan(body: PlanRequest, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing) -> Plans:
    """Rank all configurations of a space by their predictions. 422 if it takes too long, or if no configuration fits."""
    return await computing.run(rank_plans, body, settings, store)
