"""Results of the environments that were tried on the winner's layout."""

from dataclasses import dataclass
from typing import Any

from autotune.objective.ranking import rate
from autotune.outcome.standings import Standings
from autotune.session.session import Session
from search_spaces.environment import ENVIRONMENT
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFinding:
    """Result of one environment on the winner's layout."""

    environment: str
    trial: int
    outcome: Outcome
    over_layout: Interval | None
    """Its samples/s relative to the layout without it; None: the measurement did not complete."""


def environment_findings(session: Session, standings: Standings, winner: TrialConfig) -> list[EnvironmentFinding]:
    """Return the environments that were tried on the winner's layout, in trial order."""
    layout = winner.replace({ENVIRONMENT: session.environment})
    plain = standings.snapshot.search_trial(layout)
    tried = [trial for trial in standings.snapshot.searched if session.tries_environment(trial.config)]
    same = [trial for trial in tried if trial.config.replace({ENVIRONMENT: session.environment}) == layout]
    return [_finding(standings, trial, plain) for trial in same]


def environment_document(findings: list[EnvironmentFinding], winner: TrialConfig) -> dict[str, Any]:
    """Return the findings in the form of the best-config document."""
    won = next((finding.environment for finding in findings if finding.environment == winner.environment), None)
    return {"won": won, "tried": [to_plain(finding) for finding in findings]}


def environment_line(document: dict[str, Any]) -> str:
    """Summarise the result of `environment_document` in one line."""
    tried, won = document["tried"], document["won"]
    measured = [finding for finding in tried if finding["over_layout"] is not None]
    if won is not None:
        winner = next(finding for finding in tried if finding["environment"] == won)
        return f"{won} has {_ratio_text(winner['over_layout'])} the samples/s of its layout without it"
    count = f"{len(tried)} environment{'s' if len(tried) != 1 else ''}"
    if not measured:
        return f"none of {count} was measured in full: each was slower than the layout without it, or failed"
    best = max(measured, key=lambda finding: finding["over_layout"]["mean"])
    text = f"none of {count} is significantly faster than the layout without it"
    return f"{text}; the fastest, {best['environment']}, is {_ratio_text(best['over_layout'])} as fast"


def _finding(standings: Standings, trial: TrialRecord, plain: TrialRecord | None) -> EnvironmentFinding:
    assert trial.outcome is not None  # searched trials have ended
    comparable = plain is not None and trial.outcome is Outcome.OK and rate(trial) > 0
    over = standings.ratio(trial, plain) if plain is not None and comparable else None
    return EnvironmentFinding(environment=trial.config.environment, trial=trial.number, outcome=trial.outcome, over_layout=over)


def _ratio_text(ratio: dict[str, float]) -> str:
    return f"{ratio['mean']:.3f}x [{ratio['low']:.3f}, {ratio['high']:.3f}]"
