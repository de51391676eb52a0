"""Value of one engine's answer on another: rank correlations, the winner's loss, and the loss knob by knob."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.planning.depth import spearman
from benchmarks.common.paired_statistics import pooled_deviation
from benchmarks.common.written_page import table
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

SPECIFIC = 0.03
"""Largest loss of native's value of a knob on another engine; beyond it the knob is engine-specific."""
CLOSE = 0.1
"""Share within which two repeats that differ by as much cannot distinguish two configurations."""
LAYOUT = ("zero_stage", "tensor_parallel_size", "pipeline_parallel_size")
SOURCE = "native"
USE = (
    "Each engine declares the engine-specific knobs in its capability: `autotune sweep MODEL --from best-config.json "
    "--engine TARGET` keeps the rest of an answer and tunes only these knobs on the target."
)
Rates = Mapping[int, float]
"""Number of a configuration -> its mean samples/s on an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement."""

    engine: str
    number: int
    """Number of the configuration."""
    repeat: int
    rate: float
    """Samples/s; 0: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss of native's value of a knob on another engine, with all other knobs tuned there."""

    knob: str
    layout: str
    """The fixed layout; empty: the layout is tuned too."""
    source: Value
    """Value of native's winner."""
    target: Value
    """Value of the other engine's winner."""
    share: float

    @property
    def specific(self) -> bool:
        return self.share > SPECIFIC


def mean_rates(rows: Sequence[Measured], engine: str) -> dict[int, float]:
    """Samples/s of each configuration, adjusted for the machine's drift.

    Not every configuration was measured in every round, so that plain means would compare times of day. Least squares:
    log rate = configuration on its engine + round, the rounds' effects summing to zero.
    """
    measured = [row for row in rows if row.rate > 0]
    if not any(row.engine == engine for row in measured):
        return {}
    cells = {key: place for place, key in enumerate(dict.fromkeys((row.engine, row.number) for row in measured))}
    rounds = {key: place for place, key in enumerate(dict.fromkeys(row.repeat for row in measured))}
    design = np.zeros((len(measured) + 1, len(cells) + len(rounds)))
    for place, row in enumerate(measured):
        design[place, cells[row.engine, row.number]] = design[place, len(cells) + rounds[row.repeat]] = 1.0
    design[-1, len(cells) :] = 1.0
    logs = np.array([*(math.log(row.rate) for row in measured), 0.0])
    effects = np.linalg.lstsq(design, logs, rcond=None)[0]
    return {number: math.exp(effects[place]) for (one, number), place in cells.items() if one == engine}


def correlation(one: Rates, other: Rates) -> tuple[float | None, int]:
    """Spearman over the configurations that both have, and their number."""
    common = sorted(one.keys() & other.keys())
    first, second = (np.array([rates[number] for number in common]) for rates in (one, other))
    return spearman(first, second), len(common)


def winners_loss(source: Rates, target: Rates) -> tuple[int, int, float]:
    """Among the configurations that both have: the source's best, the target's best, and the former's loss on the target."""
    common = source.keys() & target.keys()
    theirs, own = max(common, key=source.__getitem__), max(common, key=target.__getitem__)
    return theirs, own, 1 - target[theirs] / target[own]


def knob_losses(source: Rates, target: Rates, configurations: Sequence[TrialConfig], layout: str = "") -> list[Loss]:
    """For each varying knob: the target's best with the source's value, against the target's overall best."""
    theirs, own, _ = winners_loss(source, target)
    common = source.keys() & target.keys()
    losses = []
    for knob in TrialConfig().values():
        if len({getattr(configurations[number], knob) for number in common}) > 1:
            value = getattr(configurations[theirs], knob)
            best = max(target[number] for number in common if getattr(configurations[number], knob) == value)
            kept = getattr(configurations[own], knob)
            losses.append(Loss(knob=knob, layout=layout, source=value, target=kept, share=1 - best / target[own]))
    return losses


def by_layout(source: Rates, target: Rates, configurations: Sequence[TrialConfig]) -> dict[str, tuple[Rates, Rates]]:
    """Layout -> both engines' rates of the layout's common configurations: memory may permit only one layout."""
    groups: dict[str, list[int]] = {}
    for number in sorted(source.keys() & target.keys()):
        layout = TrialConfig().replace({name: getattr(configurations[number], name) for name in LAYOUT})
        groups.setdefault(_text(layout), []).append(number)
    return {
        layout: ({number: source[number] for number in numbers}, {number: target[number] for number in numbers})
        for layout, numbers in groups.items()
    }


def all_losses(source: Rates, target: Rates, configurations: Sequence[TrialConfig]) -> tuple[list[Loss], list[Loss]]:
    """Losses knob by knob with a free layout, and within each fixed layout."""
    groups = by_layout(source, target, configurations)
    given = [loss for layout, group in groups.items() for loss in knob_losses(*group, configurations, layout)]
    return knob_losses(source, target, configurations), given


