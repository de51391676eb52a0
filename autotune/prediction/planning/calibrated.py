"""The coefficients for predictions on a cluster: shipped ones, refined by its micro-benchmark and its trials."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.rates import rates_for
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.fitting.lessons import Lesson, lessons_of
from autotune.prediction.fitting.trial_fit import fit_runs
from autotune.prediction.fitting.trial_history import Runs, hardware_key, trial_history
from autotune.prediction.planning.question import SHIPPED, Question
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.trial_config import stable_hash
from storage.records import CalibrationRecord

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Coefficients and their source."""

    rates: Coefficients
    benchmark: CalibrationRecord | None
    """The newest micro-benchmark of the cluster."""
    trials: int
    """Trials of the database on the same hardware."""
    lessons: tuple[Lesson, ...] = ()
    """Residuals of these trials relative to `rates`."""

    @property
    def source(self) -> str:
        """A description for readers of a prediction."""
        parts = []
        if self.benchmark is not None:
            parts.append(benchmark_text(self.benchmark))
        if self.trials:
            parts.append(f"{self.trials} trial{'s' * (self.trials > 1)} on the same hardware")
        return " and ".join(parts) or SHIPPED


def benchmark_text(record: CalibrationRecord) -> str:
    """A micro-benchmark in words."""
    return f"a {'quick ' * record.quick}micro-benchmark of this cluster ({record.created:%Y-%m-%d %H:%M} UTC)"


def calibrated(
    store: "Store", cluster: ClusterSpec, engine: str, shipped: Coefficients, earlier: Sequence[Runs] = ()
) -> Calibrated:
    """Start from `shipped`, refine by the newest micro-benchmark, then by trials; each result is the next prior.

    Args:
        store: the database.
        cluster: the target cluster.
        engine: the engine.
        shipped: coefficients without a database.
        earlier: trials on the cluster that are not in the database.
    """
    newest = store.calibrations(fingerprint(cluster), limit=1)
    record = newest[0] if newest else None
    rates = shipped if record is None else coefficients_from_benchmark(record, cluster, engine, shipped)
    history = [*earlier, *trial_history(store, cluster, engine)]
    rates, trials = fit_runs(history, rates)
    return Calibrated(rates=rates, benchmark=record, trials=trials, lessons=lessons_of(history, rates))


def asked_here(store: "Store", question: Question) -> Question:
    """Add the database's knowledge of the cluster to the question; used for every prediction shown to users."""
    found = calibrated(store, question.cluster, question.engine, rates_for(question.cluster, question.engine))
    return dataclasses.replace(question, known=found.rates, lessons=found.lessons, rests_on=found.source)


def fingerprint(cluster: ClusterSpec) -> str:
    """16 hexadecimal digits, equal for the same hardware, independent of its name and memory limit.

    A CPU cluster is described only by its cores, so this machine's processor is included, since trials on a CPU run here.
    """
    here = processor() if cluster.device.kind == "cpu" else ""
    return stable_hash({**hardware_key(cluster), "processor": here})


@functools.cache
def processor() -> str:
    """The processor of this machine as named by Linux; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
