"""An export and an import: knobs as `KNOB=VALUE` lines, and a JSON object of them."""

from collections.abc import Mapping
from typing import Any

from autotune.frameworks.best_config import Winner
from autotune.frameworks.export import Export
from autotune.frameworks.imported import Imported
from search_spaces.trial_config import TrialConfig


def export_flags(winner: Winner) -> Export:
    """A line for each knob that is not at its default."""
    changed = winner.config.differences(TrialConfig())
    return Export(text="".join(f"{name}={value}\n" for name, value in changed.items()))


def import_flags(table: Mapping[str, Any], file: str) -> Imported | None:
    """Of `{"flags": {KNOB: VALUE}}`."""
    del file  # an error would name it
    flags = table.get("flags")
    return None if flags is None else Imported(knobs=dict(flags))
