"""Made-up predictions and trials, whose answers are known."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.strategies.guided.described import Array, Described, Observations


def described(rates: Sequence[float], features: Sequence[Sequence[float]] | None = None, **changes: Any) -> Described:
    """Predicted rates of configurations that lie on a line, one step apart, and fit easily."""
    count = len(rates)
    fields: dict[str, Any] = {
        "log_rate": np.log(np.array(rates, dtype=np.float64)),
        "learned": np.zeros(count),
        "penalty": np.zeros(count),
        "features": np.array(features if features is not None else [[float(place)] for place in range(count)]),
        "needed": np.full(count, 50.0),
        "outside": np.zeros(count),
        "tags": np.full((count, 2), 25.0),
        "room": np.full(count, 100.0),
        "memory_spread": np.full(count, 0.1),
        "kind": np.zeros(count, dtype=np.int64),
        "cost": np.ones(count),
        "mesh": np.zeros(count, dtype=np.int64),
    }
    return Described(**{name: np.array(value) for name, value in (fields | changes).items()})


def told(
    pool: Described, places: Sequence[int], rates: Sequence[float | None], out_of_memory: bool = True, noise: float = 0.0
) -> Observations:
    """Trials of these places: their rates, None where one failed."""
    ran = np.array([value is not None for value in rates], dtype=bool)
    return Observations(
        described=pool.take(np.array(places, dtype=np.int64)),
        log_rate=np.array([np.log(value) if value else np.nan for value in rates], dtype=np.float64),
        noise=np.full(len(places), noise),
        ran=ran,
        out_of_memory=~ran & out_of_memory,
        peak=np.full(len(places), np.nan),
        wins=ran,
    )


def everything(pool: Described) -> Array:
    """All may be chosen."""
    return np.ones(len(pool), dtype=bool)
