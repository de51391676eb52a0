"""Expected time of a run with failures, in closed form.

Failures are a Poisson process of rate l; a second failure during a recovery starts that recovery again. Work t between
checkpoints, a checkpoint stops training for b and is durable L after the stop; c = t + b. A recovery that loads a checkpoint
takes D.

1. Kept work. Let x ~ Exp(l) be the time from the end of a recovery to the next failure that rolls back. floor((x - L) / c)
   checkpoints are durable. P(x >= j c + L) = exp(-l (j c + L)), hence the kept work per second of x is k = l t exp(-l L) /
   (exp(l c) - 1). L = 0 is Daly's complete model (FGCS 22 (3), 2006, equation 20); L > 0 adds checkpoints written beside
   training.
2. Recovery. With restarts of the recovery its mean is E(D) = (exp(l D) - 1) / l, so a second of x costs 1 + l E(D) = exp(l D)
   seconds. Failures that are survived in place, at the rate l_i, add l_i E(m), m being the stop. Planned interruptions add p P.
3. Missing nodes. Nodes that fail at the rate a need the mean time R until they are back. A job that stops while more than s
   nodes are missing is a loss system: nobody fails while it stops. By Erlang's formula it stops for the share B(s + 1, a R) of
   the time, whatever the distribution of R (Sevastyanov 1957). A job that continues has a Poisson number n of nodes missing,
   mean a R (M/G/infinity), and misses E[(n - s)+] of its nodes. A run begins with all its spares, so that it waits less in the
   first R: `_waiting_seconds`.
4. A job that continues without them runs at the speed v < 1: then rates per second of work are divided by v.

   effective = k / (1 / v + l E(D) / v + l_i E(m) / v + p P / v) * (1 - B) / step overhead.

5. Interval. The factor t / (exp(l c) - 1) alone depends on t: its maximum is l t = 1 + W(-exp(-1 - l b)), W being Lambert's
   function; for small l b this is Young's sqrt(2 b / l) (CACM 17 (9), 1974). Neither D nor L moves it; L only bounds it from
   below, because a checkpoint starts after the previous one is durable.
6. End date. Cycles from one rollback to the next are independent. The time until the work w is kept has the variance w / E(g) *
   Var(d - E(d) / E(g) g), d and g being the duration and the kept work of a cycle (renewal-reward central limit theorem).
   Missing nodes add the variance of a Markov chain's cost. The variance of the rates' estimate, (dT/dl)^2 l^2 / events, is
   added. Quantiles are those of a shifted log-normal distribution, which starts at the time without failures.
"""

import dataclasses
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.goodput.run import Recovery, Run

Floats: TypeAlias = NDArray[np.float64]
EDGE = 1e-12
"""Rates per interval below this are treated as no failures."""
NEGLIGIBLE = 1e-6
"""Share of waiting or missing rate below which its course over the run is not integrated."""
ROUNDS = 60
"""Iterations of fixed points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRun:
    """Expected course of a run. Times are in seconds."""

    interval: float
    """Work between checkpoints."""
    effective: float
    """Effective training time ratio: kept work, in seconds of failure-free training, per second."""
    checkpointing: float
    """Share of the time in which checkpoints stop training."""
    waiting: float
    """Share of the time in which the job waits for a node."""
    missing: float
    """Mean share of the rate that is missing while the job runs without nodes."""
    interruptions_per_second: float
    """Unexpected ones, which also happen during recoveries."""
    planned_per_second: float
    failure_free: float
    """Seconds per second of kept work without failures: overhead and checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndDate:
    """Distribution of a run's duration in seconds."""

    course: ExpectedRun
    """The run's expected course, averaged over its duration."""
    mean: float
    deviation: float
    earliest: float
    """Without any failure."""

    def quantile(self, share: float) -> float:
        """The duration that is not exceeded with the probability `share`."""
        excess = self.mean - self.earliest
        if not excess > 0 or not self.deviation:
            return self.mean
        spread = math.sqrt(math.log1p((self.deviation / excess) ** 2))
        return self.earliest + excess * math.exp(spread * NormalDist().inv_cdf(share) - spread**2 / 2)


