"""Sizes as people write and read them."""

import re

import typer

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BY_LETTERS = {unit.upper(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str | int) -> int:
    """`2000000000`, `2e9`, `2GB`, `1.5GiB` as bytes.

    Raises:
        typer.BadParameter: the text is no size, or not positive.
    """
    found = _SIZE.fullmatch(str(text).strip())
    unit = _BY_LETTERS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or a number with {', '.join(list(_UNITS)[2:])}")
    size = int(float(found[1].replace("_", "")) * unit)
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not positive; give at least one byte")
    return size


def bytes_text(count: float | None) -> str:
    """`1.23 GiB`, three digits; a dash where nothing is known."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def duration_text(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = max(int(seconds), 0)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
