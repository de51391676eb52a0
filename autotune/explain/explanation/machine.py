"""Notes about the machine during the job: drift, environments, slow nodes."""

from autotune.explain.explanation.evidence import Evidence
from autotune.outcome.drift import drift_of
from autotune.outcome.environment_findings import environment_document, environment_findings, environment_line


def machine_notes(evidence: Evidence) -> list[str]:
    """A line if the machine drifted, one for the environments that were tried, and one if a slow node held the winner back."""
    notes = []
    drift = drift_of(evidence.snapshot, evidence.verdict.baseline, evidence.session.prior)
    if drift.found:
        touched = [trial.config for trial in evidence.snapshot.searched if drift.touches(trial.number)]
        again = sum(bool(evidence.snapshot.confirmed(config)) for config in touched)
        trials = f"{again} of the search trials after that {'was' if again == 1 else 'were'} measured again beside it"
        notes.append(f"{drift.text}; {trials}, and no other trial could win")
    if found := environment_findings(evidence.session, evidence.verdict.standings, evidence.config):
        notes.append(f"environment: {environment_line(environment_document(found, evidence.config))}")
    slow = evidence.winner.result.slow_nodes if evidence.winner.result is not None else ()
    if slow:
        notes.append(f"{', '.join(slow)} held the winner back, and there was no other node to measure it on: it may be faster")
    return notes
