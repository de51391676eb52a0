"""Form, plan, sweep and job page predict the same rate of a configuration from one database."""

import dataclasses
import math

import numpy as np
import pytest

from autotune.forecast import expected, initial_forecaster_of, question_of_session
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.scan import Bounds
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import resolve, with_prior
from autotune.session.session import Session
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from storage.leases import current_owner
from storage.store import Store
from tests.sampling import sampled

FIELDS = {"model": "llama-tiny", "cluster": "local", "ranks": 2, "runner": "local"}
NOISE = 0.3
"""Of trials' logarithms: so much is left over of what coefficients can say."""


def session_of(**fields: object) -> Session:
    return resolve(request_from_fields({**FIELDS, **fields}))


@pytest.fixture
def trained(store: Store) -> Store:
    """A store with a job on the same hardware, whose steps took a fifth of what is shipped, with much left over."""
    session = session_of(space="zero")
    draw = np.random.default_rng(0)
    configs = [*session.space.enumerate()][:12]
    question = question_of_session(session)
    assert question is not None
    cases = cases_of(question.model, question.cluster, question.workload, configs, question.engine)
    seconds = seconds_of(cases, question.rates) / 5 * np.exp(NOISE * draw.standard_normal(len(configs)))
    lease = store.jobs.acquire(store.jobs.create(request_to_row(session.request)).id, current_owner())
    for config, step in zip(configs, seconds.tolist(), strict=True):
        token = store.attempts.start(lease, store.trials.add(lease, config, Purpose.SEARCH).number).token
        rate = question.global_batch_size / step
        result = TrialResult(
            attempt=token,
            outcome=Outcome.OK,
            samples_per_second=Interval(mean=rate, low=rate, high=rate),
            peak_memory_bytes=10**7,
        )
        store.attempts.finish(lease, result)
    store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "")
    return store


def asked(**pins: object) -> Question:
    """As `predict` and `plan` ask."""
    return question_of(model_of("llama-tiny", None, None, None), cluster_of("local", 2, None), pins=pins, space="zero")


@pytest.mark.prove
@pytest.mark.parametrize("strategy", sampled(["guided", "random"], every=2))
def test_all_doors_show_one_rate_after_trials_that_no_coefficient_explains(trained: Store, strategy: str) -> None:
    session = session_of(strategy=strategy, space="zero")
    baseline = session.baselines[0]
    form = expected(session, trained, Bounds())
    assert form.best is not None and form.baseline is not None
    configs = [baseline, form.best.config]

    told = estimates(asked_here(trained, asked()), configs)
    lease = trained.jobs.acquire(trained.jobs.create(request_to_row(session.request)).id, current_owner())
    with_prior(session, trained, lease)
    page = initial_forecaster_of(trained, lease.job_id, session)
    assert page is not None
    rates = [one.samples_per_second.mean for one in told]
    assert [form.baseline.samples_per_second.mean, form.best.samples_per_second.mean] == pytest.approx(rates)
    assert [one.samples_per_second for one in page.of(configs)] == pytest.approx(rates)

    planned = plan(asked_here(trained, asked(**form.best.config.values())), PlanOptions(top=1)).plans[0].estimate
    assert planned.samples_per_second.mean == pytest.approx(rates[1])
    assert sum(planned.breakdown_seconds.values()) == pytest.approx(planned.step_seconds.mean)

    equations = estimates(dataclasses.replace(asked_here(trained, asked()), residuals=()), configs)
    assert abs(math.log(equations[0].samples_per_second.mean / rates[0])) > 0.01  # residuals count, or this shows nothing
    shipped = rates_for(session.cluster, "native")
    assert asked_here(trained, asked()).rates != shipped


def test_what_a_plan_ranks_is_what_it_shows(trained: Store) -> None:
    found = plan(asked_here(trained, asked()), PlanOptions(top=20)).plans
    seconds = [item.estimate.step_seconds.mean for item in found]
    assert seconds == sorted(seconds)
