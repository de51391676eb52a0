"""What is known before a job's first trial: coefficients, and what earlier jobs' trials left over of predictions."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.rates import rates_for
from autotune.prediction.fitting.lessons import Lesson
from autotune.prediction.fitting.trial_history import Runs, jobs_elsewhere
from autotune.prediction.planning.calibrated import calibrated
from autotune.prediction.planning.question import SHIPPED
from search_spaces.cluster import ClusterSpec
from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Frozen when a job begins, so that it decides the same whenever it is resumed."""

    rates: Coefficients
    lessons: tuple[Lesson, ...] = ()
    source: str = SHIPPED
    """In words, what it rests on."""
    left_out: int = 0
    """Jobs of the database that ran on other hardware: nothing of them is carried over."""

    @property
    def note(self) -> str:
        """In words, for people who begin a job."""
        told = f"predictions rest on {self.source}"
        if self.lessons:
            told += f", and on what {len(self.lessons)} of them taught"
        if self.left_out:
            told += f"; left out, because they ran on other hardware: {self.left_out} job{'s' * (self.left_out > 1)}"
        return told


def learn_prior(store: Store, cluster: ClusterSpec, engine: str, earlier: Sequence[Runs] = ()) -> Prior:
    """What the database knows of the cluster: its micro-benchmark, and trials of the same hardware and engine.

    Args:
        store: the database.
        cluster: where the job runs.
        engine: what runs it.
        earlier: trials from elsewhere; they count before those of the database.
    """
    known = calibrated(store, cluster, engine, rates_for(cluster, engine), earlier)
    return Prior(
        rates=known.rates,
        lessons=known.lessons,
        source=known.source,
        left_out=jobs_elsewhere(store, cluster, engine),
    )


def shipped_prior(cluster: ClusterSpec, engine: str) -> Prior:
    """What is known without a database."""
    return Prior(rates=rates_for(cluster, engine))