def best_interval(run: Run) -> float:
    """The work between checkpoints that keeps most work, in seconds: whole steps (steps 1 and 5 of the module)."""
    rate = run.rate * run.rollback_share
    block, step = run.checkpoint.blocking_seconds, run.step
    if rate <= 0:
        return math.inf
    optimum = (1 + _lambert(1 + rate * block)) / rate
    least = max(step, run.checkpoint.durable_seconds - block)
    return max(round(optimum / step), math.ceil(least / step - 1e-9)) * step


def expected(run: Run, interval: float | None = None, horizon: float = math.inf) -> ExpectedRun:
    """The expected course of a run that saves after every `interval` seconds of work; None: the best interval.

    Args:
        run: the run.
        interval: seconds of work between checkpoints; None: the best.
        horizon: duration over which the course is averaged. The run begins without missing nodes; infinite: its stationary
        course.

    Raises:
        RequestError: the interval is too short.
    """
    interval = best_interval(run) if interval is None else interval
    run.require_interval(interval)
    missing = _missing(run, horizon)
    speed, active = 1 - missing.share, 1 - missing.waiting
    rollback, in_place = _rates(run, missing)
    busy, block = rollback + in_place, run.checkpoint.blocking_seconds
    kept_share = _kept(rollback / speed, interval, block, run.checkpoint.durable_seconds)
    downs = [(share, seconds + run.rollback_seconds) for share, seconds in run.detections]
    stops = in_place * _mean_retried(busy, _stops(run)) + missing.rejoin_rate * _retried(busy, missing.rejoin_seconds)
    planned = run.planned_rate * run.planned_seconds
    running = 1 / (1 + rollback * _mean_retried(busy, downs) + stops + planned)
    checkpointing = 0.0 if math.isinf(interval) else block / (interval + block)
    return ExpectedRun(
        interval=interval,
        effective=kept_share * speed * running * active / run.step_overhead,
        checkpointing=checkpointing * running * active,
        waiting=missing.waiting,
        missing=missing.share,
        interruptions_per_second=busy * active * (1 - planned * running),
        planned_per_second=run.planned_rate * running * active,
        failure_free=run.step_overhead * (1.0 if math.isinf(interval) else (interval + block) / interval),
    )


def end_date(run: Run, work: float, interval: float | None = None) -> EndDate:
    """When `work` seconds of failure-free training are kept (steps 1 to 6 of the module).

    Args:
        run: the run.
        work: step seconds times steps.
        interval: seconds of work between checkpoints; None: the best.
    """
    course = _course(run, work, interval)
    mean = work / course.effective
    variance = work * run.step_overhead * _variance(run, course.interval, _missing(run, mean))
    if run.failures.events:
        kinds = [dataclasses.replace(kind, per_node_day=kind.per_node_day * 1.01) for kind in run.failures.kinds]
        more = dataclasses.replace(run, failures=dataclasses.replace(run.failures, kinds=tuple(kinds)))
        slope = (work / _course(more, work, course.interval).effective - mean) / 0.01
        variance += slope**2 / run.failures.events
    return EndDate(course=course, mean=mean, deviation=math.sqrt(variance), earliest=work * course.failure_free)


def _course(run: Run, work: float, interval: float | None) -> ExpectedRun:
    """The course averaged over the run's own duration."""
    course = expected(run, interval)
    for _ in range(4 if course.waiting + course.missing > NEGLIGIBLE else 0):
        course = expected(run, course.interval, work / course.effective)
    return course


