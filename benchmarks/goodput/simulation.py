"""Event simulation of a run with failures, many repetitions at once. It shares no formula with `closed_form`."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.goodput.run import Recovery, Run

Array: TypeAlias = NDArray[np.float64]
UP, WAITING, STOPPED, PLANNED, DONE = range(5)
"""States of a job: it trains; waits for a node; recovers, or starts again, for a known time; is interrupted as planned; has
ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Repetitions of one run."""

    seconds: Array
    """(runs,) Duration until the work is kept."""
    interruptions: Array
    """(runs,) Unexpected failures."""
    planned: Array
    """(runs,) Planned interruptions."""
    waiting: Array
    """(runs,) Seconds in which the job waited for a node."""
    rolled_back: Array
    """(runs,) Seconds of work that was done and lost."""

    @property
    def mean(self) -> float:
        """Mean duration in seconds."""
        return float(self.seconds.mean())


def simulate(
    run: Run, work: float, interval: float, *, runs: int = 1000, seed: int = 0, fixed_repairs: bool = False
) -> Simulated:
    """Simulate `runs` repetitions until `work` seconds of failure-free training are kept.

    Every node fails with the rates of its kinds, independently of the others: the next failure of the cluster has an
    exponential distribution, and its kind and whether it takes the node are drawn. The next event of every repetition is the
    earliest of: a failure, the end of the job's state, a planned interruption, a node that is back, a replica that joins. All
    repetitions advance to their own next event.

    Args:
        run: the run.
        work: step seconds times steps.
        interval: seconds of work between checkpoints.
        runs: repetitions.
        seed: of the draws.
        fixed_repairs: whether each replacement takes exactly its mean time; otherwise the time is exponential.

    Raises:
        RequestError: the interval is too short.
    """
    run.require_interval(interval)
    return _Simulation(run, work * run.step_overhead, interval, runs, np.random.default_rng(seed), fixed_repairs).result()


class _Simulation:
    def __init__(
        self, run: Run, work: float, interval: float, runs: int, random: np.random.Generator, fixed_repairs: bool
    ) -> None:
        self.run, self.work, self.interval, self.random, self.fixed = run, work, interval, random, fixed_repairs
        kinds, total = run.failures.kinds, run.failures.per_node_day
        self.edges = np.cumsum([kind.per_node_day / total for kind in kinds])[:-1] if total else np.zeros(0)
        self.takes = np.array([kind.takes_node for kind in kinds])
        detection_seconds = [kind.detection_seconds for kind in kinds]
        self.detection = np.array([run.detection_seconds if seconds is None else seconds for seconds in detection_seconds])
        self.state = np.full(runs, UP)
        self.now, self.left, self.full = np.zeros(runs), np.zeros(runs), np.zeros(runs)
        self.position, self.saved = np.zeros(runs), np.zeros(runs)
        """Training time since the last recovery, with its checkpoints; work in the checkpoint that was loaded."""
        self.end = np.full(runs, self._until_end(np.zeros(1))[0])
        """Position at which all work is kept."""
        self.repairs, self.joins = np.full((runs, 4), -np.inf), np.full((runs, 4), -np.inf)
        """Times at which missing nodes are back, and replicas take part again; earlier ones have passed."""
        self.absent = np.zeros(runs)
        """DROP: replicas that do not take part."""
        self.interruptions, self.planned, self.waited, self.lost = (np.zeros(runs) for _ in range(4))

    def result(self) -> Simulated:
        while (self.state != DONE).any():
            self.advance()
        return Simulated(
            seconds=self.now, interruptions=self.interruptions, planned=self.planned, waiting=self.waited, rolled_back=self.lost
        )

    def advance(self) -> None:
        """Move every repetition to its next event."""
        run, up, stopped = self.run, self.state == UP, self.state == STOPPED
        alone = run.recovery in (Recovery.DROP, Recovery.REPLAN)
        missing = self._missing_nodes(slice(None)) if alone else None
        self.absent = self._absent(missing)
        speed = self._speed(missing)
        exposed = (up | stopped) * (1 - self.absent / run.replicas)
        with np.errstate(divide="ignore", invalid="ignore"):
            failure = self.random.standard_exponential(len(up)) / (exposed * run.rate)
            remaining = np.where(up, (self.end - self.position) / speed, self.left)
            events = [failure, remaining]
            if run.planned_rate:
                events.append(self.random.standard_exponential(len(up)) / (up * run.planned_rate))
        if alone:
            later = np.where(self.repairs > self.now[:, None], self.repairs, np.inf).min(axis=1) - self.now
            events += [np.inf] * (3 - len(events))
            events.append(np.where(self._missing_nodes(slice(None)) > 0, later, np.inf))
            events.append(np.where(self.joins > self.now[:, None], self.joins, np.inf).min(axis=1) - self.now)
        step = events[0]
        for times in events[1:]:
            step = np.minimum(step, times)
        done = self.state == DONE
        step = np.where(done, 0.0, np.maximum(step, 0.0))
        for handle, times in zip((self._fail, self._end_phase, self._plan, self._return, self._join), events, strict=False):
            places = np.flatnonzero((times <= step) & ~done)
            if handle == self._fail:
                self.now += step
                self.position += up * speed * step
                self.waited += (self.state == WAITING) * step
                self.left -= ~up * step
            if len(places):
                handle(places)

    def _until_end(self, saved: Array) -> Array:
        """Training time until all work is kept, without failures. The last work needs no checkpoint."""
        remaining_work = self.work - saved
        if np.isinf(self.interval):
            return remaining_work
        return remaining_work + (np.ceil(remaining_work / self.interval - 1e-9) - 1) * self.run.checkpoint.blocking_seconds

    def _missing_nodes(self, places: slice | NDArray[np.intp]) -> Array:
        """Nodes missing for which there is no spare."""
        gone = (self.repairs[places] > self.now[places, None]).sum(axis=1)
        missing: Array = np.maximum(gone - self.run.spares, 0).astype(np.float64)
        return missing

    def _absent(self, missing: Array | None) -> Array:
        """DROP: replicas that do not take part."""
        if self.run.recovery is not Recovery.DROP or missing is None:
            return self.absent
        absent: Array = np.minimum(missing + (self.joins > self.now[:, None]).sum(axis=1), self.run.replicas)
        return absent

    def _speed(self, missing: Array | None) -> Array:
        if self.run.recovery is Recovery.REPLAN and missing is not None:
            smaller: Array = np.maximum(1 - missing * self.run.lost_rate, 0.01)
            return smaller
        running: Array = 1 - self.absent / self.run.replicas
        return running

    def _fail(self, places: NDArray[np.intp]) -> None:
        run, count = self.run, len(places)
        kinds = np.searchsorted(self.edges, self.random.random(count), side="right")
        takes, detection = self.takes[kinds], self.detection[kinds]
        self.interruptions[places] += 1
        without = ((self.repairs[places] > self.now[places, None]).sum(axis=1) >= run.spares) & takes
        mean = run.replacement_seconds
        times = np.full(count, mean) if self.fixed else self.random.standard_exponential(count) * mean
        replaced_jobs = places[takes]
        self.repairs = _insert(self.repairs, self.now, replaced_jobs, times[takes])
        training = self.state[places] == UP
        again = self.random.random(count) < run.rollback_share
        if run.recovery is Recovery.DROP:
            again = again | (self.absent[places] >= run.replicas - 1)
            joins = places[~without & training & ~again]
            self.joins = _insert(self.joins, self.now, joins, np.full(len(joins), run.join_seconds))
        self._roll_back(places[again & training])
        stop = detection + run.in_place_seconds + run.step * self.random.random(count)
        full = np.where(again, detection + run.rollback_seconds, stop)
        self.full[places[training]] = full[training]
        self.left[places], self.state[places] = self.full[places], STOPPED
        if run.waits:
            self._wait(places)

    def _wait(self, places: NDArray[np.intp]) -> None:
        """Jobs that miss a node wait until enough nodes are back for one to be free."""
        missing = self._missing_nodes(places).astype(int)
        for job_index, count in zip(places[missing > 0], missing[missing > 0], strict=True):
            later = np.sort(self.repairs[job_index][self.repairs[job_index] > self.now[job_index]])
            self.left[job_index], self.state[job_index] = later[count - 1] - self.now[job_index], WAITING

    def _roll_back(self, places: NDArray[np.intp]) -> None:
        block = self.run.checkpoint.blocking_seconds
        position = self.position[places]
        if np.isinf(self.interval):
            saved_work, done = np.zeros(len(places)), position
        else:
            cycle = self.interval + block
            whole = np.floor(position / cycle)
            done = whole * self.interval + np.minimum(position - whole * cycle, self.interval)
            saved_work = np.maximum(np.floor((position - self.run.checkpoint.durable_seconds) / cycle), 0) * self.interval
        self.lost[places] += done - saved_work
        self.saved[places] += saved_work
        self.position[places] = 0
        self.end[places] = self._until_end(self.saved[places])

    def _plan(self, places: NDArray[np.intp]) -> None:
        self.planned[places] += 1
        self.state[places], self.left[places] = PLANNED, self.run.planned_seconds

    def _end_phase(self, places: NDArray[np.intp]) -> None:
        states = self.state[places]
        self.left[places] = np.where(states == WAITING, self.full[places], 0.0)
        self.state[places] = np.select([states == UP, states == WAITING], [DONE, STOPPED], UP)

    def _return(self, places: NDArray[np.intp]) -> None:
        """A node is back that was needed: its replica joins, or the smaller layout starts again on all nodes."""
        run = self.run
        later = np.where(self.repairs[places] > self.now[places, None] - 1e-6, self.repairs[places], np.inf)
        self.repairs[places, later.argmin(axis=1)] = -np.inf
        if run.recovery is Recovery.DROP:
            self.joins = _insert(self.joins, self.now, places, np.full(len(places), run.join_seconds))
        else:
            grows = places[self.state[places] == UP]
            seconds = run.restart_seconds + run.checkpoint.load_seconds + run.checkpoint.blocking_seconds
            self.state[grows], self.left[grows], self.full[grows] = STOPPED, seconds, seconds

    def _join(self, places: NDArray[np.intp]) -> None:
        later = np.where(self.joins[places] > self.now[places, None] - 1e-6, self.joins[places], np.inf)
        self.joins[places, later.argmin(axis=1)] = -np.inf


def _insert(table: Array, now: Array, places: NDArray[np.intp], after: Array) -> Array:
    """Write each time `now + after` into a column of its row that has passed; the table grows if there is none."""
    if not len(places):
        return table
    free = table[places] <= now[places, None]
    if not free.any(axis=1).all():
        table = np.concatenate([table, np.full_like(table, -np.inf)], axis=1)
        free = table[places] <= now[places, None]
    table[places, free.argmax(axis=1)] = now[places] + after
    return table
