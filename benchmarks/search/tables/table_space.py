"""The configurations of a group of a table as candidates of a strategy."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.knowledge.learning import KNOB_OF
from autotune.knowledge.row import TableRow
from benchmarks.prediction.scoring.configurations import CONFIGURATION_FIELDS
from benchmarks.search.tables.table_context import table_context
from search_spaces.errors import Refusal, UnknownNameError
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.trial_config import KNOB_NAMES, TrialConfig, stable_hash

_DERIVED = frozenset({"dp"})
"""Columns that follow from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig(TrialConfig):
    """A configuration of a table: knobs, and the other properties that distinguish it within its group."""

    variant: str = ""
    """Properties that no knob expresses, as `column=value` parts; empty if there are none."""

    def every_value(self) -> dict[str, Value]:
        """Every knob and its value, and the variant, so that variants have different hashes."""
        return {**TrialConfig.every_value(self), "variant": self.variant}

    def replace(self, changes: Any) -> "TableConfig":
        """The configuration with some knobs, or the variant, changed."""
        if unknown := [name for name in changes if name not in (*KNOB_NAMES, "variant")]:
            raise UnknownNameError(unknown[0], "no knob has this name", "see `autotune space --knobs` for the knobs")
        return TableConfig(**{**self.values(), **changes})


class TableSpace:
    """A group's configurations; only these are legal.

    Domains are the group's values of each column that varies. Properties without a knob form one more axis, `variant`.
    """

    def __init__(self, rows: Sequence[TableRow]) -> None:
        """`rows`: one for each configuration, without measurements."""
        varying = [name for name in (*CONFIGURATION_FIELDS, "kernel") if len({getattr(row, name) for row in rows}) > 1]
        self._configs = _numbered([_config(row, varying) for row in rows])
        self._known = dict.fromkeys(self._configs)
        self.context = table_context(rows)
        """Model, cluster and batch, if all rows share them."""

    @property
    def configs(self) -> Sequence[TableConfig]:
        """One for each given row, in the order of the rows."""
        return self._configs

    @cached_property
    def hash(self) -> str:
        """Equal in every process for the same configurations."""
        return stable_hash([config.hash for config in self._configs])

    @cached_property
    def domains(self) -> dict[str, tuple[Value, ...]]:
        """Knob -> its values, for the knobs that vary."""
        values = {name: _ordered({getattr(config, name) for config in self._configs}) for name in (*KNOB_NAMES, "variant")}
        return {name: found for name, found in values.items() if len(found) > 1}

    @property
    def base(self) -> TrialConfig:
        """Any configuration: provides the values of knobs that do not vary."""
        return next(iter(self._known))

    def count(self) -> int:
        """The number of configurations."""
        return len(self._known)

    def enumerate(self) -> Iterator[TrialConfig]:
        """All of them, in the order of the rows."""
        return iter(self._known)

    def sample(self, rng: random.Random) -> TrialConfig:
        """A random configuration."""
        return rng.choice(list(self._known))

    def neighbours(self, config: TrialConfig) -> list[TrialConfig]:
        """The configurations that differ in one knob."""
        return [other for other in self._known if len(config.differences(other)) == 1]

    def check(self, config: TrialConfig) -> list[Refusal]:
        """Refuse configurations missing in the table."""
        if config in self._known:
            return []
        return [Refusal("table", "the table has no such configuration", "choose one of its rows")]

    def admitted(self, config: TrialConfig) -> TrialConfig:
        """The configuration itself."""
        return config


def _config(row: TableRow, varying: Sequence[str]) -> TableConfig:
    values: dict[str, Value] = {}
    rest = []
    for name in varying:
        value, knob = getattr(row, name), KNOB_OF.get(name)
        if knob is not None and _is_of(knob, value):
            values[knob] = value
        elif name not in _DERIVED:
            rest.append(f"{name}={value}")
    return TableConfig(**values, variant=" ".join(rest))  # type: ignore[arg-type]


def _numbered(configs: Sequence[TableConfig]) -> list[TableConfig]:
    """Number the configurations that differ only in derived columns."""
    seen: dict[TableConfig, int] = {}
    numbered = []
    for config in configs:
        seen[config] = seen.get(config, 0) + 1
        number = seen[config]
        numbered.append(config if number == 1 else config.replace({"variant": f"{config.variant} number={number}".strip()}))
    return numbered


def _is_of(knob: str, value: object) -> bool:
    """Whether the table's value is a possible value of the knob; a blank cell is not."""
    default = KNOBS[knob].default
    return value is not None and (isinstance(value, type(default)) or (isinstance(default, int) and isinstance(value, int)))


def _ordered(values: set[Value]) -> tuple[Value, ...]:
    return tuple(sorted(values, key=lambda value: (isinstance(value, str), value)))
