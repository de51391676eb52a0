"""Checks and estimates a submission without opening a job."""

import time

from api.settings import Settings
from api.submission import JobSubmission, session_of_submission, shown_fields
from api.views import checked_view
from autotune.forecast.job_forecast import expected
from autotune.prediction.planning import estimate as planning
from autotune.prediction.planning.scan import Bounds
from autotune.request.rows import request_to_row
from autotune.session.trial_requests import assumed_of
from autotune.wire.predictions import ConfigEstimate, Draft, Estimate, Range
from storage.store import Store


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
    found = expected(session, store, bounds)
    rates = [one.samples_per_second.mean for one in (found.best, found.baseline) if one is not None]
    hours = session.world_size / 3600
    return Estimate(
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


def _view(estimate: planning.Estimate | None) -> ConfigEstimate | None:
    return None if estimate is None else checked_view(ConfigEstimate, estimate.document())


def _range(found: tuple[float, float] | None, unit: float = 1.0) -> Range | None:
    return None if found is None else Range(low=found[0] * unit, high=found[1] * unit)
