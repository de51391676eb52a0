"""The content of a search space, and the check of a configuration in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.refusal import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The content of a search space."""

    space: str
    """Name of the space."""
    hash: str
    """Hash of its content."""
    domains: Mapping[str, tuple[Any, ...]]
    """Knob -> values."""
    raw: int
    """Number of points of the Cartesian product."""
    legal: int
    """Number of distinct legal configurations."""
    merged: int
    """Number of points that are equivalent to a legal configuration."""
    refused: Mapping[str, int]
    """Rule -> number of points that it refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Whether a configuration is legal."""

    legal: bool
    config: Mapping[str, Any]
    """Knob -> value, in canonical form."""
    refusals: tuple[Refusal, ...]
    """The rules that refuse it. Empty: it is legal."""
