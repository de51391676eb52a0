"""A submission before it is one: what it means, what it may find, what it costs. No job is opened."""

import time
from typing import Any

from pydantic import BaseModel

from api.prediction import PredictedView
from api.settings import Settings
from api.submission import JobSubmission, session_of_submission, shown_fields
from autotune.expected import Expected, expected
from autotune.jobs.request import request_to_row
from autotune.jobs.session import Session
from autotune.prediction.estimate import Estimate
from autotune.prediction.scan import Bounds
from storage.store import Store

Plain = dict[str, Any]


class DraftView(BaseModel):
    """What a submission means: it would be accepted."""

    model: str
    parameter_count: int
    """0: not known."""
    cluster: str
    world_size: int
    request: Plain
    """The fields that were given, and the defaults of the others."""
    domains: dict[str, list[Any]]
    """Knob -> values that are searched."""
    baseline: Plain
    """The configuration of trial 0."""


class ConfigEstimate(BaseModel):
    """A configuration with what is predicted of it."""

    config: Plain
    predicted: PredictedView


class RangeView(BaseModel):
    """From the least to the most that is expected."""

    low: float
    high: float


class EstimateView(BaseModel):
    """What a job may be expected to find, and to cost."""

    trials: int
    """That may run on a device: of the search, controls between them, and confirmations."""
    best: ConfigEstimate | None
    """The best of the space that probably fits; null: `note` says why."""
    baseline: ConfigEstimate | None
    gain: float | None
    """Predicted samples/s of the best over the baseline's."""
    trial_seconds: RangeView | None
    """Of a trial on warm ranks."""
    seconds: RangeView | None
    """Of all trials, one after another, within the budget of time."""
    device_hours: RangeView | None
    note: str
    """Why nothing is predicted, or not the best; empty: everything is."""


def drafted(body: JobSubmission, settings: Settings) -> DraftView:
    """Resolve and check as a submission is. Raises what that raises."""
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


def estimated(body: JobSubmission, settings: Settings, store: Store) -> EstimateView:
    """Predict what the job may find, within what the settings allow. Raises what a submission raises."""
    session = session_of_submission(body, settings, settings.submission_steps)
    bounds = Bounds(configurations=settings.plan_configurations, until=time.monotonic() + settings.plan_seconds)
    found = expected(session, store, bounds)
    rates = [one.samples_per_second.mean for one in (found.best, found.baseline) if one is not None]
    seconds = _seconds(session, found)
    hours = session.world_size / 3600
    return EstimateView(
        trials=found.trials,
        best=_view(found.best),
        baseline=_view(found.baseline),
        gain=rates[0] / rates[1] if len(rates) == 2 else None,
        trial_seconds=None
        if found.trial_seconds is None
        else RangeView(low=found.trial_seconds[0], high=found.trial_seconds[1]),
        seconds=seconds,
        device_hours=None if seconds is None else RangeView(low=seconds.low * hours, high=seconds.high * hours),
        note=found.note,
    )


def _view(estimate: Estimate | None) -> ConfigEstimate | None:
    return None if estimate is None else ConfigEstimate(**estimate.document())


def _seconds(session: Session, found: Expected) -> RangeView | None:
    """What the trials take, at most what the budget of time allows."""
    if found.trial_seconds is None:
        return None
    request = session.request
    hours = request.device_hours
    allowed = [request.max_seconds, None if hours is None else hours * 3600 / session.world_size]
    most = min((limit for limit in allowed if limit is not None), default=float("inf"))
    low, high = (min(found.trials * seconds, most) for seconds in found.trial_seconds)
    return RangeView(low=low, high=high)
