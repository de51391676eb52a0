"""Random runs for comparisons of the closed form with the simulation."""

import random
from dataclasses import dataclass

from autotune.goodput.closed_form import best_interval, expected
from autotune.goodput.failures import FailureKind, FailureRates
from autotune.goodput.run import Checkpoint, Recovery, Run

SLOWEST, MOST_MISSING = 0.3, 0.2
"""Runs that keep less of their work, or miss more of their rate, are drawn again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run, its interval and its work in seconds."""

    run: Run
    interval: float
    work: float


def random_case(seed: int) -> Case:
    """A run of 512 to 100,000 devices with about 60 failures or more, half to twice the best interval."""
    draw = random.Random(seed)
    while True:
        run = _random_run(draw, list(Recovery)[seed % len(Recovery)])
        best = min(best_interval(run), 3600.0) * draw.choice((0.5, 1, 2))
        interval = max(round(best / run.step), 1) * run.step
        interval = max(interval, run.checkpoint.durable_seconds)
        course = expected(run, interval)
        if course.effective >= SLOWEST and course.missing <= MOST_MISSING:
            return Case(run=run, interval=interval, work=max(60 / run.rate, 20 * interval) * course.effective)


def _random_run(draw: random.Random, recovery: Recovery) -> Run:
    nodes = draw.choice((64, 128, 512, 1250, 2048, 4096, 12500))
    most = -1.7 if nodes < 1000 else -2.2
    kinds = (
        FailureKind(name="gpu", per_node_day=10 ** draw.uniform(-3.3, most), detection_seconds=draw.choice((None, 600))),
        FailureKind(name="network", per_node_day=10 ** draw.uniform(-4, -2.5), takes_node=False),
    )
    beside = draw.random() < 0.5
    checkpoint = Checkpoint(
        blocking_seconds=10 ** draw.uniform(0, 2),
        durable_seconds=10 ** draw.uniform(1, 2.5) if beside else 0.0,
        load_seconds=10 ** draw.uniform(0.5, 2.3),
    )
    replicas = draw.choice((4, 8, 16, 64))
    return Run(
        nodes=nodes,
        step_seconds=10 ** draw.uniform(-0.3, 1.3),
        failures=FailureRates(name="random", kinds=kinds, planned_per_day=draw.choice((0, 1))),
        checkpoint=checkpoint,
        recovery=recovery,
        detection_seconds=draw.choice((10, 60, 300)),
        restart_seconds=draw.choice((60, 300, 900)),
        spares=draw.choice((0, 1, 2, 4, 16, 64)),
        replacement_seconds=draw.choice((600, 3600, 4 * 3600, 86400)),
        in_place_share=draw.choice((1, 0.9, 0.5)),
        in_place_seconds=draw.choice((5, 30, 120)),
        join_seconds=draw.choice((60, 300)),
        replicas=replicas,
        lost_rate=draw.choice((1 / nodes, 1 / replicas / 8)),
    )
