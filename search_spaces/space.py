"""The space: every legal configuration for a model on a cluster, counted, drawn, walked and looked around in."""

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from search_spaces.canonical import SEARCH_ORDER, canonical
from search_spaces.capability import Capability
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.context import SpaceContext
from search_spaces.domains import check_domain
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, check_value
from search_spaces.lattice import Lattice, Prefix
from search_spaces.models.model import Model
from search_spaces.plain import to_plain
from search_spaces.refusal import Refusal
from search_spaces.rules.table import check_config
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig, stable_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Where the configurations of a space went: raw = legal + sum(refused) + merged, exactly."""

    raw: int
    """Size of the Cartesian product of the domains."""
    legal: int
    """Different configurations that no rule refuses."""
    refused: dict[str, int]
    """Rule -> different configurations, each counted under the first rule that refuses while it is built, most first."""
    merged: int
    """Configurations that behave as another one that is counted: a knob that does not matter there, a size beyond the model."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The configurations that a sweep may try.

    Every answer is in canonical configurations (see `canonical`), and the same in every process.

    Raises:
        UnknownNameError: a domain names no knob.
        KnobValueError: a domain or the base has a value outside its knob's domain.
    """

    model: Model
    cluster: ClusterSpec
    workload: Workload
    world_size: int
    """Ranks that train."""
    domains: Mapping[str, tuple[Value, ...]]
    """Knob -> the values that are searched; knobs that are not here stand at the base's value."""
    base: TrialConfig = field(default_factory=TrialConfig)
    capability: Capability | None = None
    """What the engine honours; None: any engine."""
    name: str = "space"
    most_steps: int | None = field(default=None, compare=False)
    """Steps that counting may take before it raises SpaceTooLargeError: some 40,000 a second; None: no bound."""

    def __post_init__(self) -> None:
        for knob, value in self.base.values().items():
            check_value(knob, value)
        checked = {knob: check_domain(knob, values) for knob, values in self.domains.items()}
        object.__setattr__(self, "domains", {knob: checked[knob] for knob in KNOBS if knob in checked})

    @cached_property
    def context(self) -> SpaceContext:
        """What the rules and conditions look at beside the configuration."""
        return SpaceContext(
            model=self.model,
            cluster=self.cluster,
            workload=self.workload,
            world_size=self.world_size,
            capability=self.capability,
        )

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits, the same in every process for the same space, whatever its name."""
        place = to_plain(dataclasses.replace(self.context, capability=None))
        for name, unsaid in (("groups", ()), ("kernel_packages", None)):  # came later: what was hashed keeps its hash
            if getattr(self.cluster, name) == unsaid:
                del place["cluster"][name]
        for name in ("capacity_factor", "load_balance", "adapter_size", "prefix_length", "prompt_length"):  # as that
            if not place["model"].get(name):
                place["model"].pop(name, None)
        engine = self.capability.plain() if self.capability else None
        return stable_hash([place, engine, to_plain(self.domains), to_plain(self.base)])

    def canonical(self, config: TrialConfig) -> TrialConfig:
        """The one configuration that stands for all that behave as `config` does."""
        return canonical(config, self.context)

    def check(self, config: TrialConfig) -> list[Refusal]:
        """Every rule that refuses `config`, in the order of `rules_of`; empty: it is legal.

        Knobs that do not matter are not judged. Whether its values are in the domains is not asked: see `in`.
        """
        return check_config(self.canonical(config), self.context)

    def is_empty(self) -> bool:
        """Whether there is no legal configuration; far quicker than to count them."""
        return not self.lattice.has_legal()

    def count(self) -> int:
        """How many legal configurations there are, exactly, without listing them."""
        return self.lattice.tally().legal

    def census(self) -> Census:
        """How the raw Cartesian product divides into legal, refused and merged configurations."""
        tally = self.lattice.tally()
        raw = math.prod(len(values) for values in self.domains.values())
        refused = dict(sorted(tally.refused.items(), key=lambda item: (-item[1], item[0])))
        return Census(raw=raw, legal=tally.legal, refused=refused, merged=raw - tally.legal - sum(refused.values()))

    def enumerate(self) -> Iterator[TrialConfig]:
        """Every legal configuration once, lazily, in a fixed order."""
        return self.lattice.walk()

    def sample(self, rng: random.Random) -> TrialConfig:
        """A legal configuration, each with the same probability.

        Raises:
            LookupError: the space has no legal configuration (`census` tells why).
        """
        drawn = self.lattice.draw(rng)
        if drawn is None:
            raise LookupError("the space has no legal configuration")
        return drawn

    def neighbours(self, config: TrialConfig) -> list[TrialConfig]:
        """The legal configurations that are one move away: one knob at another value of its domain.

        A knob that the move brings to matter takes the value of its domain that is nearest to what it had.
        """
        found: dict[TrialConfig, None] = {}
        for knob, values in self.domains.items():
            for value in values:
                moved = self.admitted(config.replace({knob: value}))
                if moved != config and not check_config(moved, self.context):
                    found[moved] = None
        return list(found)

    def admitted(self, config: TrialConfig) -> TrialConfig:
        """The canonical configuration of this space's domains that is nearest to `config`, legal or not."""
        prefix: Prefix = ()
        wanted = self.canonical(config)
        for knob in SEARCH_ORDER:
            choices = self.lattice.choices(prefix)
            prefix = (*prefix, _nearest(getattr(wanted, knob), choices))
        return config.replace(dict(zip(SEARCH_ORDER, prefix, strict=True)))

    def __contains__(self, config: object) -> bool:
        """Whether `config` is canonical, legal, and made of values of the domains."""
        return isinstance(config, TrialConfig) and self.admitted(config) == config and not self.check(config)

    def refused_example(self, rule: str) -> TrialConfig | None:
        """A configuration that `census` counts under `rule`; None: there is none."""
        return self.lattice.refused_example(rule)

    @cached_property
    def lattice(self) -> Lattice:
        """What answers; for who lists configurations in another way than `enumerate`."""
        return Lattice(self.context, self.base, self.domains, self.most_steps)


def _nearest(value: Value, choices: tuple[Value, ...]) -> Value:
    if value in choices or isinstance(value, bool | str):
        return value if value in choices else choices[0]
    return min(choices, key=lambda choice: abs(float(choice) - float(value)))
