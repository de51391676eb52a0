"""The coefficients that predictions for a cluster use: shipped ones, made better by its micro-benchmark and by its trials."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.rates import rates_for
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.fitting.lessons import Lesson, lessons_of
from autotune.prediction.fitting.trial_fit import fit_runs
from autotune.prediction.fitting.trial_history import Runs, hardware_key, trial_history
from autotune.prediction.planning.question import SHIPPED, Question
from search_spaces.cluster import ClusterSpec
from search_spaces.trial_config import stable_hash
from storage.records import CalibrationRecord
from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Coefficients and what they rest on."""

    rates: Coefficients
    benchmark: CalibrationRecord | None
    """The newest micro-benchmark of the cluster."""
    trials: int
    """Trials of the database on the same hardware."""
    lessons: tuple[Lesson, ...] = ()
    """What these trials left over of predictions by `rates`."""

    @property
    def source(self) -> str:
        """In words, for people who read a prediction."""
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
    store: Store, cluster: ClusterSpec, engine: str, shipped: Coefficients, earlier: Sequence[Runs] = ()
) -> Calibrated:
    """What is known of the cluster: `shipped`, then its newest micro-benchmark, then its trials, each the next one's prior.

    Args:
        store: the database.
        cluster: where is predicted for.
        engine: what runs there.
        shipped: what is known without a database.
        earlier: trials on the cluster that the database has not.
    """
    newest = store.calibrations(fingerprint(cluster), limit=1)
    record = newest[0] if newest else None
    rates = shipped if record is None else coefficients_from_benchmark(record, cluster, engine, shipped)
    history = [*earlier, *trial_history(store, cluster, engine)]
    rates, trials = fit_runs(history, rates)
    return Calibrated(rates=rates, benchmark=record, trials=trials, lessons=lessons_of(history, rates))


def asked_here(store: Store, question: Question) -> Question:
    """The question with what the database knows of its cluster: what every prediction that is shown is made by."""
    found = calibrated(store, question.cluster, question.engine, rates_for(question.cluster, question.engine))
    return dataclasses.replace(question, known=found.rates, lessons=found.lessons, rests_on=found.source)


def fingerprint(cluster: ClusterSpec) -> str:
    """16 hexadecimal digits that are the same for the same hardware, whatever its name and its limit of memory.

    A CPU is described by its cores alone: there, this machine's processor is told too, since trials on a CPU run here.
    """
    here = processor() if cluster.device.kind == "cpu" else ""
    return stable_hash({**hardware_key(cluster), "processor": here})


@functools.cache
def processor() -> str:
    """The processor of this machine as Linux names it; empty where nothing does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
