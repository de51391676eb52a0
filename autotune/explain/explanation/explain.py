"""Builds the explanation of a job."""

from pathlib import Path
from typing import TYPE_CHECKING

from autotune.explain.explanation.counterfactual import Counterfactual
from autotune.explain.explanation.evidence import Evidence, gather
from autotune.explain.explanation.findings import SCHEMA_VERSION, Explanation, MoreMemory
from autotune.explain.explanation.knob_findings import knob_findings
from autotune.explain.explanation.limits import limits_of, upgrades_of
from autotune.explain.explanation.machine import machine_notes
from autotune.explain.explanation.memory_use import memory_use
from autotune.explain.explanation.more_memory import more_memory
from autotune.explain.explanation.neighbours import baseline_of
from autotune.explain.explanation.time_use import time_use, waiting_notes
from autotune.forecast.job_question import unknown_model
from autotune.objective.ranking import rate
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


def explain_evidence(evidence: Evidence) -> Explanation:
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


def _more_memory(evidence: Evidence, notes: list[str]) -> tuple[MoreMemory, ...]:
    if evidence.outlook is None:
        notes.append(f"{unknown_model(evidence.session.model)}: only measurements are reported")
        return ()
    try:
        return more_memory(evidence.outlook)
    except SpaceTooLargeError as error:
        notes.append(f"the gain from more memory is not reported: {error.problem}")
        return ()
