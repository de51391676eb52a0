"""Waiting for data: a finding that is independent of the layout."""

from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model


def waiting_text(share: float, model: Model, prefix: str = "") -> str:
    """The message for a trial that waits for this share of its step; empty: too small to report.

    The remedy contains only what this command supports: the number of workers is searched only if the command passes one on.
    """
    if share <= 0.05:  # not worth a report
        return ""
    finding = f"{prefix}waits for data in {share:.0%} of the step, which no layout changes"
    script_knobs = (*model.script_knobs, *model.environment_knobs) if isinstance(model, CommandModel) else ()
    if workers := next((name for name in script_knobs if "worker" in name.lower()), None):
        return f"{finding}: search larger values of {workers}, or prepare samples beforehand"
    passed = "if a DataLoader loads them, pass it {num_workers} and search --script-knob num_workers=0,2,4"
    return f"{finding}: prepare samples beforehand, or {passed}"
