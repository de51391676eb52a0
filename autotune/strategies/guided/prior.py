"""Knowledge before a job's first trial: coefficients, and residuals learned from earlier jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.rates import rates_for
from autotune.prediction.fitting.lessons import Lesson
from autotune.prediction.fitting.trial_history import Runs, jobs_elsewhere
from autotune.prediction.planning.calibrated import Borrowed, calibrated
from autotune.prediction.planning.question import SHIPPED
from search_spaces.clusters.cluster import ClusterSpec

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Frozen when a job begins, so that a resumed job makes the same decisions."""

    rates: Coefficients
    lessons: tuple[Lesson, ...] = ()
    source: str = SHIPPED
    """The source of the coefficients, in words."""
    left_out: int = 0
    """Jobs in the database that ran on other hardware and are not used."""

    @property
    def note(self) -> str:
        """A sentence for users who start a job."""
        text = f"predictions rest on {self.source}"
        if self.lessons:
            text += f", with residuals learned from {len(self.lessons)} of them"
        if self.left_out:
            text += f"; left out, because they ran on other hardware: {self.left_out} job{'s' * (self.left_out > 1)}"
        return text


def learn_prior(
    store: "Store", cluster: ClusterSpec, engine: str, earlier: Sequence[Runs] = (), borrowed: Borrowed | None = None
) -> Prior:
    """Learn from the database: the cluster's micro-benchmark, and trials on the same hardware and engine.

    Args:
        store: the database.
        cluster: where the job runs.
        engine: the engine of the job.
        earlier: trials from other sources; they precede those of the database.
        borrowed: what measurements by others add.
    """
    known = calibrated(store, cluster, engine, rates_for(cluster, engine), earlier, borrowed)
    return Prior(
        rates=known.rates,
        lessons=known.lessons,
        source=known.source,
        left_out=jobs_elsewhere(store, cluster, engine),
    )


def shipped_prior(cluster: ClusterSpec, engine: str) -> Prior:
    """The prior without a database."""
    return Prior(rates=rates_for(cluster, engine))
