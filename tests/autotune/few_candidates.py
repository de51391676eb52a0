"""Candidates from a list, as a table of measurements is: most of what the domains combine to does not exist."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from search_spaces.capability import SpaceContext
from search_spaces.errors import Refusal
from search_spaces.knob import Value
from search_spaces.trial_config import KNOB_NAMES, TrialConfig, stable_hash


@dataclass(frozen=True)
class FewCandidates:
    """The configurations of a list, in its order."""

    configs: Sequence[TrialConfig]
    base: TrialConfig = field(default_factory=TrialConfig)
    context: SpaceContext | None = None
    """None: the table does not tell model and cluster."""

    @cached_property
    def hash(self) -> str:
        return stable_hash([config.hash for config in self.configs])

    @cached_property
    def domains(self) -> Mapping[str, tuple[Value, ...]]:
        found = {name: tuple(sorted({getattr(config, name) for config in self.configs}, key=_order)) for name in KNOB_NAMES}
        return {name: values for name, values in found.items() if len(values) > 1}

    def count(self) -> int:
        return len(self.configs)

    def enumerate(self) -> Iterator[TrialConfig]:
        return iter(self.configs)

    def sample(self, rng: random.Random) -> TrialConfig:
        return rng.choice(self.configs)

    def neighbours(self, config: TrialConfig) -> list[TrialConfig]:
        return [other for other in self.configs if len(config.differences(other)) == 1]

    def check(self, config: TrialConfig) -> list[Refusal]:
        return (
            []
            if config in self.configs
            else [Refusal(rule="table", message="it was not measured", remedy="ask for another one")]
        )

    def admitted(self, config: TrialConfig) -> TrialConfig:
        nearest = {name: _nearest(getattr(config, name), values) for name, values in self.domains.items()}
        return self.configs[0].replace(nearest)


def _order(value: Value) -> tuple[float, str]:
    return (0.0, value) if isinstance(value, str) else (float(value), "")


def _nearest(value: Value, values: tuple[Value, ...]) -> Value:
    if value in values or isinstance(value, str | bool):
        return value if value in values else values[0]
    return min(values, key=lambda choice: abs(float(choice) - float(value)))
