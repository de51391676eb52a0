"""Count, sample and iterate legal configurations without listing them.

A configuration is built knob by knob in SEARCH_ORDER. A rule is checked as soon as the last knob that it reads has a value.
The continuations of a prefix depend only on the values that later rules and conditions still read (the frontier), so one
number is cached per depth and frontier. This is variable elimination [Dechter 1999, Bucket elimination], exact for any rules.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from search_spaces.canonical import SEARCH_ORDER, canonical_reads, canonical_value
from search_spaces.capability import Rule, SpaceContext
from search_spaces.errors import SpaceTooLargeError
from search_spaces.knob import Value
from search_spaces.rules.table import HONOURS, rules_of
from search_spaces.trial_config import TrialConfig

_CALLBACK: ContextVar[Callable[[], None] | None] = ContextVar("checkpoint", default=None)


def checkpoint() -> None:
    """Call the caller's callback, which may raise; return at once if none is set."""
    callback = _CALLBACK.get()
    if callback is not None:
        callback()


@contextmanager
def checkpoints(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` at each checkpoint of this thread's computations: it returns to continue them, or raises to end them."""
    token = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(token)


Prefix = tuple[Value, ...]
"""Canonical values of the first knobs of SEARCH_ORDER."""

POSITION = {name: depth for depth, name in enumerate(SEARCH_ORDER)}
DEPTHS = len(SEARCH_ORDER)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of the canonical configurations that start with a prefix."""

    legal: int
    refused: Mapping[str, int]
    """Rule -> configurations, each counted under the first rule that refuses it."""


class Lattice:
    """The canonical configurations of a Cartesian product of domains. Caches its counts.

    Raises:
        SpaceTooLargeError: all calls together take more than `most_steps` steps.
    """

    def __init__(
        self, context: SpaceContext, base: TrialConfig, domains: Mapping[str, tuple[Value, ...]], most_steps: int | None = None
    ) -> None:
        self._context = context
        self._steps, self._most_steps = 0, most_steps
        self._base = base
        self._domains = tuple(domains.get(name, (getattr(base, name),)) for name in SEARCH_ORDER)
        # `HONOURS` reads every knob, so it is checked knob by knob instead.
        rules = [rule for rule in rules_of(context.capability) if rule is not HONOURS]
        self._rules = _by_last_read(rules)
        self._rule_reads = tuple(_depths(name for rule in rules for name in rule.reads) for rules in self._rules)
        self._choice_reads = tuple(_depths(canonical_reads(name)) for name in SEARCH_ORDER)
        self._legal_frontier = _frontiers(self._choice_reads, self._rule_reads)
        self._any_frontier = _frontiers(self._choice_reads, tuple(() for _ in SEARCH_ORDER))
        self._choices: dict[tuple[int, Prefix], tuple[Value, ...]] = {}
        self._verdicts: dict[tuple[int, Prefix], str | None] = {}
        self._tallies: dict[tuple[int, Prefix], Tally] = {}
        self._totals: dict[tuple[int, Prefix], int] = {}
        self._has_legal: dict[tuple[int, Prefix], bool] = {}

    def choices(self, prefix: Prefix) -> tuple[Value, ...]:
        """The canonical values of the knob after `prefix`, legal or not."""
        depth = len(prefix)
        key = (depth, _pick(prefix, self._choice_reads[depth]))
        if key not in self._choices:
            config = self._config(prefix, self._choice_reads[depth])
            name, domain = SEARCH_ORDER[depth], self._domains[depth]
            values = (canonical_value(name, value, config, self._context) for value in domain)
            self._choices[key] = tuple(dict.fromkeys(values))  # distinct, in the order of the domain
        return self._choices[key]

    def reads(self, depth: int) -> tuple[int, ...]:
        """Positions in SEARCH_ORDER of the knobs before `depth` on which the legal choices at `depth` depend."""
        read = {*self._choice_reads[depth], *self._rule_reads[depth]}
        return tuple(sorted(position for position in read if position < depth))

    def legal_choices(self, prefix: Prefix) -> tuple[Value, ...]:
        """The canonical values of the knob after `prefix` that no rule refuses yet; they may have no legal continuation."""
        return tuple(value for value in self.choices(prefix) if self._verdict((*prefix, value)) is None)

    def tally(self, prefix: Prefix = ()) -> Tally:
        """Count the canonical configurations that start with `prefix`: legal ones, and refused ones by rule."""
        depth = len(prefix)
        if depth == DEPTHS:
            return Tally(1, {})
        key = (depth, _pick(prefix, self._legal_frontier[depth]))
        if key not in self._tallies:
            self._tallies[key] = self._sum(prefix)
        return self._tallies[key]

    def has_legal(self, prefix: Prefix = ()) -> bool:
        """Whether a legal configuration starts with `prefix`. Usually takes a few steps, whereas counting takes thousands."""
        depth = len(prefix)
        if depth == DEPTHS:
            return True
        key = (depth, _pick(prefix, self._legal_frontier[depth]))
        if key not in self._has_legal:
            longer = ((*prefix, value) for value in self.choices(prefix))
            self._has_legal[key] = any(self._verdict(step) is None and self.has_legal(step) for step in longer)
        return self._has_legal[key]

    def total(self, prefix: Prefix = ()) -> int:
        """Count the canonical configurations that start with `prefix`, legal or not."""
        depth = len(prefix)
        if depth == DEPTHS:
            return 1
        key = (depth, _pick(prefix, self._any_frontier[depth]))
        if key not in self._totals:
            self._step()
            self._totals[key] = sum(self.total((*prefix, value)) for value in self.choices(prefix))
        return self._totals[key]

    def walk(self, prefix: Prefix = ()) -> Iterator[TrialConfig]:
        """Yield every legal canonical configuration once, in the order of SEARCH_ORDER and the domains."""
        if len(prefix) == DEPTHS:
            yield self._config(prefix, range(DEPTHS))
            return
        for longer, _ in self._legal_steps(prefix):
            yield from self.walk(longer)

    def draw(self, rng: random.Random) -> TrialConfig | None:
        """Sample a legal configuration uniformly; None: there is none."""
        if not self.tally().legal:
            return None
        prefix: Prefix = ()
        while len(prefix) < DEPTHS:
            prefix = _draw(self._legal_steps(prefix), rng)
        return self._config(prefix, range(DEPTHS))

    def refused_example(self, rule: str) -> TrialConfig | None:
        """A configuration counted under `rule`, completed with the first choices."""
        prefix: Prefix = ()
        while len(prefix) < DEPTHS:
            for value in self.choices(prefix):
                longer = (*prefix, value)
                verdict = self._verdict(longer)
                if verdict == rule:
                    while len(longer) < DEPTHS:
                        longer = (*longer, self.choices(longer)[0])
                    return self._config(longer, range(DEPTHS))
                if verdict is None and self.tally(longer).refused.get(rule):
                    prefix = longer
                    break
            else:
                return None
        return None

    def _sum(self, prefix: Prefix) -> Tally:
        legal, refused = 0, Counter[str]()
        for value in self.choices(prefix):
            longer = (*prefix, value)
            rule = self._verdict(longer)
            if rule is not None:
                refused[rule] += self.total(longer)
                continue
            below = self.tally(longer)
            legal += below.legal
            refused.update(below.refused)
        return Tally(legal, refused)

    def _legal_steps(self, prefix: Prefix) -> list[tuple[Prefix, int]]:
        """The prefixes one knob longer that have legal configurations, with their counts."""
        longer = ((*prefix, value) for value in self.choices(prefix))
        counted = ((step, self.tally(step).legal) for step in longer if self._verdict(step) is None)
        return [(step, legal) for step, legal in counted if legal]

    def _verdict(self, prefix: Prefix) -> str | None:
        """The first rule that refuses at the last knob of `prefix`."""
        self._step()
        depth = len(prefix) - 1
        capability = self._context.capability
        if capability is not None and not capability.honours(SEARCH_ORDER[depth], prefix[-1]):
            return HONOURS.name
        if not self._rules[depth]:
            return None
        key = (depth, _pick(prefix, self._rule_reads[depth]))
        if key not in self._verdicts:
            config = self._config(prefix, self._rule_reads[depth])
            refusing = (rule.name for rule in self._rules[depth] if rule.check(config, self._context) is not None)
            self._verdicts[key] = next(refusing, None)
        return self._verdicts[key]

    def _step(self) -> None:
        self._steps += 1
        if self._steps % 64 == 0:  # about two milliseconds
            checkpoint()
        if self._most_steps is not None and self._steps > self._most_steps:
            problem = f"it takes more than {self._most_steps:,} steps to count"
            raise SpaceTooLargeError("space", problem, "pin some knobs, or give their domains fewer values")

    def _config(self, prefix: Prefix, depths: tuple[int, ...] | range) -> TrialConfig:
        return self._base.replace({SEARCH_ORDER[depth]: prefix[depth] for depth in depths})


def _draw(steps: list[tuple[Prefix, int]], rng: random.Random) -> Prefix:
    """Sample a step with probability proportional to its count. Counts are exact integers of any size."""
    at = rng.randrange(sum(count for _, count in steps))
    for step, count in steps:
        if at < count:
            return step
        at -= count
    raise AssertionError("the counts of the steps do not add up")


def _by_last_read(rules: Iterable[Rule]) -> tuple[tuple[Rule, ...], ...]:
    """For each depth, the rules whose last knob has its value from there on."""
    by_depth: list[list[Rule]] = [[] for _ in range(DEPTHS)]
    for rule in rules:
        by_depth[max(POSITION[name] for name in rule.reads)].append(rule)
    return tuple(map(tuple, by_depth))


def _depths(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted({POSITION[name] for name in names}))


def _pick(prefix: Prefix, depths: tuple[int, ...]) -> Prefix:
    return tuple([prefix[depth] for depth in depths])


def _frontiers(
    choice_reads: tuple[tuple[int, ...], ...], rule_reads: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """For each depth, the knobs before it that rules and conditions from this depth on still read."""
    frontiers: list[tuple[int, ...]] = []
    later: set[int] = set()
    for depth in reversed(range(DEPTHS)):
        later |= {*choice_reads[depth], *rule_reads[depth]}
        frontiers.append(tuple(sorted(read for read in later if read < depth)))
    return tuple(reversed(frontiers))
