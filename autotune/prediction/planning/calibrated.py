"""The coefficients for predictions on a cluster: shipped ones, refined by its micro-benchmark and its trials."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autotune.prediction.equations.coefficients import Coefficients, rates_for
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.fitting.residuals import EarlierResidual, earlier_residuals
from autotune.prediction.fitting.trial_fit import Runs, fit_runs, hardware_key, trial_history
from autotune.prediction.planning.question import SHIPPED, Question
from autotune.question.assumption import LINKS, Origin, Source
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.trial_config import stable_hash
from storage.records import CalibrationRecord

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """What measurements by others add: `autotune.knowledge`."""

    rates: Coefficients
    """The shipped coefficients, refined by measurements on other hardware."""
    runs: tuple[Runs, ...]
    """Measurements on the same devices."""
    text: str
    """The measurements in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Coefficients and their source."""

    rates: Coefficients
    benchmark: CalibrationRecord | None
    """The newest micro-benchmark of the cluster."""
    trials: int
    """Trials of the database on the same hardware."""
    residuals: tuple[EarlierResidual, ...] = ()
    """Residuals of these trials relative to `rates`."""
    borrowed: str = ""
    """Measurements by others, in words; empty: none."""

    @property
    def source(self) -> str:
        """A description for readers of a prediction."""
        parts = []
        if self.benchmark is not None:
            parts.append(benchmark_text(self.benchmark))
        if self.trials:
            parts.append(f"{self.trials} trial{'s' * (self.trials > 1)} on the same hardware")
        if self.borrowed:
            parts.append(self.borrowed)
        return " and ".join(parts) or SHIPPED


def benchmark_text(record: CalibrationRecord) -> str:
    """A micro-benchmark in words."""
    return f"a {'quick ' * record.quick}micro-benchmark of this cluster ({record.created:%Y-%m-%d %H:%M} UTC)"


def calibrated(
    store: "Store | None",
    cluster: ClusterSpec,
    engine: str,
    shipped: Coefficients,
    earlier: Sequence[Runs] = (),
    borrowed: Borrowed | None = None,
) -> Calibrated:
    """Start from `shipped`, refine by the newest micro-benchmark, then by trials; each result is the next prior.

    Args:
        store: the database; None: there is none.
        cluster: the target cluster.
        engine: the engine.
        shipped: coefficients without a database.
        earlier: trials on the cluster that are not in the database.
        borrowed: what measurements by others add, which `shipped` are then not used.
    """
    newest = store.calibrations.newest(fingerprint(cluster), limit=1) if store is not None else []
    record = newest[0] if newest else None
    before = shipped if borrowed is None else borrowed.rates
    rates = before if record is None else coefficients_from_benchmark(record, cluster, engine, before)
    history = [*earlier, *(trial_history(store, cluster, engine) if store is not None else ())]
    trial_count = int(sum(np.sum(runs.repeats) for runs in history))
    history += borrowed.runs if borrowed is not None else ()
    rates, _ = fit_runs(history, rates)
    return Calibrated(
        rates=rates,
        benchmark=record,
        trials=trial_count,
        residuals=earlier_residuals(history, rates),
        borrowed=borrowed.text if borrowed is not None else "",
    )


def asked_here(store: "Store | None", question: Question, borrowed: Borrowed | None = None) -> Question:
    """Add the database's knowledge of the cluster to the question, and that of others; used for every prediction shown to
    users."""
    shipped = rates_for(question.cluster, question.engine)
    calibration = calibrated(store, question.cluster, question.engine, shipped, borrowed=borrowed)
    source = Source.FRAMEWORK if calibration.source == SHIPPED else Source.MEASURED
    # Links of a cluster that was found here are assumed until a calibration measures them.
    measured = source is Source.MEASURED and question.cluster.name in ("local", "ray")
    return dataclasses.replace(
        question,
        assumed=tuple(item for item in question.assumed if not (measured and item.name in LINKS)),
        coefficients=calibration.rates,
        residuals=calibration.residuals,
        calibration_source=calibration.source,
        origins={**question.origins, "coefficients": Origin(source, calibration.source)},
    )


def fingerprint(cluster: ClusterSpec) -> str:
    """16 hexadecimal digits, equal for the same hardware, independent of its name and memory limit.

    A CPU cluster is described only by its cores, so this machine's processor is included, since trials on a CPU run here.
    """
    local_processor = processor() if cluster.device.kind == "cpu" else ""
    return stable_hash({**hardware_key(cluster), "processor": local_processor})


@functools.cache
def processor() -> str:
    """The processor of this machine as named by Linux; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
