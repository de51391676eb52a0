"""The search: requests, strategies, the tuning loop, the best configuration and its exports.

`import autotune` is for people's own programs: it loads none of torch, ray, optuna, sqlalchemy or our other packages.
"""

from typing import TYPE_CHECKING, Any

from autotune.measured import batches, paused, report

if TYPE_CHECKING:
    from autotune.client import Client
    from autotune.inside.tuner import InRunTuner
    from autotune.sampler import GuidedSampler
    from autotune.series_run import tune_series
    from autotune.tuning import TuneResult, tune

__all__ = ["Client", "GuidedSampler", "InRunTuner", "TuneResult", "batches", "paused", "report", "tune", "tune_series"]


def __getattr__(name: str) -> Any:
    """Load on first use: `tune` and `TuneResult` bring the whole search with them, `Client` brings httpx2,
    `GuidedSampler` Optuna, `InRunTuner` torch."""
    if name == "Client":
        from autotune.client import Client

        return Client
    if name == "InRunTuner":
        from autotune.inside.tuner import InRunTuner

        return InRunTuner
    if name == "GuidedSampler":
        from autotune.sampler import GuidedSampler

        return GuidedSampler
    if name in ("tune", "TuneResult"):
        from autotune import tuning

        return getattr(tuning, name)
    if name == "tune_series":
        from autotune.series_run import tune_series

        return tune_series
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
