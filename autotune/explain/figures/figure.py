"""Helpers that make figures (`autotune.wire.figures`), and their numbers with units. The drawing code decides the look."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any

from autotune.wire.figures import Cell, Column, Table
from search_spaces.knob_values import value_text
from search_spaces.quantities import number_text
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import TrialRecord


class FigureUnit(StrEnum):
    """What a number counts. The values are exported: never rename one."""

    NONE = ""
    """A name, a count, or a value of a knob."""
    RATE = "samples/s"
    BYTES = "bytes"
    SECONDS = "seconds"
    SHARE = "share"
    """1 is the whole."""
    RATIO = "times"
    FLOPS = "FLOP"
    ELEMENTS = "elements"


def column(name: str, title: str, values: Iterable[Any], unit: FigureUnit = FigureUnit.NONE) -> Column:
    """A column; values that are not finite become None."""
    return Column(name=name, title=title, values=tuple(map(_cell, values)), unit=unit)


def table(name: str, title: str, columns: Sequence[Column]) -> Table:
    """A table of these columns."""
    return Table(name=name, title=title, columns=tuple(columns))


def _cell(value: Any) -> Cell:
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


ALWAYS = ("zero_stage", "micro_batch_size")
"""Knobs that are always shown."""


def varying(trials: Iterable[TrialRecord]) -> list[str]:
    """The knobs in which trials differ, in display order."""
    configs = [trial.config for trial in trials]
    return [name for name in KNOB_NAMES if len({getattr(config, name) for config in configs}) > 1]


def config_text(config: TrialConfig, knobs: Collection[str] = ()) -> str:
    """`zero_stage=1 micro_batch_size=2`: the values of these knobs that are not defaults, and always those of `ALWAYS`."""
    shown = [name for name in KNOB_NAMES if name in ALWAYS or (name in knobs and getattr(config, name) != _DEFAULTS[name])]
    return " ".join(f"{name}={value_text(getattr(config, name))}" for name in shown)


def counted(count: int, noun: str) -> str:
    """`1 trial`, `3 trials`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


_DEFAULTS = {name: getattr(TrialConfig(), name) for name in KNOB_NAMES}


def bytes_text(count: float | None) -> str:
    """`1.23 GiB`, three digits; a dash for None."""
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} GiB" if abs(count) < 1000 else f"{count:,.0f} GiB"


def seconds_text(seconds: float | None) -> str:
    """`12.3 s`, `12.3 ms`; from ten minutes on `4:05:12`."""
    if seconds is None:
        return "–"
    size = abs(seconds)
    if size >= 600:
        whole = round(seconds)
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    if size >= 1 or size == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if size >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def rate_text(rate: float | None) -> str:
    """`123.4`, `12,345`."""
    if rate is None:
        return "–"
    return number_text(rate)


def flops_text(count: float | None) -> str:
    """`1.23 TFLOP`."""
    if count is None:
        return "–"
    for factor, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.3g} FLOP"


def share_text(share: float | None) -> str:
    """`12.3 %`."""
    return "–" if share is None else f"{share * 100:.1f} %"


def percent(share: float) -> str:
    """`12 %` with a no-break space."""
    return f"{share * 100:.0f}\u00a0%"


def cell_text(value: Cell, unit: str) -> str:
    """A cell of a column with this unit."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, str):
        return value
    text = _TEXTS.get(unit)
    if text is not None:
        return text(value)
    return f"{value:,}" if isinstance(value, int) else value_text(float(f"{value:.4g}"))


def _ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3g}×"


_TEXTS: dict[str, Callable[[float | None], str]] = {
    FigureUnit.BYTES: bytes_text,
    FigureUnit.SECONDS: seconds_text,
    FigureUnit.RATE: rate_text,
    FigureUnit.FLOPS: flops_text,
    FigureUnit.SHARE: share_text,
    FigureUnit.RATIO: _ratio_text,
}
