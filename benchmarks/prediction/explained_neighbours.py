"""How accurate are predictions in explanations? Neighbours of a winner that a short job did not try, against measurements.

    autotune sweep llama-tiny --ranks 2 --strategy grid --trials 24 --no-racing --confirm-repeats 0 --db grid.db
    python -m benchmarks.prediction.explained_neighbours grid.db [--jobs 8]

The measurements of the database's latest job are replayed to short jobs of random trials. Each is explained; its predictions
for neighbours that it did not measure are compared with the measurements.
"""

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from autotune.explain.explain import explain
from autotune.explain.findings import Basis
from autotune.loop.loop import run_job
from autotune.prediction.equations.step import Z90
from autotune.request.rows import request_to_row
from autotune.session.resolve import session_of
from autotune.session.session import Session
from autotune.strategies.walks import RandomStrategy
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval, TrialResult
from storage.store import open_store

TRIALS = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Logarithms of the winner's speedup over a neighbour."""

    predicted: float
    spread: float
    measured: float
    noise: float
    """Standard deviation of `measured`, from the intervals of the two trials."""

    @property
    def error(self) -> float:
        """Logarithm of measured over predicted."""
        return self.measured - self.predicted


def main() -> None:
    """Print a line for each number of trials."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("database")
    parser.add_argument("--jobs", type=int, default=8)
    given = parser.parse_args()
    session, results = measured_in(given.database)
    print(f"{len(results)} measured configurations of {session.model.name}, {given.jobs} jobs of each length")
    for trials in TRIALS:
        found = [one for seed in range(given.jobs) for one in neighbours(session, results, trials, seed)]
        held = fmean(abs(one.error) <= Z90 * math.hypot(one.spread, one.noise) for one in found)
        off, naive = median(abs(one.error) for one in found), median(abs(one.measured) for one in found)
        print(
            f"{trials} trials: {len(found)} neighbours, median error {math.expm1(off):.0%} (assuming equal speed: "
            f"{math.expm1(naive):.0%}), mean {math.expm1(fmean(one.error for one in found)):+.0%}; bands contain {held:.0%}"
        )


def measured_in(database: str) -> tuple[Session, dict[str, TrialResult]]:
    """The latest job, and its measured configurations by hash."""
    with open_store(database) as store:
        job = store.jobs.get(None)
        trials = store.trials.of(job.id)
    return session_of(job), {t.config_hash: t.result for t in trials if t.outcome is Outcome.OK and t.result is not None}


def neighbours(session: Session, results: dict[str, TrialResult], trials: int, seed: int) -> Iterator[Neighbour]:
    """Predictions of one short job's explanation, with the measurements."""
    changes = {"strategy": "random", "trials": trials, "seed": seed, "confirm_repeats": 0, "racing": False}
    request = dataclasses.replace(session.request, **changes)  # type: ignore[arg-type]
    short = dataclasses.replace(session, request=request, strategy=RandomStrategy())
    with tempfile.TemporaryDirectory() as folder, open_store(str(Path(folder) / "jobs.db")) as store:
        job = store.jobs.create(request_to_row(request))
        run_job(short, store, job.id, ReplayRunner(results))
        explanation = explain(store, job.id)
    own = results[explanation.config.hash].samples_per_second
    for finding in explanation.knobs:
        for point in finding.curve:
            config = session.space.admitted(explanation.config.replace({finding.knob: point.value}))
            other = results[config.hash].samples_per_second if config.hash in results else None
            if point.source is Basis.PREDICTED and point.speedup and own and other:
                yield Neighbour(
                    predicted=math.log(point.speedup.mean),
                    spread=math.log(point.speedup.high / point.speedup.low) / (2 * Z90),
                    measured=math.log(own.mean / other.mean),
                    noise=math.hypot(noise_of(own), noise_of(other)),
                )


def noise_of(rate: Interval) -> float:
    """Standard deviation of the rate's logarithm."""
    return math.log(rate.high / rate.low) / (2 * 1.96) if rate.low > 0 else 0.5


if __name__ == "__main__":
    main()
