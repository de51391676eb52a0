"""Requests and responses of predictions and plans."""

import time
from typing import Annotated, Any

from pydantic import BaseModel, Field

from api.fields import Body, DocumentLengths, Integer, Size
from api.settings import Settings
from api.submission import KnobName, KnobValue, Name, UploadedModel, checked, require_preset_names, uploaded_or_named
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.largest import Dimension, largest
from autotune.prediction.planning.plan import MOST_PLANS, PlanObjective, PlanOptions, plan
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of, with_adapters
from autotune.prediction.planning.room import PROBABILITY
from autotune.prediction.planning.scan import Bounds
from search_spaces.models.model import ModelSpec
from storage.store import Store

Plain = dict[str, Any]
Positive = Annotated[float, Field(gt=0, le=1e18)]


class QuestionFields(Body):
    """The subject of a prediction. Omitted fields have the defaults of `autotune predict`."""

    model: Name | UploadedModel
    """A preset's name, or the content of a config.json."""
    cluster: Name = "local"
    """`local`, or a preset as NAME:NODES."""
    ranks: Annotated[Integer, Field(ge=1, le=2**20)] | None = None
    global_batch_size: Annotated[Integer, Field(ge=1, le=2**32)] | None = None
    sequence_length: Annotated[Integer, Field(ge=1, le=2**32)] | None = None
    training_steps: Annotated[Integer, Field(ge=1, le=2**53)] | None = None
    """Optimizer steps of the run, over which data schedules are averaged."""
    document_lengths: DocumentLengths = Field([])
    """Token counts of a sample of the data's documents; empty: each sample is one document."""
    memory_limit: Size | None = None
    """Bytes a rank may allocate, or text with a unit such as "40GB"."""
    engine: Name = "native"
    lora_rank: Annotated[Integer, Field(ge=1, le=2**20)] | None = None
    """Rank of low-rank adapters; all other parameters are frozen. Omitted: every parameter is trained."""
    lora_targets: Annotated[list[Name], Field(min_length=1, max_length=20)] | None = None
    frozen_bits: Annotated[Integer, Field(ge=1, le=64)] | None = None


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
    fit_probability: Annotated[float, Field(gt=0, lt=1)] = PROBABILITY
    """Least probability that a plan fits."""
    max: Annotated[Dimension, Field(strict=False)] | None = None
    """Plan for the largest value of this dimension that fits."""


class IntervalView(BaseModel):
    """A mean with its 90 % interval."""

    mean: float
    low: float
    high: float


class BandView(BaseModel):
    """A 90 % interval."""

    low: float
    high: float


class RankMemoryView(BaseModel):
    """Memory of the ranks of one pipeline stage."""

    pipeline_rank: int
    layers: int
    total: float
    by_tag: dict[str, float]
    """Sums to the total."""


class SchedulePointView(BaseModel):
    """A point of the data schedule."""

    length: int
    """Tokens per sample."""
    kept: int
    """Tokens of these that all layers but the first and the last see."""
    weight: float
    """Share of the run's steps that it represents."""
    step_seconds: float
    peak_memory_bytes: float
    """Of the fullest rank."""


class PredictedView(BaseModel):
    """The prediction for a configuration."""

    samples_per_second: IntervalView
    tokens_per_second: float
    step_seconds: float
    step_seconds_band: BandView
    breakdown_seconds: dict[str, float]
    """compute, tensor, pipeline, data, optimizer, offload: they sum to `step_seconds`."""
    peak_memory_bytes: list[RankMemoryView]
    """All pipeline ranks; for a plan only the fullest one."""
    peak_memory_band: IntervalView
    """Of the fullest rank."""
    host_memory_bytes: float
    """Main memory of a node."""
    memory_limit_bytes: int
    fit_probability: float
    tflops_per_device: float
    mfu: float | None
    flops_convention: str
    schedule: list[SchedulePointView]
    """The first, a middle and the last point of the data schedule; empty: there is no schedule."""


