"""The search: requests, strategies, the tuning loop, the best configuration and its exports.

`import autotune` is for people's own programs: it loads none of torch, ray, optuna, sqlalchemy or our other packages.
"""

from typing import TYPE_CHECKING, Any

from autotune.measured import report

if TYPE_CHECKING:
    from autotune.tuning import TuneResult, tune

__all__ = ["TuneResult", "report", "tune"]


def __getattr__(name: str) -> Any:
    """Load `tune` and `TuneResult` on first use, since they bring the whole search with them."""
    if name in ("tune", "TuneResult"):
        from autotune import tuning

        return getattr(tuning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
