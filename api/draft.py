"""Checks and estimates a submission without opening a job."""

import time
from typing import Any

from pydantic import BaseModel

from api.prediction import PredictedView
from api.settings import Settings
from api.submission import JobSubmission, session_of_submission, shown_fields
from autotune.forecast.job_forecast import expected
from autotune.prediction.planning.estimate import Estimate
from autotune.prediction.planning.scan import Bounds
from autotune.request.request import request_to_row
from storage.store import Store

Plain = dict[str, Any]


class DraftView(BaseModel):
    """The resolved form of a submission that would be accepted."""

    model: str
    parameter_count: int
    """0: not known."""
    cluster: str
    world_size: int
    request: Plain
    """The given fields, and the defaults of the others."""
    domains: dict[str, list[Any]]
    """Knob -> searched values."""
    baseline: Plain
    """The configuration of trial 0."""


class ConfigEstimate(BaseModel):
    """A configuration with its prediction."""

    config: Plain
    predicted: PredictedView


class RangeView(BaseModel):
    """The expected range."""

    low: float
    high: float


class EstimateView(BaseModel):
    """The expected result and cost of a job."""

    trials: int
    """Most trials that run on a device: search trials, controls and confirmations."""
    best: ConfigEstimate | None
    """The best configuration of the space that probably fits; null: `note` says why."""
    baseline: ConfigEstimate | None
    gain: float | None
    """Predicted samples/s of the best divided by the baseline's."""
    trial_seconds: RangeView | None
    """Duration of a trial on warm ranks."""
    seconds: RangeView | None
    """Duration of the whole job: the search within its time budget, controls, confirmations, and the start of its ranks."""
    device_hours: RangeView | None
    rests_on: str
    """In words, the source of the predictions; empty: nothing is predicted."""
    note: str
    """Why there is no prediction, or none for the best; empty: everything is predicted."""


def resolve_draft(body: JobSubmission, settings: Settings) -> DraftView:
    """Resolve and check the body like a submission. Raises what a submission raises."""
    session = session_of_submission(body, settings, settings.submission_steps)
    return DraftView(
        model=session.model.name,
        parameter_count=session.model.parameter_count,
        cluster=session.cluster.name,
        world_size=session.world_size,
        request=shown_fields(request_to_row(session.request)),
        domains={name: list(values) for name, values in session.space.domains.items()},
        baseline=session.baselines[0].values(),
    )


def estimate_draft(body: JobSubmission, settings: Settings, store: Store) -> EstimateView:
    """Predict the job's result within the limits of the settings. Raises what a submission raises."""
    session = session_of_submission(body, settings, settings.submission_steps)
    bounds = Bounds(configurations=settings.plan_configurations, until=time.monotonic() + settings.plan_seconds)
    found = expected(session, store, bounds)
    rates = [one.samples_per_second.mean for one in (found.best, found.baseline) if one is not None]
    hours = session.world_size / 3600
    return EstimateView(
        trials=found.trials,
        best=_view(found.best),
        baseline=_view(found.baseline),
        gain=rates[0] / rates[1] if len(rates) == 2 else None,
        trial_seconds=_range(found.trial_seconds),
        seconds=_range(found.seconds),
        device_hours=_range(found.seconds, hours),
        rests_on=found.rests_on,
        note=found.note,
    )


def _view(estimate: Estimate | None) -> ConfigEstimate | None:
    return None if estimate is None else ConfigEstimate(**estimate.document())


def _range(found: tuple[float, float] | None, unit: float = 1.0) -> RangeView | None:
    return None if found is None else RangeView(low=found[0] * unit, high=found[1] * unit)
