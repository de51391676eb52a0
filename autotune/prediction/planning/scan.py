"""A space in one pass: the best configurations, and the best result for each value of each knob."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.cases.grid import BLOCK, Index
from autotune.prediction.cases.grid_cases import UNIFORM, CaseProduct, GridCases, Mask, Products, placing_knobs
from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import least_seconds_of, seconds_of
from autotune.prediction.planning.memory_fit import MemoryLimits
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan_results import PredictionBlock, Scanned, ScanResults, SpacePart
from search_spaces.canonical import canonical_value
from search_spaces.errors import SpaceTooLargeError
from search_spaces.knob import Planning, Value
from search_spaces.knob_values import KNOBS
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

BUCKETS = tuple(
    knob.name for knob in sorted(KNOBS.values(), key=lambda knob: knob.tuned) if knob.planning is Planning.TUNED_LAST
)
"""Knobs that are only set for the best: how communication and the loss are cut, which hardly changes the order."""
NOT_SCANNED = frozenset({*BUCKETS, *(knob.name for knob in KNOBS.values() if knob.planning is Planning.NOT_MODELLED)})
"""Besides the buckets, knobs that no equation reads: they stand near the device's defaults."""
TOGETHER = 2 * BLOCK
"""Configurations predicted at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a scan."""

    configurations: int | None = None
    """None: no limit."""
    until: float | None = None
    """Time of `time.monotonic` at which the scan is aborted; None: never."""


def scan(
    question: Question,
    space: SearchSpace,
    limits: MemoryLimits,
    *,
    slowest: float | None,
    bounds: Bounds,
    apart: Sequence[SpacePart] = (),
) -> Scanned:
    """Predict every configuration of the space, buckets at their defaults.

    Args:
        question: the question.
        space: the space to scan.
        limits: the memory limits.
        slowest: None: rank by time. Seconds: rank by memory among all steps that take no longer.
        bounds: limits of the scan.
        apart: disjoint parts of the space of which the best are kept, too.

    Raises:
        SpaceTooLargeError: the bounds are exceeded.
    """
    results = ScanResults(slowest=slowest, compared=frozenset(KNOBS) - NOT_SCANNED, apart=apart)
    for part in uniform_parts(without_buckets(space)):
        products = Products(part, placing_knobs(part))
        cases = GridCases(part, question.model, question.engine, products, question.arguments)
        results.count += products.count
        require_within(bounds, results.count)
        for rows in _fastest_first(question, products, cases):
            require_within(bounds, results.count)
            for least, product in rows.that_may_lead(results, products):
                block = _predicted(question, limits, products, cases, product, least, results)
                if block is not None:
                    results.add(block)
    return results.scanned()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Some rows of the first axis of a product, with all of the others."""

    least: Array
    """For each row, a lower bound of the seconds of its configurations; in ascending order."""
    of_each: Array
    """The same for each configuration of the product; of length 1 along axes that it does not depend on."""
    rows: Index
    product: CaseProduct

    def that_may_lead(self, results: ScanResults, products: Products) -> Iterator[tuple[Array, CaseProduct]]:
        """The configurations of the rows with which a result may change, and the lower bound of their seconds, in parts."""
        product = self.product.take_rows(self.rows)
        rows = np.flatnonzero(self.least <= results.slowest_kept_of_rows(products, product))
        for chosen, part in product.take_rows(rows).parts(TOGETHER):
            chosen[0] = self.rows[rows[chosen[0]]]
            at = (
                axis_rows if size > 1 else np.zeros(1, dtype=int)
                for axis_rows, size in zip(chosen, self.of_each.shape, strict=True)
            )
            yield self.of_each[np.ix_(*at)], part


def _fastest_first(question: Question, products: Products, cases: GridCases[CaseProduct]) -> list[_Rows]:
    """All configurations, by a lower bound of their time: the better those found first, the more of the others are excluded.

    The bound does not depend on some of the axes, so that it is cheap for many configurations at once.
    """
    row_blocks = []
    for product in products.blocks(BLOCK * min(_combined(question, products, cases), 64)):
        least = least_seconds_of(cases.of(product), question.rates)
        of_row = np.broadcast_to(least.reshape(len(least), -1).min(axis=1), product.shape[0])
        order, rows_per_part = (
            np.argsort(of_row, kind="stable"),
            max(TOGETHER * product.shape[0] // int(np.prod(product.shape)), 1),
        )
        for rows in np.split(order, range(rows_per_part, len(order), rows_per_part)):
            row_blocks.append(_Rows(least=of_row[rows], of_each=least, rows=rows, product=product))
    return sorted(row_blocks, key=lambda rows: float(rows.least[0]))


def _combined(question: Question, products: Products, cases: GridCases[CaseProduct]) -> int:
    """Number of combinations of the axes that the lower bound of the time does not depend on."""
    if not products.count:
        return 1
    product = products.whole.take_rows(np.array([products.whole.shape[0] - 1]))
    read = least_seconds_of(cases.of(product), question.rates).shape
    return int(np.prod([count for count, size in zip(product.shape, read, strict=True) if size == 1]))


def _predicted(
    question: Question,
    limits: MemoryLimits,
    products: Products,
    cases: GridCases[CaseProduct],
    product: CaseProduct,
    least: Array,
    results: ScanResults,
) -> PredictionBlock | None:
    """Memory of the configurations of the product with which a result may change, whether they fit, and the time of those that
    do; None: there are none. `least`: a lower bound of their seconds.
    """
    may_lead = product.legal & (least <= results.slowest_kept(products, product))
    if not may_lead.any():
        return None
    rows = _rows_with(may_lead)
    product, may_lead = product.take(rows), may_lead[np.ix_(*rows)]
    needed = memory(cases.of(product), question.rates, tagged=False)
    fits = may_lead & limits.holds(needed.needed, needed.host)
    needed_bytes, seconds = np.where(may_lead, needed.needed, np.inf), np.full(product.shape, np.inf)
    some = _rows_with(fits)
    if len(some[0]):
        timed = seconds_of(cases.of(product.take(some)), question.rates)
        seconds[np.ix_(*some)] = np.where(fits[np.ix_(*some)], timed, np.inf)
    leads = fits if results.slowest is None else seconds <= results.slowest
    return PredictionBlock(products=products, product=product, seconds=seconds, memory=needed_bytes, fits=fits, leads=leads)


def _rows_with(chosen: Mask) -> list[Index]:
    """For each axis, the rows that have a chosen combination."""
    axes = range(chosen.ndim)
    return [np.flatnonzero(chosen.any(axis=tuple(other for other in axes if other != axis))) for axis in axes]


def without_buckets(space: SearchSpace) -> SearchSpace:
    """The space with each bucket, and each knob that no equation reads, at the value nearest to the base's."""
    excluded = {name: values for name, values in space.domains.items() if name in NOT_SCANNED}
    standing = {name: _nearest(getattr(space.base, name), values) for name, values in excluded.items()}
    domains = {name: values for name, values in space.domains.items() if name not in excluded}
    return dataclasses.replace(space, domains=domains, base=space.base.replace(standing))


