"""The best configuration in the formats of the frameworks."""

from collections.abc import Callable
from typing import Any

from autotune.errors import UnknownFormatError
from autotune.exports.deepspeed import export_deepspeed
from autotune.exports.document import export_json
from autotune.exports.export import Export

Exporter = Callable[[dict[str, Any]], Export]

EXPORTERS: dict[str, Exporter] = {"json": export_json, "deepspeed": export_deepspeed}
"""Format -> what makes it from a best-config document."""

__all__ = ["EXPORTERS", "Export", "Exporter", "exporter"]


def exporter(name: str) -> Exporter:
    """The exporter of that name.

    Raises:
        UnknownFormatError: there is none.
    """
    if name not in EXPORTERS:
        raise UnknownFormatError("format", f"{name!r} is not known", f"use one of {', '.join(EXPORTERS)}")
    return EXPORTERS[name]
