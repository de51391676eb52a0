"""Whether the winner waits for its data."""

from autotune.explain.explanation.evidence import Evidence
from search_spaces.waiting import waiting_text


def waiting_notes(evidence: Evidence) -> list[str]:
    """One line if it waits, about the rank that waits longest; none if no rank reports waiting."""
    result = evidence.winner.result
    if result is None or not result.step_seconds:
        return []
    waited = max((rank.data_wait_seconds or 0.0 for rank in result.ranks), default=0.0)
    share = waited * len(result.step_seconds) / sum(result.step_seconds)
    text = waiting_text(share, evidence.session.model, "the winner ")
    return [text] if text else []
