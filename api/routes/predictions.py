"""Predictions and plans; checks and estimates of submissions that open no job, for a form while it is filled in."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from api.auth import Reader, SettingsOf, StoreOf
from api.computing import Computing
from api.fields import Body
from api.settings import Settings
from api.submission import (
    OWN_TYPES,
    JobSubmission,
    KnobName,
    KnobValue,
    KnobValues,
    Name,
    UploadedModel,
    checked,
    declared_body,
    errors_about,
    require_pins,
    require_preset_names,
    session_of_job,
    shown_fields,
    uploaded_or_named,
)
from api.views import assumed_views, checked_view
from autotune.client.fields import FIT, PLAN, PREDICTION
from autotune.forecast import expected
from autotune.goodput.terms import terms_of
from autotune.prediction.planning import estimate as planning
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.conditional import Conditions, fitted, plan_conditions, planned, predicted
from autotune.prediction.planning.largest import Dimension, largest
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.plan import PlanObjective, PlanOptions
from autotune.prediction.planning.question import (
    Question,
    cluster_of,
    described_model,
    precisions_of,
    question_about,
    with_adapters,
)
from autotune.prediction.planning.scan import Bounds
from autotune.prediction.planning.training_setups import question_fields
from autotune.question.assumption import assumed_document
from autotune.question.question import PlanningFields
from autotune.recipes.fit_recipe import fastest_file, with_program
from autotune.request.field_forms import with_loads
from autotune.request.rows import request_to_row
from autotune.session.knowledge import learned_of
from autotune.wire.predictions import ConfigEstimate, Draft, Estimate, Fits, Plans, Prediction, Range
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.huggingface import is_factory_reference
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.plain import to_plain
from storage.store import Store

PLANNING_TYPES: Mapping[str, Any] = {
    **OWN_TYPES,
    "model": Name | UploadedModel,
    "pins": KnobValues,
    "lora_targets": Annotated[list[Name], Field(min_length=1, max_length=20)],
    "objective": Annotated[PlanObjective, Field(strict=False)],
    "goodput": KnobValues,
    "max": Annotated[Dimension, Field(strict=False)],
    "methods": Annotated[list[Name], Field(min_length=1, max_length=10)],
    "libraries": Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=40, fail_fast=True)],
}
"""Types of fields that are not numbers, switches or names. `goodput` has the inputs of `autotune plan --goodput`."""
_PredictionFields: Any = declared_body("_PredictionFields", PlanningFields, {*PREDICTION, "model"}, PLANNING_TYPES)
_PlanFields: Any = declared_body("_PlanFields", PlanningFields, {*PLAN, "model"}, PLANNING_TYPES)
_FitFields: Any = declared_body("_FitFields", PlanningFields, {*FIT, "model"}, PLANNING_TYPES)


class PredictionRequest(_PredictionFields):  # type: ignore[misc]
    """A request to predict one configuration. Omitted fields have the defaults of `autotune predict`."""

    model: Name | UploadedModel
    """A preset's name, the content of a config.json, or a `module:factory` that the server allows."""
    config: Annotated[dict[KnobName, KnobValue], Field(max_length=200)] = Field({})
    """Knob -> value; omitted knobs have the device's defaults."""


class PlanRequest(_PlanFields):  # type: ignore[misc]
    """A request to rank a space. Omitted fields have the defaults of `autotune plan`."""

    model: Name | UploadedModel
    """A preset's name, the content of a config.json, or a `module:factory` that the server allows."""


class FitRequest(_FitFields):  # type: ignore[misc]
    """A request to find what fits on some cards. Omitted fields have the defaults of `autotune fit`."""

    model: Name | UploadedModel
    """A preset's name, the content of a config.json, or a `module:factory` that the server allows."""
    program: Name | None = None
    """Also return the file of the fastest way for one of the programs of `autotune fit --for`."""
    dataset: Annotated[str, Field(max_length=200, pattern=r"^[\w./-]+$")] = "DATASET"
    """The dataset in the file."""


def predict_config(body: PredictionRequest, settings: Settings, store: Store) -> Prediction:
    """Predict one configuration. Errors name the field and the remedy."""
    question = _question(_asked(body, "config", pins=checked("config", body.config)), body, settings, store)
    answer = predicted(question)
    fields = {"world_size": question.cluster.world_size}
    return checked_view(Prediction, {**_shown(question, answer.conditions), **fields, **answer.estimate.document()})


def find_fits(body: FitRequest, settings: Settings, store: Store) -> Fits:
    """What fits of a model on some cards. Errors name the field and the remedy."""
    asked = _asked(body, "program", "dataset", model=body.model if isinstance(body.model, str) else body.model.name)
    if body.program is not None:
        asked = with_program(asked, body.program)
    result, conditions = fitted(_question(question_fields(asked), body, settings, store), asked)
    fields = {"world_size": result.question.cluster.world_size, **result.document()}
    if body.program is not None:
        fields["file"] = to_plain(fastest_file(result, asked, body.program, body.dataset)[1])
    return checked_view(Fits, {**_shown(result.question, conditions), **fields})


