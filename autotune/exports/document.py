"""Exports the best-config document itself."""

from typing import Any

from autotune.exports.best_config_file import best_config_text
from autotune.exports.export import Export


def export_json(best: dict[str, Any]) -> Export:
    """Return the document as it is written to best-config.json."""
    return Export(text=best_config_text(best))
