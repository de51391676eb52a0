"""What makes a configuration legal: the context of a check, rules, and what engines honour. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import Refusal
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import Model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

ENGINE_HONOURS = "engine-honours"
"""Name of the rule that refuses a single value that the engine does not honour."""
HONOURS_REMEDY = "leave the knob at a value that the engine honours, or choose another engine"

_DEFAULTS = TrialConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Values that an engine honours individually but refuses in combination, under a separate rule."""

    rule: str
    """Unique name of the rule."""
    reads: tuple[str, ...]
    """The knobs that `holds` reads."""
    problem: str
    """What goes wrong, in one clause without the remedy."""
    remedy: str
    holds: Callable[[TrialConfig, int], bool]
    """Whether the configuration has these values on this many ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """The values of each knob that an engine honours, and the combinations that it refuses.

    A knob that is not listed is honoured only at its default.
    """

    engine: str
    knobs: Mapping[str, tuple[Value, ...] | None]
    """Knob -> the honoured values, the starting value first; None: its whole domain."""
    combinations: tuple[Combination, ...] = ()
    """Each is refused before any process starts."""
    specific: frozenset[str] = frozenset()
    """Knobs whose best value on the native engine lost over 3 % on this engine (docs/results/transfer.md): tuned only on this
    engine."""
    keeps_copy_beside_gradients: bool = False
    """Whether a rank of stages 0-2 holds whole parameters and all gradients at the same time. False: not at all times, so only
    the larger of the two counts in the lower bound of a rank's states."""
    divides_states_over_all_ranks: bool = False
    """Whether `hsdp_shard_size` applies only to parameters: gradients and optimizer state are sharded over all ranks."""

    def honours(self, name: str, value: Value) -> bool:
        """Whether the engine honours this value of the knob."""
        honoured = self.honoured(name)
        return honoured is None or value in honoured

    def honoured(self, name: str) -> tuple[Value, ...] | None:
        """The values of the knob that the engine honours; None: its whole domain."""
        return self.knobs.get(name, (getattr(_DEFAULTS, name),))

    def refusal(self, config: TrialConfig) -> str | None:
        """The first value of `config` that the engine does not honour, as a message; None: it honours all."""
        for name, value in config.values().items():
            honoured = self.honoured(name)
            if honoured is not None and value not in honoured:
                return f"the {self.engine} engine does not honour {name}={value} (it honours {_listed(honoured)})"
        return None

    def refusals(self, config: TrialConfig, world_size: int) -> list[Refusal]:
        """All refusals of `config` by the engine on `world_size` ranks. An engine checks this before it builds."""
        problem = self.refusal(config)
        single = [Refusal(ENGINE_HONOURS, problem, HONOURS_REMEDY)] if problem is not None else []
        combined = [item for item in self.combinations if item.holds(config, world_size)]
        return [*single, *(Refusal(item.rule, item.problem, item.remedy) for item in combined)]

    def starting_values(self) -> dict[str, Value]:
        """Knob -> starting value, for knobs whose default the engine does not honour."""
        replaced_domains = {
            name: values for name, values in self.knobs.items() if values and getattr(_DEFAULTS, name) not in values
        }
        return {name: values[0] for name, values in replaced_domains.items()}

    def plain(self) -> dict[str, Any]:
        """Plain data that identifies this capability. A combination is represented by its name, because `holds` is code."""
        return {
            "engine": self.engine,
            "knobs": {name: None if values is None else list(values) for name, values in sorted(self.knobs.items())},
            "combinations": [item.rule for item in self.combinations],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceContext:
    """The model, cluster, workload and engine: the same for every configuration of a space."""

    model: Model
    cluster: ClusterSpec
    workload: Workload
    world_size: int
    """Training ranks; at most the number of devices of the cluster."""
    capability: Capability | None = None
    """None: any engine, so only the rules refuse configurations."""


Check = Callable[[TrialConfig, SpaceContext], str | None]
"""Returns the problem of the configuration in one clause without the remedy; None: no problem."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A legal configuration passes every rule; `check` reads only the knobs in `reads`."""

    name: str
    reads: tuple[str, ...]
    remedy: str
    check: Check


def honoured_by(engine: str, limited: Mapping[str, tuple[Value, ...]] | None = None) -> dict[str, tuple[Value, ...] | None]:
    """`Capability.knobs` of an engine: the knobs whose declaration names it, and the knobs for which it honours some values."""
    whole: dict[str, tuple[Value, ...] | None] = {knob.name: None for knob in KNOBS.values() if engine in knob.engines}
    return whole | dict(limited or {})


def _listed(values: tuple[Value, ...]) -> str:
    return ", ".join(str(value) for value in values)
