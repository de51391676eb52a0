"""Waiting for data: a finding of its own, for which no layout is to blame."""

WAIT_SHARE = 0.05
"""Of a step that is spent waiting for data, from which on it is worth a word."""


def waiting_text(share: float, what: str = "") -> str:
    """What a trial that waits so much of its step is told; empty: it is not worth a word."""
    if share <= WAIT_SHARE:
        return ""
    told = f"{what}waits for data in {share:.0%} of the step, which no layout changes"
    remedy = (
        "give its loader more workers (--script-knob num_workers=2,4,8), let it prefetch more, or prepare samples beforehand"
    )
    return f"{told}: {remedy}"