def _rates(run: Run, missing: "_Missing") -> tuple[float, float]:
    """Failures per second that roll back, and that are survived in place."""
    rollback = run.rate * missing.exposed * run.rollback_share + missing.lost_all
    return rollback, run.rate * missing.exposed * (1 - run.rollback_share) - missing.lost_all


def _waiting_seconds(rate: float, seconds: float, spares: int, active: float) -> float:
    """Expected wait during `active` seconds of running that begin without a missing node.

    On the clock that stops while the job waits, the number of missing nodes is a birth-death chain on 0..spares; every birth at
    `spares` is a wait with the mean `seconds / (spares + 1)`. The time in that state is integrated by implicit Euler steps.
    """
    flow = _flow(rate, seconds, spares)
    # Steps of the integral of waits.
    transient_steps = 100
    step = active / transient_steps
    advance = np.linalg.inv(np.eye(spares + 1) - step * flow)
    chance, at_limit = np.eye(spares + 1)[0], 0.0
    for _ in range(transient_steps):
        before, chance = chance, advance @ chance
        at_limit += step * float(before[-1] + chance[-1]) / 2
    return at_limit * rate * seconds / (spares + 1)


def _flow(rate: float, seconds: float, most: int) -> Floats:
    """(most + 1, most + 1) Generator of the number of missing nodes, at most `most`; columns are the states that are left."""
    states = np.arange(most + 1)
    births, deaths = np.where(states < most, rate, 0.0), states / seconds
    return np.diag(births[:-1], -1) + np.diag(deaths[1:], 1) - np.diag(births + deaths)


