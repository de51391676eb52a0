"""Waiting for data: a finding of its own, for which no layout is to blame."""

from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model

WAIT_SHARE = 0.05
"""Of a step that is spent waiting for data, from which on it is worth a word."""


def waiting_text(share: float, model: Model, what: str = "") -> str:
    """What is said of a trial that waits so much of its step; empty: it is not worth a word.

    The remedy names only what this command can do: a number of workers is searched where the command passes one on.
    """
    if share <= WAIT_SHARE:
        return ""
    told = f"{what}waits for data in {share:.0%} of the step, which no layout changes"
    own = (*model.script_knobs, *model.environment_knobs) if isinstance(model, CommandModel) else ()
    if workers := next((name for name in own if "worker" in name.lower()), None):
        return f"{told}: search larger values of {workers}, or prepare samples beforehand"
    passed = "if a DataLoader loads them, pass it {num_workers} and search --script-knob num_workers=0,2,4"
    return f"{told}: prepare samples beforehand, or {passed}"
