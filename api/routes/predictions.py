"""What is predicted, without a trial."""

from fastapi import APIRouter

from api.auth import Reader, SettingsOf, StoreOf
from api.computing import Computing
from api.prediction import PlanRequest, PlansView, PredictionRequest, PredictionView, planned, predicted

router = APIRouter(prefix="/v1", tags=["predictions"])


@router.post("/predictions", operation_id="predict")
async def predict(
    body: PredictionRequest, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing
) -> PredictionView:
    """Predict step time and memory of one configuration. Nothing is run."""
    return await computing.run(predicted, body, settings, store)


@router.post("/plans", operation_id="plan")
async def plan(body: PlanRequest, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing) -> PlansView:
    """Rank every configuration of a space by what is predicted. Spaces that take too long are 422, and where nothing fits."""
    return await computing.run(planned, body, settings, store)
