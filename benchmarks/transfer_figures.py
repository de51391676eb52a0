"""What one engine's answer is worth on another: rank correlations, the winner's loss, and the loss knob by knob."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.validation.markdown import table
from autotune.validation.ranking import spearman
from benchmarks.paired_statistics import pooled_deviation
from search_spaces.trial_config import TrialConfig, Value

SPECIFIC = 0.03
"""Share that native's value of a knob may lose on another engine before the knob is the engine's own."""
SOURCE = "native"
Rates = Mapping[int, float]
"""Number of a configuration -> its mean samples/s on an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement."""

    engine: str
    number: int
    """Of the configuration."""
    repeat: int
    rate: float
    """Samples/s; 0: it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What native's value of a knob costs on another engine, everything else being tuned there."""

    knob: str
    source: Value
    """Native's winner has it."""
    target: Value
    """The other engine's winner has it."""
    share: float

    @property
    def specific(self) -> bool:
        return self.share > SPECIFIC


def mean_rates(rows: Sequence[Measured], engine: str) -> dict[int, float]:
    """Geometric means of what was measured."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.engine == engine and row.rate > 0:
            found.setdefault(row.number, []).append(math.log(row.rate))
    return {number: math.exp(statistics.fmean(logs)) for number, logs in found.items()}


def correlation(one: Rates, other: Rates) -> tuple[float | None, int]:
    """Spearman over the configurations that both have, and how many these are."""
    common = sorted(one.keys() & other.keys())
    first, second = (np.array([rates[number] for number in common]) for rates in (one, other))
    return spearman(first, second), len(common)


def winners_loss(source: Rates, target: Rates) -> tuple[int, int, float]:
    """Of the configurations that both have: the source's best, the target's best, and what the first loses on the target."""
    common = source.keys() & target.keys()
    theirs, own = max(common, key=source.__getitem__), max(common, key=target.__getitem__)
    return theirs, own, 1 - target[theirs] / target[own]


def knob_losses(source: Rates, target: Rates, configurations: Sequence[TrialConfig]) -> list[Loss]:
    """For each knob that varies: the target's best with the source's value of it, against the target's best of all."""
    theirs, own, _ = winners_loss(source, target)
    common = source.keys() & target.keys()
    losses = []
    for knob in TrialConfig().values():
        if len({getattr(configurations[number], knob) for number in common}) > 1:
            value = getattr(configurations[theirs], knob)
            best = max(target[number] for number in common if getattr(configurations[number], knob) == value)
            losses.append(
                Loss(knob=knob, source=value, target=getattr(configurations[own], knob), share=1 - best / target[own])
            )
    return losses


def page(rows: Sequence[Measured], configurations: Sequence[TrialConfig], rate_mbit: int) -> list[str]:
    """Lines of markdown; empty where nothing was measured."""
    engines = [engine for engine in ("native", "deepspeed", "fsdp2") if mean_rates(rows, engine)]
    if SOURCE not in engines:
        return []
    rates = {engine: mean_rates(rows, engine) for engine in engines}
    method = (
        "The same configurations by one harness on two CPU ranks, each in a network namespace of its own behind a link of "
        f"{rate_mbit} Mbit/s, the engines in turn; what an engine refuses it does not run"
    )
    counts = ", ".join(f"{len(rates[engine])} on {engine}" for engine in engines)
    noise = ", ".join(f"{_spread(rows, engine)} on {engine}" for engine in engines)
    matrix = [[one, *(_cell(rates[one], rates[other]) for other in engines)] for one in engines]
    lines = [
        "# Does the answer carry over?", "",
        f"Written by `python -m benchmarks.transfer`. {method}: {counts}. Repeats differ by {noise}.", "", "## Ranks", "",
        "Spearman of samples/s over the configurations that both engines run (their number in brackets).", "",
        *table(["", *engines], matrix), "",
    ]  # fmt: skip
    for engine in engines:
        if engine != SOURCE and rates[SOURCE].keys() & rates[engine].keys():
            lines += _transfer(engine, rates[SOURCE], rates[engine], configurations)
    return lines


def _transfer(engine: str, source: Rates, target: Rates, configurations: Sequence[TrialConfig]) -> list[str]:
    theirs, own, share = winners_loss(source, target)
    losses = knob_losses(source, target, configurations)
    cells = [
        [
            loss.knob, str(loss.source), str(loss.target), f"{100 * loss.share:.1f} %",
            "engine-specific" if loss.specific else "carries over",
        ]
        for loss in losses
    ]  # fmt: skip
    specific = [f"`{loss.knob}`" for loss in losses if loss.specific]
    told = f"{', '.join(specific)}: tuned on {engine} only" if specific else "every knob carries over"
    own_best = f"{engine}'s own ({_text(configurations[own])})"
    answer = f"Native's best ({_text(configurations[theirs])}) loses {share:.1%} on {engine} against {own_best}"
    each = f"Knob by knob, native's value kept and everything else tuned on {engine} (bound {SPECIFIC:.0%})"
    return [
        f"## Native's answer on {engine}", "", f"{answer}. {each}: {told}.", "",
        *table(["knob", "native's value", f"{engine}'s value", "loses", ""], cells), "",
    ]  # fmt: skip


def _cell(one: Rates, other: Rates) -> str:
    told, count = correlation(one, other)
    return f"{'none' if told is None else f'{told:.2f}'} ({count})"


def _spread(rows: Sequence[Measured], engine: str) -> str:
    groups: dict[int, list[float]] = {}
    for row in rows:
        if row.engine == engine and row.rate > 0:
            groups.setdefault(row.number, []).append(row.rate)
    deviation, freedom = pooled_deviation(list(groups.values()))
    return f"{100 * deviation:.1f} %" if freedom else "an unknown share"


def _text(config: TrialConfig) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.differences(TrialConfig()).items()) or "the defaults"