def erlang_loss(servers: int, load: float) -> float:
    """Probability that all `servers` are busy under `load` Erlang (B of step 3)."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked


def poisson_excess(mean: float, spares: int) -> tuple[float, float]:
    """(P(n >= spares), E[(n - spares)+]) of a Poisson number n."""
    term, below, excess = math.exp(-mean), 0.0, mean - spares
    for count in range(spares):
        below += term
        excess += (spares - count) * term
        term *= mean / (count + 1)
    return max(1 - below, 0.0), max(excess, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Missing:
    """What missing nodes cost."""

    waiting: float = 0.0
    share: float = 0.0
    """Of the rate."""
    exposed: float = 1.0
    """Share of the nodes that can fail."""
    lost_all: float = 0.0
    """Rate of failures of the last replica."""
    rejoin_rate: float = 0.0
    rejoin_seconds: float = 0.0


def _missing(run: Run, horizon: float) -> _Missing:
    load = run.taking_rate * run.replacement_seconds
    if run.waits:
        waiting = erlang_loss(run.spares + 1, load)
        if math.isfinite(horizon) and waiting > NEGLIGIBLE:
            active = horizon * (1 - waiting)
            waited = _waiting_seconds(run.taking_rate, run.replacement_seconds, run.spares, active)
            waiting = waited / (active + waited)
        return _Missing(waiting=waiting)
    filled = _filled(horizon, run.replacement_seconds)
    if run.recovery is Recovery.REPLAN:
        without, excess = _mean_excess(load * filled, run.spares)
        again = run.restart_seconds + run.checkpoint.load_seconds + run.checkpoint.blocking_seconds
        down = sum(part * seconds for part, seconds in run.detections) + run.rollback_seconds
        repair = run.replacement_seconds
        rejoins = run.taking_rate * without * float(filled.mean())
        return _Missing(
            share=min(excess * run.lost_rate, 0.99),
            rejoin_rate=rejoins * _returns_while_running(run.rate, down, repair) if repair else 0.0,
            rejoin_seconds=again,
        )
    low, high = 0.0, 1.0
    for _ in range(ROUNDS):
        share = (low + high) / 2
        without, excess = _mean_excess(load * (1 - share) * filled, run.spares)
        joining = run.rate * (1 - run.rollback_share) + run.taking_rate * run.rollback_share * without
        next_share = ((1 - share) * joining * run.join_seconds + excess) / run.replicas
        low, high = (share, high) if next_share > share else (low, share)
    lost_all = run.rate * (1 - run.rollback_share) * (1 - share) * share ** (run.replicas - 1)
    return _Missing(share=share, exposed=1 - share, lost_all=lost_all)


def _filled(horizon: float, seconds: float) -> Floats:
    """The mean number of missing nodes at times of a run that begins without, relative to the stationary one (M/M/infinity)."""
    if math.isinf(horizon) or not seconds:
        return np.ones(1)
    # Times of a run at which missing nodes are counted.
    filling = 24
    times = (np.arange(filling) + 0.5) / filling * horizon
    return -np.expm1(-times / seconds)


def _mean_excess(loads: Floats, spares: int) -> tuple[float, float]:
    """`poisson_excess`, averaged over times."""
    excesses = [poisson_excess(load, spares) for load in loads.tolist()]
    return sum(without for without, _ in excesses) / len(excesses), sum(excess for _, excess in excesses) / len(excesses)


def _stops(run: Run) -> list[tuple[float, float]]:
    """(Share, seconds) of stops in place: detection, the move, and on average half of the step that was interrupted."""
    return [(share, seconds + run.in_place_seconds + run.step / 2) for share, seconds in run.detections]


def _mean_retried(rate: float, parts: list[tuple[float, float]]) -> float:
    """The mean of E(D) over (share, seconds)."""
    return sum(share * _retried(rate, seconds) for share, seconds in parts)


def _square_retried(rate: float, parts: list[tuple[float, float]]) -> float:
    """The second moment of recoveries of (share, seconds)."""
    return sum(share * (_retried_variance(rate, seconds) + _retried(rate, seconds) ** 2) for share, seconds in parts)


def _returns_while_running(rate: float, down: float, repair: float) -> float:
    """Nodes that come back while the job runs, relative to their number if repairs did not depend on the job's state.

    A node that is back during the recovery is used at once. With exponential repairs of the rate h = 1 / repair, a recovery
    ends before the repair with the probability q = (l + h) g / (h + l g), g = exp(-(l + h) down); then the job alternates
    between running and recovery.
    """
    back = 1 / repair
    gap = math.exp(-(rate + back) * down)
    before = (rate + back) * gap / (back + rate * gap)
    running = back / (back + rate) / (1 - rate / (back + rate) * before)
    return before * running * math.exp(rate * down)


def _retried(rate: float, seconds: float) -> float:
    """E(D) of step 2."""
    return math.expm1(rate * seconds) / rate if rate * seconds > EDGE else seconds


def _retried_variance(rate: float, seconds: float) -> float:
    """Variance of a recovery that starts again at each failure."""
    load = rate * seconds
    if load < 1e-4:
        return rate * seconds**3 / 3
    return (math.exp(2 * load) - 1 - 2 * load * math.exp(load)) / rate**2


def _kept(rate: float, interval: float, block: float, durable: float) -> float:
    """k of step 1: work kept per second outside of recoveries."""
    if math.isinf(interval):
        return 1.0 if rate <= 0 else 0.0
    cycle = interval + block
    if rate * cycle < EDGE:
        return interval / cycle
    return rate * interval * math.exp(-rate * durable) / math.expm1(rate * cycle)


def _variance(run: Run, interval: float, missing: _Missing) -> float:
    """Step 6: variance of the duration per second of kept work."""
    rollback, in_place = _rates(run, missing)
    speed, busy = 1 - missing.share, rollback + in_place
    downs = [(share, seconds + run.rollback_seconds) for share, seconds in run.detections]
    down = _mean_retried(busy, downs)
    planned = run.planned_rate * run.planned_seconds
    stops = in_place * _mean_retried(busy, _stops(run)) + missing.rejoin_rate * _retried(busy, missing.rejoin_seconds) + planned
    active = 1 + rollback * down + stops
    squares = (
        in_place * _square_retried(busy, _stops(run))
        + missing.rejoin_rate * _retried(busy, missing.rejoin_seconds) ** 2
        + planned * run.planned_seconds
        + active * _missing_variance(run, missing)
    )
    wait = active * missing.waiting / (1 - missing.waiting)
    block, durable = run.checkpoint.blocking_seconds, run.checkpoint.durable_seconds
    per_work = 1.0 if math.isinf(interval) else (interval + block) / interval
    rate = rollback / speed
    cycle = interval + block
    if rate * min(cycle, 1 / EDGE) < 1e-9:
        return squares / speed * per_work
    cost = (1 + stops + wait) / speed
    first, ratio = math.exp(-rate * durable), math.exp(-rate * cycle)
    complement = -math.expm1(-rate * cycle)
    mean_x, mean_n = 1 / rate, first * ratio / complement
    var_n = first * ratio * (1 + ratio) / complement**2 - mean_n**2
    cov = first * (cycle * ratio / complement**2 + (durable + 1 / rate) * ratio / complement) - mean_x * mean_n
    var_cycle = cost**2 / rate**2 + _square_retried(busy, downs) - down**2 + mean_x / speed * squares
    mean_cycle, gain = cost * mean_x + down, interval * mean_n
    slope = mean_cycle / gain
    return (var_cycle - 2 * slope * interval * cost * cov + slope**2 * interval**2 * var_n) / gain


def _missing_variance(run: Run, missing: _Missing) -> float:
    """Variance per second of the time that missing nodes cost: waits, or slower steps.

    Missing nodes come in bursts. With c(n) the cost per second of n missing nodes, p the stationary distribution of n and Q its
    generator, the variance is 2 sum p c h, where h solves Q h = mean(c) - c. Waits add p(spares) a 2 w^2 by their own lengths.
    """
    load, spares = run.taking_rate * run.replacement_seconds, run.spares
    joins = run.rate * (run.join_seconds / run.replicas) ** 2 if run.recovery is Recovery.DROP else 0.0
    if not load or missing.waiting + missing.share < NEGLIGIBLE:
        return joins
    most = spares if run.waits else spares + math.ceil(load + 8 * math.sqrt(load) + 8)
    numbers = np.arange(most + 1)
    weights = np.cumsum(np.log(np.concatenate([[1.0], load / numbers[1:]])))
    chances = np.exp(weights - weights.max())
    chances /= chances.sum()
    wait = run.replacement_seconds / (spares + 1)
    if run.waits:
        costs, added_variance = (
            np.where(numbers == spares, run.taking_rate * wait, 0.0),
            float(chances[-1]) * run.taking_rate * 2 * wait**2,
        )
    else:
        cost_per_node = run.lost_rate if run.recovery is Recovery.REPLAN else 1 / run.replicas
        costs, added_variance = np.minimum(np.maximum(numbers - spares, 0) * cost_per_node, 1.0), joins
    mean = float(chances @ costs)
    transposed = _flow(run.taking_rate, run.replacement_seconds, most).T
    solved = np.linalg.solve(np.outer(np.ones(most + 1), chances) - transposed, costs - mean)
    return added_variance + 2 * float((chances * costs) @ solved)


def _lambert(exponent: float) -> float:
    """W(-exp(-exponent)) of the principal branch, for an exponent of at least 1, by Halley's iteration."""
    target = -math.exp(-exponent)
    if exponent - 1 < 1e-9:
        return -1 + math.sqrt(2 * max(exponent - 1, 0.0))
    guess = -1 + math.sqrt(2 * (exponent - 1)) if exponent < 1.5 else target
    for _ in range(ROUNDS):
        grown = math.exp(guess)
        error = guess * grown - target
        step = error / (grown * (guess + 1) - (guess + 2) * error / (2 * guess + 2))
        guess -= step
        if abs(step) < 1e-14:
            break
    return guess
