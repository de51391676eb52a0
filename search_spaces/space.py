"""The search space: domains and their expressions, all legal configurations for a model on a cluster, counted and sampled."""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from search_spaces.canonical import SEARCH_ORDER, canonical
from search_spaces.capability import Capability, SpaceContext
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.environment import ENVIRONMENT
from search_spaces.errors import KnobValueError, Refusal
from search_spaces.knob import PARALLEL_SIZES, Value
from search_spaces.knob_values import KNOBS, check_value, knob, parse_value
from search_spaces.lattice import Lattice, Prefix
from search_spaces.models.model import Model
from search_spaces.plain import to_plain
from search_spaces.rules.table import check_config
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig, stable_hash

Domain = tuple[Value, ...]

SOLVED = "solved"
"""For `pipeline_layout`: even stages, and the layouts that an integer program proposes."""


def resolve_domains(written: Mapping[str, Any], context: SpaceContext) -> dict[str, Domain]:
    """Resolve the domain of each knob, written as a list of values, one value or an expression.

    Raises:
        UnknownNameError: a knob does not exist.
        KnobValueError: a value is not in its knob's domain, or there is none.
    """
    degrees = {name: _resolve(name, written[name], context, {}) for name in PARALLEL_SIZES if name in written}
    other_domains = {name: _resolve(name, value, context, degrees) for name, value in written.items() if name not in degrees}
    resolved = degrees | other_domains
    return {name: resolved[name] for name in KNOBS if name in resolved}


def parse_domain(name: str, text: str) -> Any:
    """Parse the text of a pin: an expression's name, one value, or several separated by commas.

    Raises:
        UnknownNameError: the knob does not exist.
        KnobValueError: a value is not in its domain.
    """
    if text.strip() in EXPRESSIONS:
        return text.strip()
    if name == ENVIRONMENT:  # commas belong to its values
        return (parse_value(name, text),)
    return tuple(parse_value(name, part) for part in text.split(","))


def check_domain(name: str, values: Sequence[object]) -> Domain:
    """The distinct values, converted to the knob's type.

    Raises:
        UnknownNameError: the knob does not exist.
        KnobValueError: a value is not in its domain, or there is none.
    """
    checked = tuple(dict.fromkeys(check_value(name, value) for value in values))
    if not checked:
        raise KnobValueError(name, "no value is given", "give at least one value, or leave the knob out")
    if name == ENVIRONMENT and len(checked) > 1:
        remedy = "give one, and the others as environment_settings (--environment-setting), measured only on the best layout"
        raise KnobValueError(name, f"{len(checked)} values would start processes anew for every trial", remedy)
    return checked


def _resolve(name: str, written: Any, context: SpaceContext, degrees: Mapping[str, Domain]) -> Domain:
    knob(name)
    if isinstance(written, str) and written in EXPRESSIONS:
        return check_domain(name, EXPRESSIONS[written](name, context, degrees))
    return check_domain(name, written if isinstance(written, list | tuple) else (written,))


def _powers_of_two(name: str, context: SpaceContext, degrees: Mapping[str, Domain]) -> list[Value]:
    """1, 2, 4, … up to the largest value that could be legal; preceded by 0 if 0 has a special meaning."""
    largest = _largest(name, context, degrees)
    powers: list[Value] = [2**exponent for exponent in range(max(largest, 1).bit_length())]
    return [0, *powers] if KNOBS[name].zero else powers


def _divisors(name: str, context: SpaceContext, degrees: Mapping[str, Domain]) -> list[Value]:
    """Every divisor of the largest value that could be legal."""
    largest = max(_largest(name, context, degrees), 1)
    small = [number for number in range(1, math.isqrt(largest) + 1) if largest % number == 0]
    return sorted({*small, *(largest // number for number in small)})


def _element_sizes(name: str, context: SpaceContext, _: Mapping[str, Domain]) -> list[Value]:
    """Fractions of the parameter count, to two digits, so that they differ in behaviour for models of any size."""
    # Elements: 4 GB in fp32; more does not make a collective faster.
    largest_bucket = 1_000_000_000
    count = context.model.parameter_count or largest_bucket  # 0: unknown, as for some user scripts
    shares = set()
    for size in (count // 512, count // 64, count // 8):
        step = int(10 ** max(len(str(size)) - 2, 0))
        shares.add(min(size // step * step, largest_bucket))
    zero = {0} if KNOBS[name].zero else set()
    return sorted(size for size in {*shares, *zero, min(count, largest_bucket)} if size >= KNOBS[name].minimum)


def _all(name: str, _: SpaceContext, __: Mapping[str, Domain]) -> list[Value]:
    if not KNOBS[name].choices:
        raise KnobValueError(name, "its values cannot all be listed", "list them, or write powers_of_two")
    return list(KNOBS[name].choices)


def _solved(name: str, _: SpaceContext, __: Mapping[str, Domain]) -> list[Value]:
    """Only the even layout; proposed layouts are added once the whole space is known (`resolve_space`)."""
    if name != "pipeline_layout":
        raise KnobValueError(name, "is not solved for", "list its values, or write powers_of_two")
    return [""]


EXPRESSIONS: dict[str, Callable[[str, SpaceContext, Mapping[str, Domain]], list[Value]]] = {
    "powers_of_two": _powers_of_two,
    "divisors": _divisors,
    "element_sizes": _element_sizes,
    "all": _all,
    SOLVED: _solved,
}
"""Expressions that may replace a list of values."""


def _largest(name: str, context: SpaceContext, degrees: Mapping[str, Domain]) -> int:
    """The largest value of a degree, a count or a batch that could be legal."""
    counts_to = KNOBS[name].counts_to
    if counts_to is None:
        raise KnobValueError(name, "has no largest value to count up to", "list its values")
    largest_replica = math.prod(max(int(value) for value in domain) for domain in degrees.values())
    return counts_to(context, max(context.world_size // largest_replica, 1))


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
        for name, value in self.base.values().items():
            check_value(name, value)
        checked = {name: check_domain(name, values) for name, values in self.domains.items()}
        object.__setattr__(self, "domains", {name: checked[name] for name in KNOBS if name in checked})

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
        for name, values in self.domains.items():
            for value in values:
                moved = self.admitted(config.replace({name: value}))
                if moved != config and not check_config(moved, self.context):
                    configs[moved] = None
        return list(configs)

    def admitted(self, config: TrialConfig) -> TrialConfig:
        """The canonical configuration of this space's domains that is nearest to `config`, legal or not."""
        prefix: Prefix = ()
        target = self.canonical(config)
        for name in SEARCH_ORDER:
            choices = self.lattice.choices(prefix)
            prefix = (*prefix, _nearest(getattr(target, name), choices))
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
