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
from autotune.request.request import request_to_row
from autotune.session.placement import launch_of
from autotune.session.session import Session
from executor.engines.command.capability import COMMAND
from search_spaces.plain import to_plain
from search_spaces.trial import Interval, TrialResult
from storage.records import TrialRecord


def build_best_config(session: Session, book: JobSnapshot) -> dict[str, Any]:
    """Return the document: the same for the same rows, but for what `provenance` says of the place.

    Raises:
        NoBestError: nothing may win (yet).
    """
    verdict = decide(book, session.ranking, session.prior, session.baselines)
    if verdict is None:
        problem = f"{book.job.id} has no configuration that may win"
        raise NoBestError("job", problem, "raise the memory limit or the number of trials, and look at `autotune show`")
    verdict = dataclasses.replace(
        verdict, best=with_whole_result(book, verdict.best), baseline=book.whole(verdict.baseline) if verdict.baseline else None
    )
    decision = answer_document(verdict)
    # What is not measured stands apart, and only where it was asked for.
    beyond = {}
    if session.extrapolation is not None:
        config = verdict.best.config
        beyond = {"extrapolated": session.extrapolation.document(config, _rate(verdict, verdict.best))}
    tried = {}
    if session.request.resolved_environments:
        findings = environment_findings(session, verdict.standings, verdict.best.config)
        tried = {"environments": environment_document(findings, verdict.best.config)}
    front = [with_whole_result(book, trial) for trial in verdict.standings.front()]
    return {
        "schema_version": SCHEMA_VERSION,
        "job": _job(session, book, verdict),
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
        # A script is itself the program that its answer is for.
        "verified": "target" if session.request.engine == COMMAND else "native-only",
        "provenance": provenance(session, book, verdict),
    }


def _job(session: Session, book: JobSnapshot, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": book.job.id,
        "state": book.job.state.value,
        "reason": book.job.reason,
        "message": book.job.message,
        "trials": book.spent,
        "tie": verdict.tie,
        "spent": spent(session, book, verdict),
        "runner_up": verdict.runner_up.config.values() if verdict.runner_up else None,
        "reference_losses": list(book.job.reference_losses),
        "request": request_to_row(session.request),
    }


def _objective(session: Session) -> dict[str, Any]:
    ranking = session.ranking
    return {
        "name": ranking.objective.value,
        "memory_limit": ranking.memory_limit_bytes,
        "memory_limit_bytes": ranking.memory_limit_bytes,  # its old name, for programs that read it
        "headroom": ranking.headroom,
    }


def _rate(verdict: Verdict, trial: TrialRecord) -> Interval:
    rate = verdict.rate(trial)
    assert rate is not None  # what is written was measured
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
    book, place = standings.book, standings.places.get(trial.config_hash)
    confirmed = bool(book.confirmed(trial.config))
    batch = book.job.request["global_batch_size"]
    # The trial counted its FLOPs at its own rate; the estimate may rest on others.
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
    }


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
