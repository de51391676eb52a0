"""Requests for predictions and plans and their answers, and the check and estimate of a submission without a job."""

import time
from typing import Annotated, Any

from pydantic import Field

from api.fields import Body, DocumentLengths, ExpertLoads, Integer, Size
from api.settings import Settings
from api.submission import (
    JobSubmission,
    KnobName,
    KnobValue,
    KnowledgeContent,
    Name,
    UploadedModel,
    checked,
    require_preset_names,
    session_of_submission,
    shown_fields,
    uploaded_or_named,
)
from api.views import checked_view
from autotune.forecast import expected
from autotune.goodput.choice import terms_of
from autotune.prediction.planning import estimate as planning
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.largest import Dimension, largest
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.plan import MOST_PLANS, PlanObjective, PlanOptions, plan
from autotune.prediction.planning.question import (
    Question,
    cluster_of,
    described_model,
    precisions_of,
    question_of,
    with_adapters,
)
from autotune.prediction.planning.scan import Bounds
from autotune.request.field_forms import with_loads
from autotune.request.rows import request_to_row
from autotune.session.knowledge import learned_of
from autotune.session.trial_requests import assumed_of
from autotune.wire.plans import Plans
from autotune.wire.predictions import ConfigEstimate, Draft, Estimate, Prediction, Range
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.huggingface import is_factory_reference
from search_spaces.models.model import FactoryModel, ModelSpec
from storage.store import Store

Positive = Annotated[float, Field(gt=0, le=1e18)]


class QuestionFields(Body):
    """The subject of a prediction. Omitted fields have the defaults of `autotune predict`."""

    model: Name | UploadedModel
    """A preset's name, the content of a config.json, or a `module:factory` that the server allows."""
    cluster: Name = "local"
    """`local`, or a preset as NAME:NODES."""
    ranks: Annotated[Integer, Field(ge=1, le=2**20)] | None = None
    global_batch_size: Annotated[Integer, Field(ge=1, le=2**32)] | None = None
    sequence_length: Annotated[Integer, Field(ge=1, le=2**32)] | None = None
    training_steps: Annotated[Integer, Field(ge=1, le=2**53)] | None = None
    """Optimizer steps of the run, over which data schedules are averaged."""
    document_lengths: DocumentLengths = Field([])
    """Token counts of a sample of the data's documents; empty: each sample is one document."""
    expert_loads: ExpertLoads = Field([])
    """Relative numbers of tokens that choose each expert: a row for all layers with experts, or one for each; empty: equal."""
    memory_limit: Size | None = None
    """Bytes a rank may allocate, or text with a unit such as "40GB"."""
    engine: Name = "native"
    lora_rank: Annotated[Integer, Field(ge=1, le=2**20)] | None = None
    """Rank of low-rank adapters; all other parameters are frozen. Omitted: every parameter is trained."""
    lora_targets: Annotated[list[Name], Field(min_length=1, max_length=20)] | None = None
    frozen_bits: Annotated[Integer, Field(ge=1, le=64)] | None = None
    knowledge: KnowledgeContent | None = None
    """Measurements to learn from: their settings and measurements."""


class PredictionRequest(QuestionFields):
    """A request to predict one configuration."""

    config: Annotated[dict[KnobName, KnobValue], Field(max_length=200)] = Field({})
    """Knob -> value; omitted knobs have the device's defaults."""


