"""What an engine honours and what it refuses: declared by each engine in a file that does not import torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.refusal import Refusal
from search_spaces.trial_config import TrialConfig

ENGINE_HONOURS = "engine-honours"
"""The rule that refuses a single value which the engine does not honour."""
HONOURS_REMEDY = "leave the knob at a value that the engine honours, or choose another engine"

_DEFAULTS = TrialConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Values that an engine honours one by one and refuses together, under a rule of its own."""

    rule: str
    """A name that no other rule has."""
    reads: tuple[str, ...]
    """The knobs that `holds` looks at."""
    problem: str
    """What goes wrong, in one clause without the remedy."""
    remedy: str
    holds: Callable[[TrialConfig, int], bool]
    """Whether the configuration, on so many ranks, has these values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The values of each knob that an engine honours, knob by knob, and the combinations of them that it refuses.

    A knob that is not named here is honoured at its default alone.
    """

    engine: str
    knobs: Mapping[str, tuple[Value, ...] | None]
    """Knob -> the values that are honoured, the one to begin with first; None: its whole domain."""
    combinations: tuple[Combination, ...] = ()
    """Each refused before any process starts."""
    specific: frozenset[str] = frozenset()
    """Knobs of which the value that is best on the native engine lost over 3 % here (docs/transfer.md): tuned on this engine
    alone."""
    keeps_copy_beside_gradients: bool = False
    """Whether whole parameters stand on a rank of stages 0-2 at the same time as all its gradients. False: not at every
    moment, so that only the larger of the two counts in the lower bound of a rank's states."""
    divides_states_over_all_ranks: bool = False
    """Whether `hsdp_shard_size` is about parameters alone: gradients and optimizer state have one share on every rank."""

    def honours(self, name: str, value: Value) -> bool:
        """Whether the engine does what this value of the knob says."""
        honoured = self.honoured(name)
        return honoured is None or value in honoured

    def honoured(self, name: str) -> tuple[Value, ...] | None:
        """The values of the knob that the engine honours; None: its whole domain."""
        return self.knobs.get(name, (getattr(_DEFAULTS, name),))

    def refusal(self, config: TrialConfig) -> str | None:
        """Which single value of `config` the engine does not honour, or None where it honours every one."""
        for name, value in config.values().items():
            honoured = self.honoured(name)
            if honoured is not None and value not in honoured:
                return f"the {self.engine} engine does not honour {name}={value} (it honours {_listed(honoured)})"
        return None

    def refusals(self, config: TrialConfig, world_size: int) -> list[Refusal]:
        """All that the engine refuses in `config` on `world_size` ranks, by rule. An engine asks this before it builds."""
        single = self.refusal(config)
        alone = [Refusal(ENGINE_HONOURS, single, HONOURS_REMEDY)] if single is not None else []
        together = [item for item in self.combinations if item.holds(config, world_size)]
        return [*alone, *(Refusal(item.rule, item.problem, item.remedy) for item in together)]

    def starting_values(self) -> dict[str, Value]:
        """Knob -> the value to begin with, for knobs whose default the engine does not honour."""
        named = {name: values for name, values in self.knobs.items() if values and getattr(_DEFAULTS, name) not in values}
        return {name: values[0] for name, values in named.items()}

    def plain(self) -> dict[str, Any]:
        """What tells this capability from others, as plain data. Of a combination its name: what it holds for is code."""
        return {
            "engine": self.engine,
            "knobs": {name: None if values is None else list(values) for name, values in sorted(self.knobs.items())},
            "combinations": [item.rule for item in self.combinations],
        }


def honoured_by(engine: str, limited: Mapping[str, tuple[Value, ...]] | None = None) -> dict[str, tuple[Value, ...] | None]:
    """`Capability.knobs` of an engine: the knobs whose declaration names it, and those of which it honours some values."""
    whole: dict[str, tuple[Value, ...] | None] = {knob.name: None for knob in KNOBS.values() if engine in knob.engines}
    return whole | dict(limited or {})


def _listed(values: tuple[Value, ...]) -> str:
    return ", ".join(str(value) for value in values)