def _nearest(value: Value, values: Sequence[Value]) -> Value:
    if value in values or isinstance(value, bool | str):
        return value if value in values else values[0]
    return min(values, key=lambda other: abs(float(other) - float(value)))


def uniform_parts(space: SearchSpace) -> Iterator[SearchSpace]:
    """Split the space into parts with one precision, one attention kernel and one kind of adapters each.

    Equivalent values, such as a kernel that torch would choose anyway, count as one: each configuration is in one part.
    """
    varied = [name for name in UNIFORM if name in space.domains]
    domains = {name: values for name, values in space.domains.items() if name not in UNIFORM}
    values = itertools.product(*(space.domains[name] for name in varied))
    bases = (_uniform(space, dict(zip(varied, point, strict=True))) for point in values)
    for base in dict.fromkeys(bases):
        yield dataclasses.replace(space, domains=domains | {name: (getattr(base, name),) for name in varied})


def _uniform(space: SearchSpace, values: Mapping[str, Value]) -> TrialConfig:
    """The base with these values of uniform knobs, which are ordered so that each reads only those before it."""
    base = space.base.replace(values)
    for name in UNIFORM:
        base = base.replace({name: canonical_value(name, getattr(base, name), base, space.context)})
    return base


def require_within(bounds: Bounds, count: int) -> None:
    """Raise if the bounds are exceeded.

    Raises:
        SpaceTooLargeError: they are.
    """
    if bounds.configurations is not None and count > bounds.configurations:
        raise SpaceTooLargeError(
            "space", f"it has more than {bounds.configurations:,} configurations", "pin some knobs, or choose a smaller space"
        )
    if bounds.until is not None and time.monotonic() > bounds.until:
        raise SpaceTooLargeError("space", "it takes too long to rank", "pin some knobs, or choose a smaller space")
