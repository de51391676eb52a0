"""What is asked to be predicted, and what is answered."""

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
from search_spaces.model import ModelSpec
from storage.store import Store

Plain = dict[str, Any]
Positive = Annotated[float, Field(gt=0, le=1e18)]


class Asked(Body):
    """What is predicted for. Fields that are left out have the defaults of `autotune predict`."""

    model: Name | UploadedModel
    """A preset's name, or a config.json."""
    cluster: Name = "local"
    """`local`, or a preset as NAME:NODES."""
    ranks: Annotated[Integer, Field(ge=1, le=2**20)] | None = None
    global_batch_size: Annotated[Integer, Field(ge=1, le=2**32)] | None = None
    sequence_length: Annotated[Integer, Field(ge=1, le=2**32)] | None = None
    training_steps: Annotated[Integer, Field(ge=1, le=2**53)] | None = None
    """Optimizer steps of the run, over which schedules of the data are weighed."""
    document_lengths: DocumentLengths = Field([])
    """Tokens of each document of a sample of the data; empty: every sample is whole."""
    memory_limit: Size | None = None
    """Bytes a rank may allocate, or text with a unit such as "40GB"."""
    engine: Name = "native"
    lora_rank: Annotated[Integer, Field(ge=1, le=2**20)] | None = None
    """Rank of low-rank adapters, all else being frozen; left out: every parameter is trained."""
    lora_targets: Annotated[list[Name], Field(min_length=1, max_length=20)] | None = None
    frozen_bits: Annotated[Integer, Field(ge=1, le=64)] | None = None


class PredictionRequest(Asked):
    """One configuration."""

    config: Annotated[dict[KnobName, KnobValue], Field(max_length=200)] = Field({})
    """Knob -> value; knobs that are left out have the device's defaults."""


class PlanRequest(Asked):
    """A space. Fields that are left out have the defaults of `autotune plan`."""

    space: Name = "parallel"
    """A preset's name."""
    pins: Annotated[
        dict[KnobName, KnobValue | Annotated[list[KnobValue], Field(min_length=1, max_length=100, fail_fast=True)]],
        Field(max_length=100),
    ] = Field({})
    simple: Name | None = None
    """The framework whose export must say every plan without loss."""
    objective: PlanObjective = Field(PlanObjective.THROUGHPUT, strict=False)
    top: Annotated[Integer, Field(ge=1, le=MOST_PLANS)] = 10
    """Plans that are given."""
    price: Positive | None = None
    """Of a device for an hour."""
    rate: Positive | None = None
    """Samples/s that a plan must reach."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the best rate, with the objective memory."""
    fit_probability: Annotated[float, Field(gt=0, lt=1)] = PROBABILITY
    """How probable it must be that a plan fits."""
    max: Annotated[Dimension, Field(strict=False)] | None = None
    """Plan for the largest of this that fits."""


class IntervalView(BaseModel):
    """A mean, and between what the truth is nine times out of ten."""

    mean: float
    low: float
    high: float


class BandView(BaseModel):
    """Between what the truth is nine times out of ten."""

    low: float
    high: float


class RankMemoryView(BaseModel):
    """Memory of the ranks at one place along the pipeline."""

    pipeline_rank: int
    layers: int
    total: float
    by_tag: dict[str, float]
    """Sums to the total."""


class SchedulePointView(BaseModel):
    """A point of the schedule of the data."""

    length: int
    """Tokens of a sample."""
    kept: int
    """Of these, what layers but the first and the last see."""
    weight: float
    """Share of the run's steps that it stands for."""
    step_seconds: float
    peak_memory_bytes: float
    """Of the fullest rank."""


class PredictedView(BaseModel):
    """What is predicted of a configuration."""

    samples_per_second: IntervalView
    tokens_per_second: float
    step_seconds: float
    step_seconds_band: BandView
    breakdown_seconds: dict[str, float]
    """compute, tensor, pipeline, data, optimizer, offload: they sum to `step_seconds`."""
    peak_memory_bytes: list[RankMemoryView]
    """Every rank of the pipeline; of a plan the fullest alone."""
    peak_memory_band: IntervalView
    """Of the fullest rank."""
    host_memory_bytes: float
    """Of a node's main memory."""
    memory_limit_bytes: int
    fit_probability: float
    tflops_per_device: float
    mfu: float | None
    flops_convention: str
    schedule: list[SchedulePointView]
    """Its first, a middle and its last point; empty: the data are not scheduled."""


class PredictionView(BaseModel):
    """A configuration with what is predicted of it."""

    model: str
    parameter_count: int
    cluster: str
    world_size: int
    engine: str
    global_batch_size: int
    sequence_length: int
    rests_on: str
    """In words, what the prediction rests on: shipped coefficients, or measurements of the cluster."""
    config: Plain
    """In canonical form."""
    predicted: PredictedView


class ReasonView(BaseModel):
    """Why a knob has its value: what that does, and what the others come to."""

    knob: str
    text: str
    cause: Plain | None
    """Another value in its place alone: the seconds that each part of the step takes more, and the bytes that it needs."""
    alternatives: list[Plain]


class TieView(BaseModel):
    """A configuration that the predictions cannot tell from the one that is shown."""

    config: Plain
    step_seconds: float
    peak_memory_bytes: float


class PlanView(BaseModel):
    """One of the best configurations: the simplest of those that tie with it."""

    world_size: int
    nodes: int
    config: Plain
    differences: Plain
    """Knobs that are not at the device's defaults."""
    predicted: PredictedView
    tied: int
    """Further configurations that tie with it."""
    ties: list[TieView]
    """The fastest of them."""
    cost_per_million_tokens: float | None
    reasons: list[ReasonView]


class MaxView(BaseModel):
    """The largest that fits."""

    dimension: str
    value: int
    """Tokens, samples or parameters."""
    next: int | None
    """The smallest that was found not to fit."""


class PlansView(BaseModel):
    """What a space holds at best."""

    model: str
    parameter_count: int
    cluster: str
    engine: str
    global_batch_size: int
    sequence_length: int
    rests_on: str
    """In words, what the predictions rest on."""
    space: str
    objective: str
    max: MaxView | None
    configurations: int
    """That were predicted."""
    fitting: int
    bucket_settings: int
    world_sizes: list[int]
    resolution: float
    """Relative difference of step times up to which configurations tie."""
    seconds: float
    plans: list[PlanView]


def predicted(body: PredictionRequest, settings: Settings, store: Store) -> PredictionView:
    """Predict one configuration. Raises what names the field and the remedy."""
    question = asked_here(store, _question(body, settings, pins=checked(body.config)))
    (estimate,) = estimates(question, [question.config()])
    return PredictionView(**_asked(question), world_size=question.cluster.world_size, **estimate.document())


def planned(body: PlanRequest, settings: Settings, store: Store) -> PlansView:
    """Rank a space, within what the settings allow. Raises what names the field and the remedy."""
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
    told = MaxView(dimension=biggest.dimension, value=biggest.value, next=biggest.next) if biggest else None
    return PlansView(**_asked(question), space=question.space, objective=options.objective, max=told, **document)


def _question(body: Asked, settings: Settings, pins: Any, space: str = "parallel", simple: str | None = None) -> Question:
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
