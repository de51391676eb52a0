"""The best configuration as a document, made from a job's rows."""

import dataclasses
from typing import Any

from autotune.errors import NoBestError
from autotune.exports.best_config_file import SCHEMA_VERSION
from autotune.objective.ranking import rate
from autotune.outcome.environment_findings import environment_document, environment_findings
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.provenance import provenance
from autotune.outcome.spending import spent
from autotune.outcome.standings import with_whole_result
from autotune.outcome.verdict import Verdict, answer_document, decide
from autotune.request.rows import request_to_row
from autotune.session.placement import launch_of
from autotune.session.session import Session
from executor.engines.command.capability import COMMAND
from search_spaces.plain import to_plain
from search_spaces.trial import Interval, TrialResult
from storage.records import TrialRecord


def build_best_config(session: Session, snapshot: JobSnapshot) -> dict[str, Any]:
    """Return the document. It depends only on the rows, except for `provenance`, which also describes this machine.

    Raises:
        NoBestError: no configuration can win (yet).
    """
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    if verdict is None:
        problem = f"{snapshot.job.id} has no configuration that may win"
        raise NoBestError("job", problem, "raise the memory limit or the number of trials, and look at `autotune show`")
    verdict = dataclasses.replace(
        verdict,
        best=with_whole_result(snapshot, verdict.best),
        baseline=snapshot.whole(verdict.baseline) if verdict.baseline else None,
    )
    decision = answer_document(verdict)
    # Extrapolated values have their own key, which exists only if the request asks for them.
    beyond = {}
    if session.extrapolation is not None:
        config = verdict.best.config
        beyond = {"extrapolated": session.extrapolation.document(config, _rate(verdict, verdict.best))}
    tried = {}
    if session.request.resolved_environments:
        findings = environment_findings(session, verdict.standings, verdict.best.config)
        tried = {"environments": environment_document(findings, verdict.best.config)}
    front = [with_whole_result(snapshot, trial) for trial in verdict.standings.front()]
    return {
        "schema_version": SCHEMA_VERSION,
        "job": _job(session, snapshot, verdict),
        "model": {
            "name": session.model.name,
            "parameter_count": session.model.parameter_count,
            "spec": to_plain(session.model),
        },
        "cluster": to_plain(session.cluster),
        "engine": session.request.engine,
        "objective": _objective(session),
        "decision": decision,
        "best": _entry(verdict.best, verdict),
        "baseline": None if verdict.baseline is None else {**_entry(verdict.baseline, verdict), "gain": decision["gain"]},
        "alternatives": [_entry(trial, verdict) for trial in front],
        **beyond,
        **tried,
        "launch": launch_of(verdict.best.config, session),
        # A user's script is the target program, so its measurement is the verification.
        "verified": "target" if session.request.engine == COMMAND else "native-only",
        "provenance": provenance(session, snapshot, verdict),
    }


def _job(session: Session, snapshot: JobSnapshot, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": snapshot.job.id,
        "state": snapshot.job.state.value,
        "reason": snapshot.job.reason,
        "message": snapshot.job.message,
        "trials": snapshot.spent,
        "tie": verdict.tie,
        "spent": spent(session, snapshot, verdict),
        "runner_up": verdict.runner_up.config.values() if verdict.runner_up else None,
        "reference_losses": list(snapshot.job.reference_losses),
        # The measurements by others are in the job's prior, and are not this result's to pass on.
        "request": request_to_row(dataclasses.replace(session.request, knowledge=None)),
    }


def _objective(session: Session) -> dict[str, Any]:
    ranking = session.ranking
    return {
        "name": ranking.objective.value,
        "memory_limit": ranking.memory_limit_bytes,
        "headroom": ranking.headroom,
    }


def _rate(verdict: Verdict, trial: TrialRecord) -> Interval:
    rate = verdict.rate(trial)
    assert rate is not None  # only measured trials are written
    return rate


def _entry(trial: TrialRecord, verdict: Verdict) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "config": trial.config.values(),
        "measured": _measured(trial, verdict),
        "predicted": None,
    }


def _measured(trial: TrialRecord, verdict: Verdict) -> dict[str, Any]:
    result = trial.result or TrialResult(attempt="", outcome=trial.outcome)  # type: ignore[arg-type]
    standings, interval = verdict.standings, _rate(verdict, trial)
    snapshot, place = standings.snapshot, standings.places.get(trial.config_hash)
    confirmed = bool(snapshot.confirmed(trial.config))
    batch = snapshot.job.request["global_batch_size"]
    # The trial computed its FLOP/s from its own rate; the estimated rate may include other measurements.
    scale = interval.mean / rate(trial)
    return {
        "samples_per_second": to_plain(interval),
        "repeats": 1 if place is None else standings.repeats[place],
        "extrapolated": [] if confirmed else list(result.extrapolated),
        "step_seconds": batch / interval.mean,
        "peak_memory_bytes": [
            {"rank": rank.rank, "total": rank.peak_memory_bytes, "by_tag": dict(rank.memory_by_tag)} for rank in result.ranks
        ],
        "tflops_per_device": _scaled(result.tflops_per_device, scale),
        "mfu": _scaled(result.mfu, scale),
        "hfu": _scaled(result.hfu, scale),
        "flops_convention": result.flops_convention,
        **({} if result.checkpoint is None else {"checkpoint": to_plain(result.checkpoint)}),
    }


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
