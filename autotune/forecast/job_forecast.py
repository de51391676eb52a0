"""The expected result and cost of a job, before anything runs."""

import dataclasses
from dataclasses import dataclass

from autotune.errors import NothingFeasibleError
from autotune.forecast.initial_forecast import question_of_session, unknown_model
from autotune.loop.budget import job_seconds, most_measurements, trial_seconds_band
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.plan import PlanObjective, PlanOptions, plan
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan import Bounds
from autotune.request.request import Objective
from autotune.session.knowledge import learned_of
from autotune.session.session import Session
from search_spaces.errors import SpaceTooLargeError
from search_spaces.spaces import Pin
from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExpectation:
    """Predictions for a job."""

    trials: int
    """Most trials that run on a device: search trials, controls and confirmations."""
    baseline: StepEstimate | None
    """None: there are no predictions for such a model."""
    best: StepEstimate | None
    """The best of the space, among those that probably fit; None: `note` says why."""
    trial_seconds: tuple[float, float] | None
    """Seconds of a trial on warm ranks: of the faster of best and baseline with steady steps, and of the slower with noisy
    steps."""
    seconds: tuple[float, float] | None
    """Seconds of the whole job: search, controls, confirmations and the start of its ranks."""
    rests_on: str
    """The data behind the predictions, in words; empty: there are no predictions."""
    note: str
    """Why predictions, or that of the best, are missing; empty: none is."""


def expected(session: Session, store: Store, bounds: Bounds) -> JobExpectation:
    """Predict the result of the session's job, and the duration of its trials. Runs nothing.

    Args:
        session: the job's session.
        store: has the calibration of the cluster.
        bounds: limits of the scan of the space.
    """
    request = session.request
    trials = most_measurements(request.trials, request.control_every, request.confirm_repeats).total
    question = question_of_session(session)
    if question is None:
        note = f"{unknown_model(session.model)}: nothing is predicted before the first trial"
        return JobExpectation(trials=trials, baseline=None, best=None, trial_seconds=None, seconds=None, rests_on="", note=note)
    borrowed = learned_of(request.knowledge, store, session.cluster, request.engine)
    question = asked_here(store, _narrowed(question, session), borrowed)
    (baseline,) = estimates(question, session.baselines[:1])
    best, note = _best(question, session, bounds)
    bands = [trial_seconds_band(estimate.step_seconds.mean, request.fidelity) for estimate in (best or baseline, baseline)]
    trial_seconds = min(low for low, _ in bands), max(high for _, high in bands)
    return JobExpectation(
        trials=trials,
        baseline=baseline,
        best=best,
        trial_seconds=trial_seconds,
        seconds=job_seconds(request, session.world_size, trial_seconds),
        rests_on=question.rests_on,
        note=note,
    )


def _narrowed(question: Question, session: Session) -> Question:
    """Restrict the question to the job's own space, and to the memory that its trials may use."""
    cluster, limit = session.cluster, session.ranking.memory_limit_bytes
    if limit is not None:
        device = dataclasses.replace(cluster.device, memory_bytes=min(limit, cluster.device.memory_bytes))
        cluster = dataclasses.replace(cluster, device=device)
    pins: dict[str, Pin] = {name: list(values) for name, values in session.space.domains.items()}
    return dataclasses.replace(question, cluster=cluster, pins=pins)


def _best(question: Question, session: Session, bounds: Bounds) -> tuple[StepEstimate | None, str]:
    objective = PlanObjective.MEMORY if session.request.objective is Objective.MEMORY else PlanObjective.THROUGHPUT
    try:
        plan_result = plan(question, PlanOptions(objective=objective, top=1), bounds)
    except (NothingFeasibleError, SpaceTooLargeError) as error:
        return None, f"{error.problem}; {error.remedy}"
    return plan_result.plans[0].estimate, ""
