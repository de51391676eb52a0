"""Trials as columns, with words and knob values as codes, so that ten thousand trials take a megabyte."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from autotune.forecast.initial_forecast import InitialForecast
from autotune.objective.ranking import Ranking
from autotune.wire.trials import KnobColumn, PointColumns
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import Placement, TrialRecord

_values_of = operator.attrgetter(*KNOB_NAMES)


@dataclass(slots=True)
class Codes:
    """Assigns numbers to words in the order of their first use; an assigned number never changes."""

    values: list[Any] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def of(self, value: Any) -> int:
        """The value's number."""
        code = self.known.get(value)
        if code is None:
            code = self.known[value] = len(self.values)
            self.values.append(value)
        return code

    def of_word(self, word: str | None) -> int | None:
        """The word's number; None: no word."""
        return None if not word else self.of(str(word))


class Knobs:
    """The knobs of a job's trials: the values of each, and which have several."""

    def __init__(self, searched: Mapping[str, Sequence[Value]]) -> None:
        self._codes = {name: Codes() for name in KNOB_NAMES}
        self._searched = {name for name, values in searched.items() if len(values) > 1}
        self._rows: list[tuple[int, ...]] = []

    def grow(self, configs: Sequence[TrialConfig]) -> None:
        """Add the configurations of the next trials, by number."""
        codes = list(self._codes.values())
        for config in configs:
            self._rows.append(tuple(code.of(value) for code, value in zip(codes, _values_of(config), strict=True)))

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self, numbers: Sequence[int]) -> tuple[KnobColumn, ...]:
        """The knobs that are searched or have several values, with these trials' codes."""
        rows = [self._rows[number] for number in numbers]
        shown = [
            (place, name, codes.values)
            for place, (name, codes) in enumerate(self._codes.items())
            if len(codes.values) > 1 or name in self._searched
        ]
        return tuple(
            KnobColumn(name=name, unit=KNOBS[name].unit, values=tuple(values), codes=tuple(row[place] for row in rows))
            for place, name, values in shown
        )

    def constants(self) -> dict[str, Value]:
        """The knobs that are not searched and have the same value in all trials."""
        single = {name: codes.values[0] for name, codes in self._codes.items() if len(codes.values) == 1}
        return {name: value for name, value in single.items() if name not in self._searched and value != ""}


@dataclass(slots=True)
class Words:
    """The codes of the word columns."""

    outcomes: Codes = field(default_factory=Codes)
    purposes: Codes = field(default_factory=Codes)
    fidelities: Codes = field(default_factory=Codes)
    causes: Codes = field(default_factory=Codes)
    nodes: Codes = field(default_factory=Codes)

    def lists(self) -> dict[str, Any]:
        """Kind -> its words, by code."""
        return {name: tuple(getattr(self, name).values) for name in self.__dataclass_fields__}


def columns(
    trials: Sequence[TrialRecord],
    words: Words,
    ranking: Ranking,
    placements: Mapping[int, Placement],
    forecasts: Mapping[str, InitialForecast],
    epoch: datetime,
) -> PointColumns:
    """The columns of these trials. Rates and predictions have seven digits, enough for a figure."""
    results = [trial.result for trial in trials]
    rates = [result.samples_per_second if result is not None else None for result in results]
    places = [placements.get(trial.number) for trial in trials]
    predicted = [forecasts.get(trial.config_hash) for trial in trials]
    return PointColumns(
        number=tuple(trial.number for trial in trials),
        outcome=tuple(words.outcomes.of_word(trial.outcome) for trial in trials),
        purpose=tuple(words.purposes.of(trial.purpose.value) for trial in trials),
        fidelity=tuple(words.fidelities.of(trial.fidelity) for trial in trials),
        repeat=tuple(trial.repeat for trial in trials),
        attempts=tuple(trial.attempts for trial in trials),
        eligible=tuple(int(ranking.may_win(trial)) for trial in trials),
        cause=tuple(words.causes.of_word((result.rule or result.cause) if result is not None else None) for result in results),
        rate=tuple(None if rate is None else _digits(rate.mean) for rate in rates),
        low=tuple(None if rate is None else _digits(rate.low) for rate in rates),
        high=tuple(None if rate is None else _digits(rate.high) for rate in rates),
        peak=tuple(None if result is None else result.peak_memory_bytes for result in results),
        predicted_rate=tuple(None if one is None else _digits(one.samples_per_second) for one in predicted),
        predicted_peak=tuple(None if one is None else int(one.peak_memory_bytes) for one in predicted),
        started=tuple(None if place is None else round((place.started - epoch).total_seconds(), 3) for place in places),
        finished=tuple(None if t.finished is None else round((t.finished - epoch).total_seconds(), 3) for t in trials),
        node=tuple(None if place is None else words.nodes.of_word(place.node) for place in places),
    )


def _digits(value: float) -> float:
    return float(f"{value:.7g}")
