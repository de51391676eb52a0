"""Tests of the closed form: known limits, and the simulation."""

import dataclasses
import math

import numpy as np
import pytest

from autotune.errors import RequestError
from autotune.goodput.closed_form import best_interval, end_date, erlang_loss, expected, poisson_excess
from autotune.goodput.failures import DAY, FailureKind, FailureRates
from autotune.goodput.run import Checkpoint, Recovery, Run
from benchmarks.goodput.cases import random_case
from benchmarks.goodput.simulation import simulate


def rates(per_day: float, **fields: object) -> FailureRates:
    """Failures of a cluster of 100 nodes."""
    kinds = (FailureKind(name="gpu", per_node_day=per_day / 100),)
    return FailureRates(name="test", kinds=kinds, **fields)  # type: ignore[arg-type]


def run_of(**fields: object) -> Run:
    known = {
        "nodes": 100, "step_seconds": 1.0, "failures": rates(24.0), "replacement_seconds": 0.0, "detection_seconds": 0.0,
        "checkpoint": Checkpoint(blocking_seconds=10.0, durable_seconds=0.0, load_seconds=0.0), "restart_seconds": 0.0,
    }  # fmt: skip
    return Run(**known | fields)  # type: ignore[arg-type]


def test_without_failures_only_checkpoints_cost() -> None:
    run = run_of(failures=rates(0.0))
    assert expected(run, 90.0).effective == pytest.approx(0.9)
    assert expected(run).effective == 1.0
    assert end_date(run, 1000.0, 90.0).deviation == 0


def test_synchronous_checkpoints_follow_daly() -> None:
    run = run_of(restart_seconds=300.0)
    mean, cycle = 3600.0, 610.0
    daly = mean * math.exp(300 / mean) * math.expm1(cycle / mean) / 600
    assert expected(run, 600.0).effective == pytest.approx(1 / daly)


@pytest.mark.parametrize("block", [0.1, 1.0, 10.0, 100.0])
def test_the_best_interval_is_young_s_for_rare_failures(block: float) -> None:
    checkpoint = Checkpoint(blocking_seconds=block, durable_seconds=0.0, load_seconds=0.0)
    run = run_of(failures=rates(0.01), checkpoint=checkpoint, step_seconds=0.001)
    assert best_interval(run) == pytest.approx(math.sqrt(2 * block * DAY / 0.01), rel=0.01)


def test_no_other_interval_is_better() -> None:
    run = run_of(step_seconds=0.01)
    best = expected(run).effective
    assert all(expected(run, best_interval(run) * factor).effective < best for factor in (0.5, 0.9, 1.1, 2.0))


def test_the_interval_is_whole_steps_and_not_shorter_than_the_write() -> None:
    checkpoint = Checkpoint(blocking_seconds=0.1, durable_seconds=1000.0, load_seconds=0.0)
    run = run_of(checkpoint=checkpoint, step_seconds=7.0)
    assert best_interval(run) == 143 * 7.0
    with pytest.raises(RequestError, match=r"interval: 500 s end before a checkpoint is written, .*; give at least"):
        expected(run, 500.0)


def test_the_share_of_waiting_is_erlang_s_formula() -> None:
    assert erlang_loss(1, 0.5) == pytest.approx(1 / 3)
    assert erlang_loss(2, 1.0) == pytest.approx(0.2)
    assert expected(run_of(replacement_seconds=1800.0)).waiting == pytest.approx(1 / 3)


def test_excess_of_a_poisson_number() -> None:
    draws = np.random.default_rng(0).poisson(1.7, 200_000)
    without, excess = poisson_excess(1.7, 2)
    assert without == pytest.approx(float((draws >= 2).mean()), abs=0.005)
    assert excess == pytest.approx(float(np.maximum(draws - 2, 0).mean()), abs=0.01)


def test_the_uncertainty_of_the_rates_widens_the_end_date() -> None:
    exact, estimated = (end_date(run_of(failures=rates(24.0, events=events)), 1e6).deviation for events in (0, 20))
    assert estimated > 2 * exact


def test_quantiles_ascend_from_the_failure_free_duration() -> None:
    date = end_date(run_of(), 1e5)
    found = [date.quantile(share) for share in (1e-9, 0.05, 0.5, 0.95)]
    assert found == sorted(found)
    assert found[0] > date.earliest


def test_dropping_needs_a_second_replica() -> None:
    with pytest.raises(RequestError, match="recovery: drop needs a second replica, and the layout has 1; use restart"):
        run_of(recovery=Recovery.DROP)


@pytest.mark.prove(every=4)
@pytest.mark.parametrize("seed", range(8))
def test_the_simulation_agrees(seed: int) -> None:
    agrees(seed, runs=300)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_every_simulation_agrees(seed: int) -> None:
    agrees(seed, runs=1000)


def agrees(seed: int, runs: int) -> None:
    """The means agree within 2 %, in addition to the noise of few repetitions."""
    case = random_case(seed)
    simulated = simulate(case.run, case.work, case.interval, runs=runs, seed=seed)
    date = end_date(case.run, case.work, case.interval)
    noise = 3 * float(simulated.seconds.std()) / math.sqrt(runs) if runs < 1000 else 0.0
    assert abs(date.mean - simulated.mean) <= 0.02 * simulated.mean + noise
    assert date.quantile(0.95) == pytest.approx(float(np.quantile(simulated.seconds, 0.95)), rel=0.1)


def test_the_distribution_of_repairs_does_not_matter() -> None:
    run = run_of(replacement_seconds=3600.0, failures=rates(12.0))
    fixed = simulate(run, 3e5, 300.0, runs=300, fixed_repairs=True)
    random = simulate(run, 3e5, 300.0, runs=300)
    assert fixed.mean == pytest.approx(random.mean, rel=0.03)
    assert end_date(run, 3e5, 300.0).mean == pytest.approx(random.mean, rel=0.03)


def test_repetitions_are_reproducible_and_lose_work_only_after_failures() -> None:
    run = run_of()
    first, second = (simulate(run, 1e5, 300.0, runs=20, seed=3) for _ in range(2))
    assert (first.seconds == second.seconds).all()
    assert (first.rolled_back[first.interruptions == 0] == 0).all()
    calm = simulate(dataclasses.replace(run, failures=rates(0.0)), 1e5, 300.0, runs=3)
    assert calm.seconds == pytest.approx(1e5 + 333 * 10)