class PredictionView(BaseModel):
    """A configuration with its prediction."""

    model: str
    parameter_count: int
    cluster: str
    world_size: int
    engine: str
    global_batch_size: int
    sequence_length: int
    rests_on: str
    """In words, the source of the prediction: shipped coefficients, or measurements of the cluster."""
    config: Plain
    """In canonical form."""
    predicted: PredictedView


class ReasonView(BaseModel):
    """Why a knob has its value: its effect, and the cost of the alternatives."""

    knob: str
    text: str
    cause: Plain | None
    """The effect of changing only this knob: extra seconds for each part of the step, and the needed bytes."""
    alternatives: list[Plain]


class TieView(BaseModel):
    """A configuration that the predictions cannot distinguish from the shown one."""

    config: Plain
    step_seconds: float
    peak_memory_bytes: float


class PlanView(BaseModel):
    """One of the best configurations: the simplest of a tied group."""

    world_size: int
    nodes: int
    config: Plain
    differences: Plain
    """Knobs that differ from the device's defaults."""
    predicted: PredictedView
    tied: int
    """Number of further configurations that tie with it."""
    ties: list[TieView]
    """The fastest of them."""
    cost_per_million_tokens: float | None
    reasons: list[ReasonView]


class MaxView(BaseModel):
    """The largest value that fits."""

    dimension: str
    value: int
    """Tokens, samples or parameters."""
    next: int | None
    """The smallest value that was found not to fit."""


class PlansView(BaseModel):
    """The best configurations of a space."""

    model: str
    parameter_count: int
    cluster: str
    engine: str
    global_batch_size: int
    sequence_length: int
    rests_on: str
    """In words, the source of the predictions."""
    space: str
    objective: str
    max: MaxView | None
    configurations: int
    """Number of predicted configurations."""
    fitting: int
    bucket_settings: int
    world_sizes: list[int]
    resolution: float
    """Relative difference of step times up to which configurations count as tied."""
    seconds: float
    plans: list[PlanView]


def predict_config(body: PredictionRequest, settings: Settings, store: Store) -> PredictionView:
    """Predict one configuration. Errors name the field and the remedy."""
    question = asked_here(store, _question(body, settings, pins=checked(body.config)))
    (estimate,) = estimates(question, [question.config()])
    return PredictionView(**_asked(question), world_size=question.cluster.world_size, **estimate.document())


def rank_plans(body: PlanRequest, settings: Settings, store: Store) -> PlansView:
    """Rank a space within the limits of the settings. Errors name the field and the remedy."""
    question = asked_here(store, _question(body, settings, pins=body.pins, space=body.space, simple=body.simple))
    options = PlanOptions(
        objective=body.objective, top=body.top, fit_probability=body.fit_probability, share=body.share, price=body.price,
        rate=body.rate,
    )  # fmt: skip
    bounds = Bounds(configurations=settings.plan_configurations, until=time.monotonic() + settings.plan_seconds)
    biggest = None if body.max is None else largest(question, body.max, options.fit_probability, bounds)
    question = biggest.question if biggest else question
    found = plan(question, options, bounds)
    document = found.document()
    max_view = MaxView(dimension=biggest.dimension, value=biggest.value, next=biggest.next) if biggest else None
    return PlansView(**_asked(question), space=question.space, objective=options.objective, max=max_view, **document)


def _question(
    body: QuestionFields, settings: Settings, pins: Any, space: str = "parallel", simple: str | None = None
) -> Question:
    require_preset_names(body.cluster, space)
    name, uploaded = uploaded_or_named(body.model, settings)
    targets = body.lora_targets
    model: ModelSpec
    if uploaded is None:
        model = model_of(name, body.lora_rank, targets, body.frozen_bits)
    else:
        model = with_adapters(uploaded, body.lora_rank, targets, body.frozen_bits)
    return question_of(
        model,
        cluster_of(body.cluster, body.ranks, body.memory_limit),
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


def _asked(question: Question) -> Plain:
    return {
        "model": question.model.name,
        "parameter_count": question.model.parameter_count,
        "cluster": question.cluster.name,
        "engine": question.engine,
        "global_batch_size": question.global_batch_size,
        "sequence_length": question.sequence_length,
        "rests_on": question.rests_on,
    }
