"""Human-readable numbers: three or four digits with a suitable unit."""

from collections.abc import Callable

from autotune.explain.figures.figure import Unit
from autotune.wire.figures import Cell
from search_spaces.knob_values import value_text
from search_spaces.quantities import number_text


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
    Unit.BYTES: bytes_text,
    Unit.SECONDS: seconds_text,
    Unit.RATE: rate_text,
    Unit.FLOPS: flops_text,
    Unit.SHARE: share_text,
    Unit.RATIO: _ratio_text,
}
