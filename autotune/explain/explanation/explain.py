"""Builds the explanation of a job, with notes about the machine: drift, environments, slow nodes."""

from pathlib import Path
from typing import TYPE_CHECKING

from autotune.explain.explanation.evidence import ExplanationEvidence, gather
from autotune.explain.explanation.findings import SCHEMA_VERSION, Explanation, MoreMemory
from autotune.explain.explanation.knob_findings import baseline_of, knob_findings
from autotune.explain.explanation.limits import Counterfactual, limits_of, more_memory, upgrades_of
from autotune.explain.explanation.resource_use import memory_use, time_use, waiting_notes
from autotune.forecast import unknown_model
from autotune.objective.ranking import rate
from autotune.outcome.drift import drift_of
from autotune.outcome.environment_findings import environment_document, environment_findings, environment_line
from search_spaces.errors import SpaceTooLargeError

if TYPE_CHECKING:
    from storage.store import Store

SCHEMA_PATH = Path(__file__).parents[2] / "schemas" / "explanation.schema.json"


def explain(store: "Store", job_id: str) -> Explanation:
    """Return why the best configuration of a job is the best. Runs nothing and writes nothing.

    1. Read the job's rows and decide the winner, as for best-config.json.
    2. Divide the measured step into parts by the equations, with what the database knows about the cluster.
    3. Compare each knob's values: by trials that differ only in it, else by predictions corrected by the job's trials.
    4. Predict the step on other hardware.

    Raises:
        UnknownJobError: there is no such job.
        NoBestError: no trial won; the message says how the trials ended.
        JobNotResumableError, SearchSpaceError: this version cannot read the job's request.
    """
    return explain_evidence(gather(store, job_id))


def explain_evidence(evidence: ExplanationEvidence) -> Explanation:
    """As `explain`, from evidence that was gathered before."""
    notes = [*waiting_notes(evidence), *machine_notes(evidence)]
    memory = _more_memory(evidence, notes)
    step = None if evidence.question is None else Counterfactual(evidence, evidence.question)
    job, session, verdict = evidence.snapshot.job, evidence.session, evidence.verdict
    return Explanation(
        schema_version=SCHEMA_VERSION,
        job=job.id,
        state=job.state.value,
        model=session.model.name,
        cluster=session.cluster.name,
        world_size=session.world_size,
        objective=session.ranking.objective.value,
        strategy=session.request.strategy,
        trials=len(evidence.snapshot.searched),
        measured=sum(rate(trial) > 0 for trial in evidence.snapshot.searched),
        winner=evidence.winner.number,
        config=evidence.config,
        baseline=baseline_of(evidence),
        gain=verdict.gain,
        tie=verdict.tie,
        rests_on=evidence.question.rests_on if evidence.question else "",
        time=time_use(evidence),
        memory=memory_use(evidence),
        knobs=knob_findings(evidence),
        limits=None if step is None else limits_of(evidence, step, memory),
        upgrades=() if step is None else upgrades_of(evidence, step, memory),
        notes=tuple(notes),
    )


def _more_memory(evidence: ExplanationEvidence, notes: list[str]) -> tuple[MoreMemory, ...]:
    if evidence.outlook is None:
        notes.append(f"{unknown_model(evidence.session.model)}: only measurements are reported")
        return ()
    try:
        return more_memory(evidence.outlook)
    except SpaceTooLargeError as error:
        notes.append(f"the gain from more memory is not reported: {error.problem}")
        return ()


def machine_notes(evidence: ExplanationEvidence) -> list[str]:
    """A line if the machine drifted, one for the environments that were tried, and one if a slow node held the winner back."""
    notes = []
    drift = drift_of(evidence.snapshot, evidence.verdict.baseline, evidence.session.prior)
    if drift.found:
        touched = [trial.config for trial in evidence.snapshot.searched if drift.touches(trial.number)]
        again = sum(bool(evidence.snapshot.confirmed(config)) for config in touched)
        trials = f"{again} of the search trials after that {'was' if again == 1 else 'were'} measured again beside it"
        notes.append(f"{drift.text}; {trials}, and no other trial could win")
    if findings := environment_findings(evidence.session, evidence.verdict.standings, evidence.config):
        notes.append(f"environment: {environment_line(environment_document(findings, evidence.config))}")
    slow = evidence.winner.result.slow_nodes if evidence.winner.result is not None else ()
    if slow:
        notes.append(f"{', '.join(slow)} held the winner back, and there was no other node to measure it on: it may be faster")
    return notes
