"""The best configuration as a document, made from a job's rows: result, provenance, environments, cost of the job."""

import dataclasses
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autotune import installed
from autotune.errors import NoBestError
from autotune.frameworks.best_config import SCHEMA_VERSION
from autotune.objective.ranking import peak_bytes, rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.standings import Standings, with_whole_result
from autotune.outcome.verdict import JobVerdict, answer_document, decide
from autotune.question.assumption import assumed_document
from autotune.request.job_fields import Objective
from autotune.request.rows import request_to_row
from autotune.session.placement import launch_of
from autotune.session.session import Session
from executor.engines.capabilities import COMMAND
from search_spaces.environment import ENVIRONMENT
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.quantities import ratio_text
from search_spaces.trial import Interval, TrialResult, reference_name
from search_spaces.trial_config import TrialConfig, stable_hash
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
        return f"{won} has {ratio_text(**winner['over_layout'])} the samples/s of its layout without it"
    count = f"{len(tried)} environment{'s' if len(tried) != 1 else ''}"
    if not measured:
        return f"none of {count} was measured in full: each was slower than the layout without it, or failed"
    best = max(measured, key=lambda finding: finding["over_layout"]["mean"])
    text = f"none of {count} is significantly faster than the layout without it"
    return f"{text}; the fastest, {best['environment']}, is {ratio_text(**best['over_layout'])} as fast"


def _finding(standings: Standings, trial: TrialRecord, plain: TrialRecord | None) -> EnvironmentFinding:
    assert trial.outcome is not None  # searched trials have ended
    comparable = plain is not None and trial.outcome is Outcome.OK and rate(trial) > 0
    over = standings.ratio(trial, plain) if plain is not None and comparable else None
    return EnvironmentFinding(environment=trial.config.environment, trial=trial.number, outcome=trial.outcome, over_layout=over)


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
    group = verdict.best.result.environment.get("process_group", "") if verdict.best.result else ""
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
        "launch": launch_of(verdict.best.config, session, starts_itself=group not in ("", "1")),
        # A user's script is the target program, so its measurement is the verification.
        "verified": "target" if session.request.engine == COMMAND else "native-only",
        "provenance": provenance(session, snapshot, verdict),
    }


def _job(session: Session, snapshot: JobSnapshot, verdict: JobVerdict) -> dict[str, Any]:
    return {
        "id": snapshot.job.id,
        "state": snapshot.job.state.value,
        "reason": snapshot.job.reason,
        "message": snapshot.job.message,
        "trials": snapshot.spent,
        "tie": verdict.tie,
        "spent": spent(session, snapshot, verdict),
        "assumed": assumed_document(session.request.resolved_assumed),
        "runner_up": verdict.runner_up.config.values() if verdict.runner_up else None,
        "reference_losses": list(snapshot.job.reference_losses.get(reference_name(session.model, verdict.best.config), ())),
        # The measurements by others are in the job's prior, and are not this result's to pass on.
        "request": request_to_row(dataclasses.replace(session.request, knowledge=None)),
    }


def _objective(session: Session) -> dict[str, Any]:
    ranking = session.ranking
    return {"name": ranking.objective.value, "memory_limit": ranking.memory_limit_bytes, "headroom": ranking.headroom}


def _rate(verdict: JobVerdict, trial: TrialRecord) -> Interval:
    rate = verdict.rate(trial)
    assert rate is not None  # only measured trials are written
    return rate


def _entry(trial: TrialRecord, verdict: JobVerdict) -> dict[str, Any]:
    return {"trial": trial.number, "config": trial.config.values(), "measured": _measured(trial, verdict), "predicted": None}


def _measured(trial: TrialRecord, verdict: JobVerdict) -> dict[str, Any]:
    result = trial.result or TrialResult(attempt="", outcome=trial.outcome)  # type: ignore[arg-type]
    standings, interval = verdict.standings, _rate(verdict, trial)
    snapshot, index = standings.snapshot, standings.places.get(trial.config_hash)
    confirmed = bool(snapshot.confirmed(trial.config))
    batch = snapshot.job.request["global_batch_size"]
    # The trial computed its FLOP/s from its own rate; the estimated rate may include other measurements.
    scale = interval.mean / rate(trial)
    return {
        "samples_per_second": to_plain(interval),
        "repeats": 1 if index is None else standings.repeats[index],
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


def provenance(session: Session, snapshot: JobSnapshot, verdict: JobVerdict) -> dict[str, Any]:
    """Return the data needed to interpret a result later. `environment` holds what the ranks themselves recorded."""
    result = verdict.best.result
    device = session.cluster.device
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "environment": dict(sorted(result.environment.items())) if result else {},
        "hardware": {"device": device.name, "kind": device.kind, "memory_bytes": device.memory_bytes},
        "topology": {
            "nodes": session.cluster.nodes,
            "devices_per_node": session.cluster.devices_per_node,
            "world_size": session.world_size,
            "hosts": sorted({rank.host for rank in result.ranks}) if result else [],
        },
        "seed": session.request.seed,
        "history_hash": history_hash(snapshot),
        "git_commit": git_commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def history_hash(snapshot: JobSnapshot) -> str:
    """Hash all trials (configurations, their order, their outcomes) to 16 hexadecimal digits."""
    rows = [
        [t.number, t.config_hash, t.purpose.value, t.repeat, t.outcome.value if t.outcome else None, rate(t), peak_bytes(t)]
        for t in snapshot.trials
    ]
    return stable_hash(rows)


def git_commit(folder: str = ".") -> str | None:
    """The commit of a folder; None if it is not a git repository or git is not installed."""
    words = ["git", "-C", folder, "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {"autotune": mine} if (mine := installed.version()) else {}
    for package in ("torch", "numpy", "optuna", "ray", "sqlalchemy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def spent(session: Session, snapshot: JobSnapshot, verdict: JobVerdict) -> dict[str, Any]:
    """Return the device-hours of the job, the length of a baseline run at which they break even, and what a run saves.

    A run of H device-hours with the baseline takes H / gain with the best, so it saves H (1 - 1 / gain).
    """
    hours = session.device_hours(snapshot.job.active_seconds)
    run = session.request.run_device_hours
    share: float | None = None  # of a baseline run that the best configuration saves
    if verdict.gain is not None and session.request.objective is not Objective.MEMORY and verdict.gain.mean > 1.0:
        share = 1 - 1 / verdict.gain.mean
    return {
        "device_hours": hours,
        "break_even_device_hours": hours / share if share else None,
        "run_device_hours": run,
        "saved_device_hours": None if run is None or share is None else run * share,
    }
