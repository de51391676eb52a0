"""A run that tuned itself, as a job: its settings are trials, and its answer is what the next run starts with."""

import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.inside.memory import Remembered, RunIdentity
from autotune.outcome.job_snapshot import read_snapshot
from autotune.outcome.verdict import Verdicts, answer_summary
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from autotune.tuning import open_job
from executor.measurement.timing import step_time, student_t_975
from search_spaces.knob import Value
from search_spaces.outcome import JobState, Outcome, Purpose, StopReason
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import KNOB_NAMES, SCRIPT, TrialConfig
from storage.leases import current_owner
from storage.records import JobFilter
from storage.store import open_store

TAG = "inside"
"""Tag of the jobs of runs that tuned themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitedSetting:
    """What a run knows of one of its settings."""

    values: Mapping[str, Value]
    step_seconds: Sequence[float]
    """Empty: it ran out of memory."""


def config_of(values: Mapping[str, Value], zero_stage: int = 0) -> TrialConfig:
    """The configuration with these values; knobs that no engine has are the script's."""
    known = {name: value for name, value in values.items() if name in KNOB_NAMES and _is_legal(name, value)}
    others = " ".join(f"{name}={value}" for name, value in values.items() if name not in known)
    return TrialConfig().replace({"zero_stage": zero_stage, **known, SCRIPT: others})


def _is_legal(name: str, value: Value) -> bool:
    return isinstance(value, type(getattr(TrialConfig(), name)))


def record(database: str, identity: RunIdentity, answer: Remembered, visited: Sequence[VisitedSetting], journal: str) -> str:
    """Store the run as a job that has succeeded; return its id. The first setting is the baseline."""
    configs = [config_of(setting.values) for setting in visited]
    request = request_from_fields({
        "engine": "command", "command": {"arguments": ["python", *sys.argv]},
        "cluster": "local", "runner": "local", "ranks": identity.world_size, "global_batch_size": identity.global_batch_size,
        "trials": max(len(visited), 1), "name": identity.script, "tags": (TAG, f"{TAG}-{identity.key}"), "note": journal,
        "confirm_repeats": 0, "control_every": 0,
    })  # fmt: skip
    session = resolve(request)
    with open_store(database) as store:
        job = open_job(store, session)
        lease = store.jobs.acquire(job.id, current_owner())
        store.jobs.set_prior(lease, {TAG: {name: getattr(answer, name) for name in Remembered.__slots__}})
        for setting, config in zip(visited, configs, strict=True):
            trial = store.trials.add(lease, config, Purpose.SEARCH)
            attempt = store.attempts.start(lease, trial.number)
            store.attempts.finish(lease, _result(attempt.token, setting, identity.global_batch_size))
        snapshot = read_snapshot(store, job.id)
        verdict = Verdicts().of(snapshot, session.ranking, session.prior, session.baselines)
        store.jobs.set_answer(lease, None if verdict is None else answer_summary(verdict))
        message = journal.strip().rsplit("\n", 1)[-1]
        store.jobs.release(lease, JobState.SUCCEEDED, StopReason.CONVERGED, message)
    return job.id


def _result(token: str, setting: VisitedSetting, global_batch_size: int) -> TrialResult:
    if not setting.step_seconds:
        return TrialResult(attempt=token, outcome=Outcome.INFEASIBLE, message="out of memory; its samples were trained again")
    timing = step_time(setting.step_seconds)
    error = timing.relative_error if math.isfinite(timing.relative_error) else 1.0
    half = student_t_975(max(timing.steps - 1, 1)) * error
    rate = global_batch_size / timing.mean
    return TrialResult(
        attempt=token, outcome=Outcome.OK, message=f"{timing.steps} steps inside of the run",
        step_seconds=tuple(setting.step_seconds[-200:]), within_relative_error=error, warmup_steps=1,
        samples_per_second=Interval(mean=rate, low=max(rate * (1 - half), 0.0), high=rate * (1 + half)),
        environment={"command": shlex.join(["python", *sys.argv]), "median_step_seconds": f"{statistics.median(setting.step_seconds):.6g}"},
    )  # fmt: skip


def recall(database: str, identity: RunIdentity) -> Remembered | None:
    """The answer of the newest run with the same identity; None: there is none."""
    with open_store(database) as store:
        for job in store.jobs.newest(1, having=JobFilter(tags=(f"{TAG}-{identity.key}",))):
            entry: Any = (store.jobs.prior(job.id) or {}).get(TAG)
            if isinstance(entry, Mapping) and set(Remembered.__slots__) <= entry.keys():
                return Remembered(**{name: entry[name] for name in Remembered.__slots__})
    return None
