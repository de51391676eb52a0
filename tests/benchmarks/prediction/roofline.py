"""A small predictor, so that scores are exercised: states and activations over their degrees, FLOPs at one efficiency."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.knowledge.row import TableRow, peak_bytes, step_seconds
from benchmarks.prediction.scoring.contract import Floats, Forecast

PEAK = {"A100": 312e12, "H100": 989e12, "V100": 125e12}
CAPACITY = 75e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Time is FLOPs over 40 % of the peak, memory states and activations: both times what calibration found."""

    slowness: float = 1.0
    heaviness: float = 1.0
    shipped: bool = True

    def in_sample(self, rows: Sequence[TableRow]) -> int:
        return sum(row.source == "seen" for row in rows) if self.shipped else 0

    def refusals(self, rows: Sequence[TableRow]) -> list[str | None]:
        return [_refusal(row) for row in rows]

    def calibrated(self, rows: Sequence[TableRow]) -> "Roofline":
        plain = self.__class__(shipped=False)
        said, facts = plain.forecast(rows), [(step_seconds(row), peak_bytes(row)) for row in rows]
        slow = [seconds / float(said.step_seconds[i]) for i, (seconds, _) in enumerate(facts) if seconds]
        heavy = [peak / float(said.memory_bytes[i]) for i, (_, peak) in enumerate(facts) if peak]
        return replace(plain, slowness=float(np.median(slow or [1.0])), heaviness=float(np.median(heavy or [1.0])))

    def forecast(self, rows: Sequence[TableRow]) -> Forecast:
        seconds = np.array([_seconds(row) for row in rows], dtype=np.float64) * self.slowness
        memory = np.array([_bytes(row) for row in rows], dtype=np.float64) * self.heaviness
        return forecast_of(seconds, memory, memory > CAPACITY)


def forecast_of(seconds: Floats, memory: Floats, out_of_memory: object) -> Forecast:
    """With intervals of a tenth either way."""
    return Forecast(
        step_seconds=seconds,
        step_seconds_low=seconds * 0.9,
        step_seconds_high=seconds * 1.1,
        memory_bytes=memory,
        memory_bytes_low=memory * 0.9,
        memory_bytes_high=memory * 1.1,
        fit_probability=1.0 - np.asarray(out_of_memory, dtype=np.float64),
    )


def _refusal(row: TableRow) -> str | None:
    if (row.gpu_type or "")[:4] not in PEAK:
        return "device is unknown"
    needed = (
        row.num_layers,
        row.hidden,
        row.vocab,
        row.seq_len,
        row.num_gpus,
        row.tp,
        row.pp,
        row.dp,
        row.micro_batch,
        row.samples_per_step,
    )
    return None if all(needed) else "shape, layout or batch is unknown"


def _parameters(row: TableRow) -> float:
    assert row.num_layers and row.hidden and row.vocab
    return 12 * row.num_layers * row.hidden**2 + row.vocab * row.hidden


def _seconds(row: TableRow) -> float:
    assert row.gpu_type and row.samples_per_step and row.seq_len and row.num_gpus and row.micro_batch and row.dp and row.pp
    micro_batches = row.samples_per_step / (row.micro_batch * row.dp)
    ideal = 6 * _parameters(row) * row.samples_per_step * row.seq_len / (PEAK[row.gpu_type[:4]] * 0.4 * row.num_gpus)
    return ideal * (1 + (row.pp - 1) / max(micro_batches, 1)) * (1 + 0.02 * (row.tp or 1))


def _bytes(row: TableRow) -> float:
    assert row.tp and row.pp and row.dp and row.micro_batch and row.seq_len and row.hidden and row.num_layers
    sharded = row.dp if row.zero_stage else 1
    states = _parameters(row) / (row.tp * row.pp) * (6 + 12 / sharded)
    kept = 2 if row.recompute == "full" else 34
    return 2e9 + states + kept * row.seq_len * row.micro_batch * row.hidden * row.num_layers / row.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Knows what the table holds, by row_id; each power bends it: 1 is right, -1 the other way round."""

    seconds: dict[str, float]
    bytes: dict[str, float]
    failing: frozenset[str] = frozenset()
    power: float = 1.0

    def in_sample(self, rows: Sequence[TableRow]) -> int:
        return 0

    def refusals(self, rows: Sequence[TableRow]) -> list[str | None]:
        return [None for _ in rows]

    def calibrated(self, rows: Sequence[TableRow]) -> "Oracle":
        return self

    def forecast(self, rows: Sequence[TableRow]) -> Forecast:
        seconds = np.array([self.seconds.get(row.row_id, 1e-3) for row in rows], dtype=np.float64) ** self.power
        memory = np.array([self.bytes.get(row.row_id, 1e12) for row in rows], dtype=np.float64)
        return forecast_of(seconds, memory, [row.row_id in self.failing for row in rows])


def oracle(rows: Sequence[TableRow], power: float = 1.0) -> Oracle:
    """One who has read the table."""
    return Oracle(
        seconds={row.row_id: seconds for row in rows if (seconds := step_seconds(row))},
        bytes={row.row_id: peak for row in rows if (peak := peak_bytes(row))},
        failing=frozenset(row.row_id for row in rows if row.outcome in ("oom", "fail_unknown")),
        power=power,
    )