def finalists(rows: Sequence[Measured], configurations: Sequence[TrialConfig]) -> list[int]:
    """The configurations that decide the losses: in each layout those within `CLOSE` of the best on either engine."""
    source = mean_rates(rows, SOURCE)
    found: set[int] = set()
    for engine in {row.engine for row in rows} - {SOURCE}:
        for group in by_layout(source, mean_rates(rows, engine), configurations).values():
            for rates in group:
                found.update(number for number, rate in rates.items() if rate >= (1 - CLOSE) * max(rates.values()))
    return sorted(found)


def page(rows: Sequence[Measured], configurations: Sequence[TrialConfig], rate_mbit: int) -> list[str]:
    """Lines of markdown; empty without measurements."""
    engines = [engine for engine in ("native", "deepspeed", "fsdp2") if mean_rates(rows, engine)]
    if SOURCE not in engines:
        return []
    rates = {engine: mean_rates(rows, engine) for engine in engines}
    method = (
        "The same configurations by one harness on two CPU ranks, each in a network namespace of its own behind a link of "
        f"{rate_mbit} Mbit/s, the engines in turn, without configurations that an engine refuses"
    )
    counts = ", ".join(f"{len(rates[engine])} on {engine}" for engine in engines)
    noise = ", ".join(f"{_spread(rows, engine)} on {engine}" for engine in engines)
    finals = (
        f"configurations that decide a loss were measured {_finals(rows)} times, so that a difference is uncertain by "
        f"± {100 * _uncertainty(rows):.0f} % (95 %)"
    )
    matrix = [[one, *(_cell(rates[one], rates[other]) for other in engines)] for one in engines]
    lines = [
        "# Does the answer carry over?", "",
        f"Written by `python -m benchmarks.prediction.transfer`. {method}: {counts}. Repeats differ by {noise}; {finals}.", "",
        USE, "", "## Ranks", "",
        "Spearman of samples/s over the configurations that both engines run (their number in brackets).", "",
        *table(["", *engines], matrix), "",
    ]  # fmt: skip
    for engine in engines:
        if engine != SOURCE and rates[SOURCE].keys() & rates[engine].keys():
            lines += _transfer(engine, rates[SOURCE], rates[engine], configurations)
    return lines


def _transfer(engine: str, source: Rates, target: Rates, configurations: Sequence[TrialConfig]) -> list[str]:
    theirs, own, share = winners_loss(source, target)
    groups = by_layout(source, target, configurations)
    free, given = all_losses(source, target, configurations)
    own_best = f"{engine}'s own ({_text(configurations[own])})"
    answer = f"Native's best ({_text(configurations[theirs])}) loses {share:.1%} on {engine} against {own_best}"
    specific = sorted({loss.knob for loss in (*free, *given) if loss.specific})
    verdict = (
        f"{', '.join(f'`{knob}`' for knob in specific)}: tuned on {engine} only" if specific else "every knob carries over"
    )
    layouts = [
        [layout, _text(configurations[one]), _text(configurations[other]), f"{100 * lost:.1f} %"]
        for layout, (one, other, lost) in ((layout, winners_loss(*group)) for layout, group in groups.items())
    ]
    return [
        f"## Native's answer on {engine}", "",
        f"{answer}. Knob by knob, native's value kept and everything else tuned on {engine} (bound {SPECIFIC:.0%}): {verdict}.",
        "", *table(["knob", "loses", "most in a fixed layout", "there native has", f"there {engine} has", ""],
                   [_knob_cells(loss, given) for loss in free]), "",
        "With a fixed layout, if memory permits no other:", "",
        *table(["layout", "native's best in it", f"{engine}'s best in it", "loses"], layouts), "",
    ]  # fmt: skip


def _knob_cells(free: Loss, given: Sequence[Loss]) -> list[str]:
    """A knob's row: its loss with a free layout, and its largest loss in a fixed layout."""
    mine = [loss for loss in given if loss.knob == free.knob]
    worst = max(mine, key=lambda loss: loss.share, default=free)
    most = f"{100 * worst.share:.1f} % ({worst.layout})" if mine and worst.share else "nothing"
    verdict = "engine-specific" if free.specific or worst.specific else "carries over"
    return [free.knob, f"{100 * free.share:.1f} %", most, str(worst.source), str(worst.target), verdict]


def _cell(one: Rates, other: Rates) -> str:
    value, count = correlation(one, other)
    return f"{'none' if value is None else f'{value:.2f}'} ({count})"


def _finals(rows: Sequence[Measured]) -> int:
    return max(Counter((row.engine, row.number) for row in rows if row.rate > 0).values())


def _uncertainty(rows: Sequence[Measured]) -> float:
    """Half-width of the 95 % interval of the ratio of two configurations with the most measurements."""
    deviation, _ = _pooled(rows)
    return 1.96 * deviation * math.sqrt(2 / _finals(rows))


def _spread(rows: Sequence[Measured], engine: str) -> str:
    deviation, freedom = _pooled([row for row in rows if row.engine == engine])
    return f"{100 * deviation:.1f} %" if freedom else "an unknown share"


def _pooled(rows: Sequence[Measured]) -> tuple[float, int]:
    groups: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if row.rate > 0:
            groups.setdefault((row.engine, row.number), []).append(row.rate)
    return pooled_deviation(list(groups.values()))


def _text(config: TrialConfig) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.differences(TrialConfig()).items()) or "the defaults"
