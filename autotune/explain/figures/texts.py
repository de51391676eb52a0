"""Texts that several figures use."""

from collections.abc import Collection, Iterable

from search_spaces.knob_values import value_text
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import TrialRecord

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


def counted(count: int, what: str) -> str:
    """`1 trial`, `3 trials`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


_DEFAULTS = {name: getattr(TrialConfig(), name) for name in KNOB_NAMES}
