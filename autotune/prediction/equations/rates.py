"""The coefficients that are shipped: fitted once to measurements of others by `benchmarks/fit_coefficients.py`."""

import dataclasses
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from autotune.prediction.equations.coefficients import Coefficients
from search_spaces.cluster import ClusterSpec

_FILE = Path(__file__).with_name("fitted.toml")


ON_A_PROCESSOR = {"context_bytes": 1.0, "workspace_bytes": 1e5, "fragmentation": 1.0}
"""On a CPU the limit is held against the allocator, which gives what is asked; libraries have their workspaces elsewhere."""


def rates_for(cluster: ClusterSpec, engine: str) -> Coefficients:  # noqa: ARG001  what is shipped holds for all engines
    """The coefficients for an engine on a cluster. A processor has no context and reserves nothing: what is used is counted."""
    if cluster.device.kind == "cpu":
        return dataclasses.replace(shipped_rates(), **ON_A_PROCESSOR)
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