class PlanRequest(QuestionFields):
    """A request to rank a space. Omitted fields have the defaults of `autotune plan`."""

    space: Name = "parallel"
    """A preset's name."""
    pins: Annotated[
        dict[KnobName, KnobValue | Annotated[list[KnobValue], Field(min_length=1, max_length=100, fail_fast=True)]],
        Field(max_length=100),
    ] = Field({})
    simple: Name | None = None
    """The framework whose export must express every plan without loss."""
    objective: PlanObjective = Field(PlanObjective.THROUGHPUT, strict=False)
    top: Annotated[Integer, Field(ge=1, le=MOST_PLANS)] = 10
    """Number of returned plans."""
    price: Positive | None = None
    """Price of a device-hour."""
    rate: Positive | None = None
    """Samples/s that a plan must reach."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """For the objective memory: least share of the best rate."""
    goodput: (
        Annotated[
            dict[KnobName, KnobValue | Annotated[list[KnobValue], Field(min_length=1, max_length=100, fail_fast=True)]],
            Field(max_length=100),
        ]
        | None
    ) = None
    """For the objective goodput: its inputs, as in `autotune plan --goodput`. `failures` is the name of published rates."""
    fit_probability: Annotated[float, Field(gt=0, lt=1)] = PROBABILITY
    """Least probability that a plan fits."""
    max: Annotated[Dimension, Field(strict=False)] | None = None
    """Plan for the largest value of this dimension that fits."""


def predict_config(body: PredictionRequest, settings: Settings, store: Store) -> Prediction:
    """Predict one configuration. Errors name the field and the remedy."""
    question = _learned(body, store, _question(body, settings, pins=checked(body.config)))
    (estimate,) = estimates(question, [question.config()])
    fields = {"world_size": question.cluster.world_size}
    return checked_view(Prediction, {**_asked(question), **fields, **estimate.document()})


def rank_plans(body: PlanRequest, settings: Settings, store: Store) -> Plans:
    """Rank a space within the limits of the settings. Errors name the field and the remedy."""
    question = _learned(body, store, _question(body, settings, pins=body.pins, space=body.space, simple=body.simple))
    options = PlanOptions(
        objective=body.objective, top=body.top, fit_probability=body.fit_probability, share=body.share, price=body.price,
        rate=body.rate, goodput=None if body.goodput is None else terms_of(body.goodput),
    )  # fmt: skip
    bounds = Bounds(configurations=settings.plan_configurations, until=time.monotonic() + settings.plan_seconds)
    biggest = None if body.max is None else largest(question, body.max, options.fit_probability, bounds)
    question = biggest.question if biggest else question
    ranked = plan(question, options, bounds)
    fields = {
        "space": question.space,
        "objective": options.objective,
        "max": {"dimension": biggest.dimension, "value": biggest.value, "next": biggest.next} if biggest else None,
    }
    return checked_view(Plans, {**_asked(question), **fields, **ranked.document()})


def _question(
    body: QuestionFields, settings: Settings, pins: Any, space: str = "parallel", simple: str | None = None
) -> Question:
    require_preset_names(body.cluster, space)
    cluster = cluster_of(body.cluster, body.ranks, body.memory_limit)
    return question_of(
        with_loads(_model(body, settings, cluster, pins), tuple(map(tuple, body.expert_loads))),
        cluster,
        global_batch_size=body.global_batch_size,
        sequence_length=body.sequence_length,
        training_steps=body.training_steps,
        document_lengths=body.document_lengths,
        engine=body.engine,
        space=space,
        pins=pins,
        most_steps=settings.count_steps,
        simple=simple,
    )


def _learned(body: QuestionFields, store: Store, question: Question) -> Question:
    """The question with what the database and the body's measurements say."""
    return asked_here(store, question, learned_of(body.knowledge, store, question.cluster, question.engine))


def _model(body: QuestionFields, settings: Settings, cluster: ClusterSpec, pins: Any) -> ModelSpec | FactoryModel:
    """The model; a module that the server allows is described in a process of its own, as when a job is submitted."""
    name, uploaded = uploaded_or_named(body.model, settings)
    adapters = body.lora_rank, body.lora_targets, body.frozen_bits
    if uploaded is not None:
        return with_adapters(uploaded, *adapters)
    precisions = precisions_of(cluster, body.engine, pins) if is_factory_reference(name) else ()
    return described_model(name, *adapters, sequence_length=body.sequence_length, precisions=precisions)


def _asked(question: Question) -> dict[str, Any]:
    return {
        "model": question.model.name,
        "parameter_count": question.model.parameter_count,
        "cluster": question.cluster.name,
        "engine": question.engine,
        "global_batch_size": question.global_batch_size,
        "sequence_length": question.sequence_length,
        "assumed": question.assumed,
        "rests_on": question.rests_on,
    }


def resolve_draft(body: JobSubmission, settings: Settings) -> Draft:
    """Resolve and check the body like a submission. Raises what a submission raises."""
    session = session_of_submission(body, settings, settings.submission_steps)
    return Draft(
        model=session.model.name,
        parameter_count=session.model.parameter_count,
        assumed=assumed_of(session),
        cluster=session.cluster.name,
        world_size=session.world_size,
        request=shown_fields(request_to_row(session.request)),
        domains={name: tuple(values) for name, values in session.space.domains.items()},
        baseline=session.baselines[0].values(),
    )


def estimate_draft(body: JobSubmission, settings: Settings, store: Store) -> Estimate:
    """Predict the job's result within the limits of the settings. Raises what a submission raises."""
    session = session_of_submission(body, settings, settings.submission_steps)
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
        rests_on=expectation.rests_on,
        note=expectation.note,
    )


def _view(estimate: planning.StepEstimate | None) -> ConfigEstimate | None:
    return None if estimate is None else checked_view(ConfigEstimate, estimate.document())


def _range(bounds: tuple[float, float] | None, unit: float = 1.0) -> Range | None:
    return None if bounds is None else Range(low=bounds[0] * unit, high=bounds[1] * unit)
