"""Sizes in bytes as people write them."""

import re

from autotune.errors import RequestError

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BY_LETTERS = {unit.upper(): factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)")


def parse_size(field: str, text: str) -> int:
    """`2000000000`, `2e9`, `2GB`, `1.5GiB` as bytes.

    Raises:
        RequestError: the text is not a size, or not positive; the line names `field`.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = _BY_LETTERS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise RequestError(field, f"{text!r} is not a size", f"write bytes, or a number with {', '.join(list(_UNITS)[2:])}")
    size = float(found[1].replace("_", "")) * unit
    if not 1 <= size < 2**63:
        raise RequestError(field, f"{text!r} is out of range", "give at least one byte, and less than 8 EiB")
    return int(size)
