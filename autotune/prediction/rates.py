"""The coefficients that are shipped: fitted once to measurements of others by `benchmarks/fit_coefficients.py`."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from autotune.prediction.coefficients import Coefficients
from search_spaces.cluster import ClusterSpec

_FILE = Path(__file__).with_name("fitted.toml")


def rates_for(cluster: ClusterSpec, engine: str) -> Coefficients:  # noqa: ARG001  what is shipped holds for all of them
    """The coefficients for an engine on a cluster."""
    return shipped_rates()


def shipped_rates() -> Coefficients:
    """The shipped coefficients."""
    return Coefficients(**_fitted()["coefficients"])


def fitted_sources() -> frozenset[str]:
    """Names of the sources of measurements that they were fitted to."""
    return frozenset(_fitted()["sources"]["names"])


@cache
def _fitted() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
