"""Builds the explanation of a job, with notes about the machine, and compares two configurations by the equations."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.explain.evidence import ExplanationEvidence, gather
from autotune.explain.findings import SCHEMA_VERSION, Explanation, MoreMemory
from autotune.explain.knob_findings import baseline_of, knob_findings
from autotune.explain.limits import Counterfactual, limits_of, memory_use, more_memory, time_use, upgrades_of, waiting_notes
from autotune.forecast import unknown_model
from autotune.objective.ranking import rate
from autotune.outcome.best_config import environment_document, environment_findings, environment_line
from autotune.outcome.standings import drift_of
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.question import Question
from autotune.wire.figures import KnobDifference, KnobEffect
from search_spaces.errors import SpaceTooLargeError
from search_spaces.knob import Value
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

if TYPE_CHECKING:
    from storage.store import Store

SCHEMA_PATH = Path(__file__).parents[1] / "schemas" / "explanation.schema.json"


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
        calibration_source=evidence.question.calibration_source if evidence.question else "",
        assumed=tuple(
            replace(item, alternatives=(), text=item.text or item.words(item.value))
            for item in session.request.resolved_assumed
        ),
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


def knob_differences(
    space: SearchSpace, question: Question | None, config: TrialConfig, other: TrialConfig
) -> tuple[KnobEffect | None, tuple[KnobDifference, ...]]:
    """The predicted effect of all differences together, and the knobs in which `other` differs from `config`, those with the
    largest effect first.

    The effect of a knob depends on the other knobs. Therefore it is predicted twice: as the first knob to change,
    from `config`, and as the last, to `other`.

    Args:
        space: whose rules say which changes are possible.
        question: what predictions are made for. None: the equations do not know the model, and no effect is predicted.
        config: the configuration before the change.
        other: the configuration after it.
    """
    changed = other.differences(config)
    first = {name: _changed(space, config, name, value) for name, value in changed.items()}
    last = {name: _changed(space, other, name, getattr(config, name)) for name in changed}
    predictions: dict[TrialConfig, StepEstimate] = {}
    if question is not None:
        configs = [
            *dict.fromkeys(candidate for candidate in (config, other, *first.values(), *last.values()) if candidate is not None)
        ]
        predictions = dict(zip(configs, estimates(question, configs), strict=True))

    def effect(before: TrialConfig | None, after: TrialConfig | None) -> KnobEffect | None:
        if before not in predictions or after not in predictions:
            return None
        return KnobEffect(
            speed=predictions[before].step_seconds.mean / predictions[after].step_seconds.mean,
            peak_memory=predictions[after].peak_memory_bytes.mean / predictions[before].peak_memory_bytes.mean,
        )

    differences = [
        KnobDifference(
            knob=name,
            before=getattr(config, name),
            after=value,
            first=effect(config, first[name]),
            last=effect(last[name], other),
        )
        for name, value in changed.items()
    ]
    return effect(config, other), tuple(sorted(differences, key=_size, reverse=True))


def _changed(space: SearchSpace, config: TrialConfig, knob: str, value: Value) -> TrialConfig | None:
    """The configuration with only this knob changed. None: the rules refuse it, or other knobs have to change too."""
    changed = config.replace({knob: value})
    return changed if space.canonical(changed) == changed and not space.check(changed) else None


def _size(difference: KnobDifference) -> float:
    effects = (difference.first, difference.last)
    return max((abs(effect.speed - 1) for effect in effects if effect is not None), default=0.0)