def rank_plans(body: PlanRequest, settings: Settings, store: Store) -> Plans:
    """Rank a space within the limits of the settings. Errors name the field and the remedy."""
    inputs = _asked(body, "goodput")
    question = _question(inputs, body, settings, store)
    with errors_about("goodput"):
        goodput = None if body.goodput is None else terms_of(body.goodput)
    options = PlanOptions(
        objective=PlanObjective(inputs.objective), top=inputs.top, fit_probability=inputs.fit_probability or PROBABILITY,
        share=inputs.share, price=inputs.price, rate=inputs.rate,
        goodput=goodput,
    )  # fmt: skip
    bounds = Bounds(configurations=settings.plan_configurations, until=time.monotonic() + settings.plan_seconds)
    biggest = None if inputs.max is None else largest(question, Dimension(inputs.max), options.fit_probability, bounds)
    question = biggest.question if biggest else question
    question, ranked = planned(question, options, bounds)
    conditions = plan_conditions(question, ranked, options)
    fields = {
        "space": question.space,
        "objective": options.objective,
        "max": {"dimension": biggest.dimension, "value": biggest.value, "next": biggest.next} if biggest else None,
    }
    return checked_view(Plans, {**_shown(question, conditions), **fields, **ranked.document()})


def _asked(body: Body, *left_out: str, **further: Any) -> PlanningFields:
    """The question of a body, whose model has a text of its own."""
    fields = body.model_dump(exclude_none=True, exclude={"model", "knowledge", *left_out})
    require_pins(fields.get("pins", {}))
    fields |= {"expert_loads": tuple(map(tuple, fields.get("expert_loads", ())))}
    return PlanningFields(**fields, **further)


def _question(
    inputs: PlanningFields, body: PredictionRequest | PlanRequest | FitRequest, settings: Settings, store: Store
) -> Question:
    """The question with what the database and the body's measurements say."""
    name = inputs.cluster or "local"
    require_preset_names(name, inputs.space)
    cluster = cluster_of(name, inputs.ranks, inputs.memory_limit)
    model = with_loads(_model(body.model, inputs, settings, cluster), inputs.expert_loads)
    question = question_about(inputs, model, cluster, settings.count_steps)
    return asked_here(store, question, learned_of(body.knowledge, store, question.cluster, question.engine, model))


def _model(
    given: str | UploadedModel, inputs: PlanningFields, settings: Settings, cluster: ClusterSpec
) -> ModelSpec | FactoryModel:
    """The model; a module that the server allows is described in a process of its own, as when a job is submitted."""
    name, uploaded = uploaded_or_named(given, settings)
    adapters = inputs.lora_rank, inputs.lora_targets, inputs.frozen_bits
    if uploaded is not None:
        return with_adapters(uploaded, *adapters)
    precisions = precisions_of(cluster, inputs.engine, inputs.pins) if is_factory_reference(name) else ()
    return described_model(
        name, *adapters, sequence_length=inputs.sequence_length, precisions=precisions, device_kind=cluster.device.kind
    )


def _shown(question: Question, conditions: Conditions) -> dict[str, Any]:
    return {
        "model": question.model.name,
        "parameter_count": question.model.parameter_count,
        "cluster": question.cluster.name,
        "engine": question.engine,
        "global_batch_size": question.global_batch_size,
        "sequence_length": question.sequence_length,
        "assumed": conditions.document(),
        "origins": to_plain(question.origins),
        "calibration_source": question.calibration_source,
    }


def resolve_draft(body: JobSubmission, settings: Settings) -> Draft:
    """Resolve and check the body like a submission. Raises what a submission raises."""
    session = session_of_job(body, settings)
    return Draft(
        model=session.model.name,
        parameter_count=session.model.parameter_count,
        assumed=assumed_views(assumed_document(session.request.resolved_assumed)),
        cluster=session.cluster.name,
        world_size=session.world_size,
        request=shown_fields(request_to_row(session.request)),
        domains={name: tuple(values) for name, values in session.space.domains.items()},
        baseline=session.baselines[0].values(),
    )


def estimate_draft(body: JobSubmission, settings: Settings, store: Store) -> Estimate:
    """Predict the job's result within the limits of the settings. Raises what a submission raises."""
    session = session_of_job(body, settings)
    bounds = Bounds(configurations=settings.plan_configurations, until=time.monotonic() + settings.plan_seconds)
    expectation = expected(session, store, bounds)
    rates = [
        measurement.samples_per_second.mean
        for measurement in (expectation.best, expectation.baseline)
        if measurement is not None
    ]
    hours = session.world_size / 3600
    return Estimate(
        trials=expectation.trials,
        best=_view(expectation.best),
        baseline=_view(expectation.baseline),
        gain=rates[0] / rates[1] if len(rates) == 2 else None,
        trial_seconds=_range(expectation.trial_seconds),
        seconds=_range(expectation.seconds),
        device_hours=_range(expectation.seconds, hours),
        calibration_source=expectation.calibration_source,
        note=expectation.note,
        assumed=assumed_views(assumed_document(session.request.resolved_assumed, expectation.consequences)),
    )


def _view(estimate: planning.StepEstimate | None) -> ConfigEstimate | None:
    return None if estimate is None else checked_view(ConfigEstimate, estimate.document())


def _range(bounds: tuple[float, float] | None, unit: float = 1.0) -> Range | None:
    return None if bounds is None else Range(low=bounds[0] * unit, high=bounds[1] * unit)


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


@router.post("/fits", operation_id="fit", tags=["predictions"])
async def fit(body: FitRequest, settings: SettingsOf, store: StoreOf, _: Reader, computing: Computing) -> Fits:
    """Say which ways of fine-tuning a model fit on some cards, with their batch, length, rate and hours."""
    return await computing.run(find_fits, body, settings, store)
