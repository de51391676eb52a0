"""Numbers as text: parsed with a unit (`40GB`, `100Gbit/s`, `312TFLOP/s`, `125M`), and written."""

import re
from collections.abc import Mapping
from enum import StrEnum


class Quantity(StrEnum):
    """What a number measures; the value describes the format."""

    BYTES = "bytes, or a number with kB, MB, GB, TB, KiB, MiB or GiB"
    RATE = "bytes/s, or a number with GB/s, GiB/s or Gbit/s"
    FLOPS = "FLOP/s, or a number with GFLOP/s, TFLOP/s or PFLOP/s"
    COUNT = "a number, or one with K, M, B or T"
    LENGTH = "a number of tokens, or one with k or M (8k = 8192, 1M = 1048576)"


def _factors(unit: str, share: float = 1) -> dict[str, float]:
    scales = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
    scales |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    return {f"{scale}{unit}".upper(): factor * share for scale, factor in scales.items()}


_BYTES = _factors("B")
_FACTORS: Mapping[Quantity, Mapping[str, float]] = {
    Quantity.BYTES: _BYTES,
    Quantity.RATE: {
        **{f"{name}/S": factor for name, factor in _BYTES.items()},
        **{f"{name}{per}": factor for per in ("/S", "PS") for name, factor in _factors("BIT", 1 / 8).items()},
    },
    Quantity.FLOPS: {f"{name}{per}": factor for per in ("/S", "S") for name, factor in _factors("FLOP").items()},
    Quantity.COUNT: {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12},
    Quantity.LENGTH: {"K": 2**10, "KI": 2**10, "M": 2**20, "MI": 2**20},  # as in the names of models: 128k is 131072
}
"""Unit in capitals -> factor to the base unit. `Gb/s` is ambiguous: a lower-case b means bits, a capital B bytes
(`read_quantity`)."""


def read_quantity(quantity: Quantity, text: str) -> float | None:
    """Parse a number to bytes, bytes/s, FLOP/s or ones; None: it is not such a number."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)", text.strip())
    if match is None:
        return None
    unit = re.sub(r"b(?=/s$|ps$)", "bit", match[2]) if quantity is Quantity.RATE else match[2]
    factor = 1.0 if not unit else _FACTORS[quantity].get(unit.upper())
    return None if factor is None else float(match[1].replace("_", "")) * factor


def number_text(value: float, digits: int = 4) -> str:
    """The number with this many digits, or with all whole ones: `0.01234`, `12.34`, `12,346`."""
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def ratio_text(mean: float, low: float | None = None, high: float | None = None) -> str:
    """`1.043x`, or with its interval `1.043x [1.021, 1.066]`: how gains are written everywhere."""
    text = f"{number_text(mean)}x"
    return text if low is None or high is None else f"{text} [{number_text(low)}, {number_text(high)}]"


def count_text(count: int) -> str:
    """`1.04 T`, `8.03 B`, `857 K`: three digits, and the unit of numbers of parameters."""
    units = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3}
    return next((f"{count / size:.3g} {unit}" for unit, size in units.items() if count >= size), str(count))
