"""Measured / predicted time and memory of measurements, with what distinguishes them: what sources are compared by."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.evaluation.row_cases import refusal
from autotune.evaluation.table_predictor import as_read, cases_of_rows
from autotune.evaluation.validation.row import Row, blinded
from autotune.evaluation.validation.truth import peak_bytes, step_seconds
from autotune.knowledge.measurement import Measurement, Trial
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.fitting.residual import features

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """Arrays over n measurements."""

    features: Array
    """(n, f) Those of the residuals of tables."""
    stack: Array
    """(n, s) Equal rows: the same device and the same software."""
    time: Array
    """(n,) Logarithm of measured / predicted seconds; NaN: no time."""
    memory: Array
    """(n,) The same of the peak; NaN: not measured."""
    noise: Array
    """(n,) Standard deviation of the logarithm of the measured seconds."""

    def __len__(self) -> int:
        return len(self.time)

    def take(self, places: Index) -> "Residuals":
        """Those at these places."""
        return Residuals(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})


def residuals_of(measurements: Sequence[Measurement], rates: Coefficients) -> tuple[Residuals, Index]:
    """The residuals, and for each the place of its measurement; those that cannot be predicted are left out."""
    parts, places = [], list[int]()
    for chosen, cases, seconds, peaks, rows in _batches(measurements):
        held = memory(cases, rates)
        predicted = as_read(held, rows) if rows else held.allocated
        ones, layouts, software = np.ones(len(chosen)), cases.layouts, cases.software
        words = (cases.hardware.peak, software.elementwise, software.attention_speed, software.scores)
        parts.append(
            Residuals(
                features=features(cases),
                stack=np.stack([np.broadcast_to(word, len(chosen)) for word in words], axis=1),
                time=np.log(seconds / (seconds_of(cases, rates) * ones)),
                memory=np.log(peaks / (predicted * ones)),
                noise=np.array([measurements[place].noise for place in chosen]) + 0 * layouts.tensor,
            )
        )
        places += chosen
    if not parts:
        empty = np.empty(0)
        return Residuals(features=np.empty((0, 1)), stack=np.empty((0, 4)), time=empty, memory=empty, noise=empty), np.empty(
            0, dtype=np.int64
        )
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Residuals.__dataclass_fields__}
    return Residuals(**joined), np.array(places, dtype=np.int64)


def _batches(
    measurements: Sequence[Measurement],
) -> Iterator[tuple[list[int], Cases, Array, Array, Sequence[Row]]]:
    """Places, cases, seconds, peaks and, for tables, rows of measurements that fit into one set of cases."""
    rows: list[tuple[int, Row]] = []
    trials: dict[tuple[object, ...], list[tuple[int, Trial]]] = {}
    for place, measurement in enumerate(measurements):
        if (trial := measurement.trial) is not None:
            config = trial.config
            key = (trial.setting.key, config.precision, config.attention_backend == "math")
            trials.setdefault(key, []).append((place, trial))
        elif measurement.row is not None and refusal(measurement.row) is None:
            rows.append((place, measurement.row))
    if rows:
        seconds = np.array([step_seconds(row) or np.nan for _, row in rows])
        peaks = np.array([peak_bytes(row) or np.nan for _, row in rows])
        yield (
            [place for place, _ in rows],
            cases_of_rows([blinded(row) for _, row in rows]),
            seconds,
            peaks,
            [row for _, row in rows],
        )
    for alike in trials.values():
        setting = alike[0][1].setting
        configs = [trial.config for _, trial in alike]
        cases = cases_of(setting.model, setting.cluster, setting.workload, configs, setting.engine)
        seconds = np.array([setting.global_batch_size / (trial.samples_per_second or np.nan) for _, trial in alike])
        peaks = np.array([trial.peak_memory_bytes or np.nan for _, trial in alike])
        yield [place for place, _ in alike], cases, seconds, peaks, ()
