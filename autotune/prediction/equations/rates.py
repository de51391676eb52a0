"""The shipped coefficients: fitted to published measurements by `benchmarks/prediction/fit_coefficients.py`."""

import dataclasses
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from autotune.prediction.equations.coefficients import Coefficients
from search_spaces.clusters.cluster import ClusterSpec

_FILE = Path(__file__).with_name("fitted.toml")


ON_A_PROCESSOR = {
    "context_bytes": 1.0, "workspace_bytes": 1e5, "fragmentation": 1.0, "kernel_seconds": 2e-4, "collective_launch": 4e-4,
}  # fmt: skip
"""On a CPU the memory limit applies to the allocator, which reserves nothing extra; libraries allocate elsewhere. Operators are
called, not launched; collectives of gloo wait for a thread."""


def rates_for(cluster: ClusterSpec, engine: str) -> Coefficients:  # noqa: ARG001  shipped values hold for all engines
    """The coefficients for an engine on a cluster. A CPU has no device context and reserves nothing beyond the memory used."""
    if cluster.device.kind == "cpu":
        return dataclasses.replace(shipped_rates(), **ON_A_PROCESSOR)
    return shipped_rates()


def shipped_rates() -> Coefficients:
    """The shipped coefficients."""
    return Coefficients(**_fitted()["coefficients"])


def fitted_sources() -> frozenset[str]:
    """Names of the sources of the measurements used for the fit."""
    return frozenset(_fitted()["sources"]["names"])


@cache
def _fitted() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
