"""Searched knobs as the axes of an optimizer: numbers by their index in the domain, names as categories."""

from collections.abc import Iterable, Mapping, Sequence

from autotune.strategies.strategy import Candidates
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig, stable_hash

LARGEST_LISTED = 3_000
"""Largest number of configurations that is listed in full: finding the nearest one takes a few milliseconds."""


class Axes:
    """The knobs with more than one value; converts between positions on the axes and configurations.

    Sizes span orders of magnitude, so a number is represented by its index in the domain.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates
        self._domains = {name: tuple(values) for name, values in candidates.domains.items() if len(values) > 1}
        self.sizes: Mapping[str, int] = {name: len(values) for name, values in self._domains.items()}
        self.ordered = frozenset(name for name, values in self._domains.items() if _is_ordered(values))
        """The axes whose neighbouring positions have similar values."""

    def config(self, places: Mapping[str, int]) -> TrialConfig:
        """The nearest canonical configuration of the domains, legal or not."""
        values = {name: self._domains[name][place] for name, place in places.items()}
        return self._candidates.admitted(self._candidates.base.replace(values))

    def places(self, config: TrialConfig) -> dict[str, int]:
        """Return the position of the configuration on each axis."""
        return {name: _place(values, getattr(config, name)) for name, values in self._domains.items()}

    def nearest(self, places: Mapping[str, int], configs: Iterable[TrialConfig], seed: int) -> TrialConfig | None:
        """The configuration nearest to a position; the seed breaks ties."""
        return min(configs, key=lambda config: (self._distance(places, config), stable_hash([seed, config.hash])), default=None)

    def _distance(self, places: Mapping[str, int], config: TrialConfig) -> float:
        """Sum of squares: on an ordered axis the difference as a share of its length; 1 between different categories."""
        theirs = self.places(config)
        return sum(
            ((place - theirs[name]) / (self.sizes[name] - 1)) ** 2 if name in self.ordered else float(place != theirs[name])
            for name, place in places.items()
        )


class Listing:
    """The configurations of a small space, listed once."""

    def __init__(self) -> None:
        self._listed: dict[str, tuple[TrialConfig, ...] | None] = {}

    def of(self, candidates: Candidates) -> tuple[TrialConfig, ...] | None:
        """All configurations; None: there are more than `LARGEST_LISTED`."""
        if candidates.hash not in self._listed:
            few = candidates.count() <= LARGEST_LISTED
            self._listed[candidates.hash] = tuple(candidates.enumerate()) if few else None
        return self._listed[candidates.hash]


def _is_ordered(values: Sequence[Value]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _place(values: Sequence[Value], value: Value) -> int:
    """Index of the value, or of the nearest one: a canonical configuration has clipped sizes and defaults for unused knobs."""
    if value in values:
        return values.index(value)
    if not _is_ordered(values) or isinstance(value, str):
        return 0
    return min(range(len(values)), key=lambda place: abs(float(values[place]) - float(value)))
