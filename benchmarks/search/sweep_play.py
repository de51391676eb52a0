"""One sweep of the comparison: a job of twelve trials by one strategy, on real ranks or on the reference grid."""

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from autotune.request.request import JobRequest
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.tuning import finish, open_job
from benchmarks.search.contestants import BASELINES, with_contestant
from benchmarks.search.grid_design import DOMAINS, FIDELITY, MODEL, WORKLOAD, Grid
from benchmarks.search.grid_figures import Noise, mean_rates, noise_of
from benchmarks.search.grid_file import Row
from executor.runners.replay import ReplayRunner
from executor.runners.runner import Runner
from search_spaces.knob import Value
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig, stable_hash
from storage.store import open_store

SHORT = replace(FIDELITY, min_steps=5, max_seconds=1.0)
"""Fidelity of a sweep's trials: half the timed steps of the grid's, with which the winners are measured again."""
WARM = "guided, warm"
"""Guided search with the jobs of earlier seeds in its database."""
Changes = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A search trial of a sweep."""

    config: Changes
    """Knobs that differ from the defaults."""
    outcome: str
    rate: float
    """Samples/s measured in the sweep; 0: not measured."""
    seconds: float
    """When it ended, in seconds since the sweep began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Result of a sweep."""

    ranks: int
    contestant: str
    seed: int
    trials: tuple[Tried, ...]
    winner: Changes | None
    """None: no configuration may win."""
    seconds: float

    @property
    def best(self) -> TrialConfig | None:
        """The winner as a configuration."""
        return None if self.winner is None else TrialConfig().replace(self.winner)

    def line(self) -> str:
        """The sweep as a line of JSON."""
        return json.dumps(asdict(self))


def read_sweeps(path: Path) -> list[Sweep]:
    """The sweeps of a file; a truncated last line is removed."""
    if not path.exists():
        return []
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    path.write_text("".join(whole), encoding="utf-8")
    return [_sweep(json.loads(line)) for line in whole]


def play(grid: Grid, contestant: str, seed: int, runner: Runner, *, trials: int, confirm: int, warm: Path) -> Sweep:
    """Run a job and return its trials. Each has a new database, except the warm one, which uses `warm`."""
    strategy = "guided" if contestant == WARM else "random" if contestant in BASELINES else contestant
    session = prepare(request_of(grid, strategy, seed, trials, confirm))
    with tempfile.TemporaryDirectory() as folder:
        return _played(grid, session, contestant, runner, str(warm if contestant == WARM else Path(folder) / "sweep.db"))


def request_of(grid: Grid, strategy: str, seed: int, trials: int, confirm: int) -> JobRequest:
    """The job's request; the seed also sets the data, so that seeds differ in every random choice."""
    return JobRequest(
        model=MODEL, cluster=grid.cluster.name, space=grid.space.name, strategy=strategy, seed=seed, trials=trials,
        global_batch_size=WORKLOAD.global_batch_size, sequence_length=WORKLOAD.sequence_length, fidelity=SHORT,
        confirm_repeats=confirm, runner="local", ranks=grid.ranks, resolved_model=grid.model, resolved_cluster=grid.cluster,
        resolved_domains=DOMAINS[grid.ranks], resolved_base=TrialConfig(),
    )  # fmt: skip


def replay_runner(grid: Grid, rows: Sequence[Row], *seeds: object) -> Runner:
    """Replays the grid, each measurement with independent noise.

    A rate is its mean in the grid times exp(z); the variance of the normal z is the measurement's own plus the additional
    variance between repeats in the grid. The same seeds give the same noise.
    """
    noise, means = noise_of(rows), mean_rates(rows)
    by_config = {row.config: row for row in rows}
    random = Random(stable_hash([str(seed) for seed in seeds]))

    def answer(config: TrialConfig) -> TrialResult:
        measured = grid.representative(config)
        row = by_config.get(measured)
        if row is None or measured not in means:
            outcome = Outcome.FAILED if row is None else row.outcome
            return TrialResult(attempt="", outcome=outcome, message="not measured in the grid")
        return _drawn(row, means[measured], noise, random)

    return ReplayRunner(answer)


def _drawn(row: Row, mean: float, noise: Noise, random: Random) -> TrialResult:
    rate = mean * math.exp(random.gauss(0.0, math.hypot(row.within, noise.between)))
    low, high = rate * (1 - 2 * row.within), rate * (1 + 2 * row.within)
    return TrialResult(
        attempt="", outcome=Outcome.OK, samples_per_second=Interval(mean=rate, low=max(low, 0.0), high=high),
        within_relative_error=row.within, peak_memory_bytes=row.peak, unstable=row.unstable,
        step_seconds=(WORKLOAD.global_batch_size / rate,) * max(row.steps, 1),
    )  # fmt: skip


def _played(grid: Grid, session: Session, contestant: str, runner: Runner, database: str) -> Sweep:
    with open_store(database) as store:
        session = with_contestant(session, contestant, store)
        job = open_job(store, session)
        began = time.time()
        found = finish(session, store, job.id, runner)
        seconds = time.time() - began
        trials = [trial for trial in store.trials.of(job.id) if trial.purpose is Purpose.SEARCH and trial.started]
    return Sweep(
        ranks=grid.ranks, contestant=contestant, seed=session.request.seed, seconds=round(seconds, 2),
        winner=None if found.best is None else found.best.differences(TrialConfig()),
        trials=tuple(
            Tried(
                config=trial.config.differences(TrialConfig()),
                outcome=trial.outcome.value if trial.outcome else "",
                rate=trial.result.samples_per_second.mean if trial.result and trial.result.samples_per_second else 0.0,
                seconds=round(trial.finished.timestamp() - began, 2) if trial.finished else 0.0,
            )
            for trial in trials
        ),
    )  # fmt: skip


def _sweep(plain: dict[str, Any]) -> Sweep:
    return Sweep(**{**plain, "trials": tuple(Tried(**tried) for tried in plain["trials"])})
