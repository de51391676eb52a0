"""The search space: all legal configurations for a model on a cluster, with counting, sampling, iteration and neighbours."""

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
    """The breakdown of a space: raw = legal + sum(refused) + merged, exactly."""

    raw: int
    """Size of the Cartesian product of the domains."""
    legal: int
    """Distinct configurations that no rule refuses."""
    refused: dict[str, int]
    """Rule -> distinct configurations, each counted under the first rule that refuses it, largest count first."""
    merged: int
    """Configurations equivalent to a counted one: a knob has no effect, or a size exceeds the model."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The configurations that a sweep may try.

    All results are canonical configurations (see `canonical`), and the same in every process.

    Raises:
        UnknownNameError: a domain is for an unknown knob.
        KnobValueError: a domain or the base has a value outside its knob's domain.
    """

    model: Model
    cluster: ClusterSpec
    workload: Workload
    world_size: int
    """Training ranks."""
    domains: Mapping[str, tuple[Value, ...]]
    """Knob -> the values that are searched; other knobs have the base's value."""
    base: TrialConfig = field(default_factory=TrialConfig)
    capability: Capability | None = None
    """Values that the engine honours; None: any engine."""
    name: str = "space"
    most_steps: int | None = field(default=None, compare=False)
    """Maximum steps of counting, else SpaceTooLargeError is raised: about 40,000 a second; None: no limit."""

    def __post_init__(self) -> None:
        for knob, value in self.base.values().items():
            check_value(knob, value)
        checked = {knob: check_domain(knob, values) for knob, values in self.domains.items()}
        object.__setattr__(self, "domains", {knob: checked[knob] for knob in KNOBS if knob in checked})

    @cached_property
    def context(self) -> SpaceContext:
        """What rules and conditions read in addition to the configuration."""
        return SpaceContext(
            model=self.model,
            cluster=self.cluster,
            workload=self.workload,
            world_size=self.world_size,
            capability=self.capability,
        )

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits, the same in every process for the same space, independent of its name."""
        plain = to_plain(dataclasses.replace(self.context, capability=None))
        later = (("groups", ()), ("kernel_packages", None), ("link_domain_size", None))
        for name, default in later:  # existing hashes must not change
            if getattr(self.cluster, name) == default:
                del plain["cluster"][name]
        for name in ("capacity_factor", "load_balance", "adapter_size", "prefix_length", "prompt_length"):  # likewise
            if not plain["model"].get(name):
                plain["model"].pop(name, None)
        if not plain["model"].get("mtp_layers"):
            for name in ("mtp_layers", "mtp_loss_weight"):
                plain["model"].pop(name, None)
        engine = self.capability.plain() if self.capability else None
        return stable_hash([plain, engine, to_plain(self.domains), to_plain(self.base)])

    def canonical(self, config: TrialConfig) -> TrialConfig:
        """The representative of all configurations that behave as `config` does."""
        return canonical(config, self.context)

    def check(self, config: TrialConfig) -> list[Refusal]:
        """Every rule that refuses `config`, in the order of `rules_of`; empty: it is legal.

        Knobs without effect are not checked. Whether the values are in the domains is not checked either: see `in`.
        """
        return check_config(self.canonical(config), self.context)

    def is_empty(self) -> bool:
        """Whether there is no legal configuration; much faster than counting."""
        return not self.lattice.has_legal()

    def count(self) -> int:
        """The exact number of legal configurations, without listing them."""
        return self.lattice.tally().legal

    def census(self) -> Census:
        """The breakdown of the raw Cartesian product into legal, refused and merged configurations."""
        tally = self.lattice.tally()
        raw = math.prod(len(values) for values in self.domains.values())
        refused = dict(sorted(tally.refused.items(), key=lambda item: (-item[1], item[0])))
        return Census(raw=raw, legal=tally.legal, refused=refused, merged=raw - tally.legal - sum(refused.values()))

    def enumerate(self) -> Iterator[TrialConfig]:
        """Yield every legal configuration once, in a fixed order."""
        return self.lattice.walk()

    def sample(self, rng: random.Random) -> TrialConfig:
        """Sample a legal configuration uniformly.

        Raises:
            LookupError: the space has no legal configuration (`census` shows why).
        """
        drawn = self.lattice.draw(rng)
        if drawn is None:
            raise LookupError("the space has no legal configuration")
        return drawn

    def neighbours(self, config: TrialConfig) -> list[TrialConfig]:
        """The legal configurations that differ in one move: one knob at another value of its domain.

        A knob whose condition becomes true takes the value of its domain that is nearest to its previous value.
        """
        configs: dict[TrialConfig, None] = {}
        for knob, values in self.domains.items():
            for value in values:
                moved = self.admitted(config.replace({knob: value}))
                if moved != config and not check_config(moved, self.context):
                    configs[moved] = None
        return list(configs)

    def admitted(self, config: TrialConfig) -> TrialConfig:
        """The canonical configuration of this space's domains that is nearest to `config`, legal or not."""
        prefix: Prefix = ()
        target = self.canonical(config)
        for knob in SEARCH_ORDER:
            choices = self.lattice.choices(prefix)
            prefix = (*prefix, _nearest(getattr(target, knob), choices))
        return config.replace(dict(zip(SEARCH_ORDER, prefix, strict=True)))

    def __contains__(self, config: object) -> bool:
        """Whether `config` is canonical, legal, and has values of the domains."""
        return isinstance(config, TrialConfig) and self.admitted(config) == config and not self.check(config)

    def refused_example(self, rule: str) -> TrialConfig | None:
        """A configuration that `census` counts under `rule`; None: there is none."""
        return self.lattice.refused_example(rule)

    @cached_property
    def lattice(self) -> Lattice:
        """The underlying lattice, for callers that list configurations in another way than `enumerate`."""
        return Lattice(self.context, self.base, self.domains, self.most_steps)


def _nearest(value: Value, choices: tuple[Value, ...]) -> Value:
    if value in choices or isinstance(value, bool | str):
        return value if value in choices else choices[0]
    return min(choices, key=lambda choice: abs(float(choice) - float(value)))
