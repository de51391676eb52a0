"""A job explained."""

from pathlib import Path

from autotune.explain.explanation.counterfactual import Counterfactual
from autotune.explain.explanation.evidence import Evidence, gather
from autotune.explain.explanation.findings import SCHEMA_VERSION, Explanation, MoreMemory
from autotune.explain.explanation.knob_findings import knob_findings
from autotune.explain.explanation.limits import limits_of, upgrades_of
from autotune.explain.explanation.machine import machine_notes
from autotune.explain.explanation.memory_use import memory_use
from autotune.explain.explanation.more_memory import more_memory
from autotune.explain.explanation.neighbours import baseline_of
from autotune.explain.explanation.time_use import time_use
from autotune.explain.explanation.waiting import waiting_notes
from autotune.objective.ranking import rate
from search_spaces.command import CommandModel
from search_spaces.errors import SpaceTooLargeError
from storage.store import Store

SCHEMA_PATH = Path(__file__).parents[2] / "schemas" / "explanation.schema.json"


def explain(store: Store, job_id: str) -> Explanation:
    """Return why the best configuration of a job is the best. Nothing is run, and nothing is written.

    1. Read the job's rows and decide who won, as a best-config.json does.
    2. Divide the measured step by the equations, with what the database knows of the cluster.
    3. Compare each knob's values: by trials that differ in it alone, else by predictions that the job's trials correct.
    4. Ask the equations what the step would be if the hardware were another.

    Raises:
        UnknownJobError: there is no such job.
        NoBestError: nothing won; the line says how its trials ended.
        JobNotResumableError, SearchSpaceError: the job's request cannot be read any more.
    """
    return explained(gather(store, job_id))


def explained(evidence: Evidence) -> Explanation:
    """The same of what was gathered already."""
    notes = [*waiting_notes(evidence), *machine_notes(evidence)]
    memory = _more_memory(evidence, notes)
    step = None if evidence.question is None else Counterfactual(evidence, evidence.question)
    job, session, verdict = evidence.book.job, evidence.session, evidence.verdict
    return Explanation(
        schema_version=SCHEMA_VERSION,
        job=job.id,
        state=job.state.value,
        model=session.model.name,
        cluster=session.cluster.name,
        world_size=session.world_size,
        objective=session.ranking.objective.value,
        strategy=session.request.strategy,
        trials=len(evidence.book.searched),
        measured=sum(rate(trial) > 0 for trial in evidence.book.searched),
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
        what = "a script" if isinstance(evidence.session.model, CommandModel) else "a factory"
        notes.append(f"the model is {what}, whose shape no equation knows: what was measured is told, nothing is predicted")
        return ()
    try:
        return more_memory(evidence.outlook)
    except SpaceTooLargeError as error:
        notes.append(f"what more memory would allow is not told: {error.problem}")
        return ()
