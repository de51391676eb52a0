"""A run that tuned itself, as a job: its settings are trials, and its answer is what the next run starts with."""

import contextlib
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from autotune.inside.memory import RunIdentity, RunRecord, VisitedSetting
from autotune.outcome.job_snapshot import read_snapshot
from autotune.outcome.verdict import Verdicts, answer_summary
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from autotune.tuning import open_job
from executor.measurement.timing import step_time, student_t_975
from search_spaces.knob import Value
from search_spaces.outcome import JobState, Outcome, Purpose, StopReason
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import KNOB_NAMES, SCRIPT, TrialConfig
from storage.leases import current_owner
from storage.records import JobFilter
from storage.store import open_store

TAG = "inside"
"""Tag of the jobs of runs that tuned themselves."""


def config_of(values: Mapping[str, Value], zero_stage: int = 0) -> TrialConfig:
    """The configuration with these values; knobs that no engine has are the script's."""
    known = {name: value for name, value in values.items() if name in KNOB_NAMES and _is_legal(name, value)}
    others = " ".join(f"{name}={value}" for name, value in values.items() if name not in known)
    return TrialConfig().replace({"zero_stage": zero_stage, **known, SCRIPT: others})


def _is_legal(name: str, value: Value) -> bool:
    return isinstance(value, type(getattr(TrialConfig(), name)))


def record_job(database: str, run: RunRecord) -> str:
    """Store the run as a job that has succeeded; return its id. The first setting is the baseline."""
    identity = run.run
    words, first = templated(["python", *identity.arguments]), run.visited[0].values["micro_batch_size"]
    request = request_from_fields({
        "engine": "command", "command": {"arguments": words}, "cluster": "local", "runner": "local",
        "ranks": identity.world_size, "global_batch_size": identity.global_batch_size, "trials": max(len(run.visited), 1),
        "name": identity.script, "tags": (TAG, f"{TAG}-{identity.key}"), "note": run.journal, "confirm_repeats": 0,
        "control_every": 0, **({} if "{micro_batch_size}" not in words else {"baseline": {"micro_batch_size": first}}),
    })  # fmt: skip
    session = resolve(request)
    with open_store(database) as store:
        job = open_job(store, session)
        lease = store.jobs.acquire(job.id, current_owner())
        store.jobs.set_prior(lease, {TAG: to_plain(run)})
        for setting in run.visited:
            trial = store.trials.add(lease, config_of(setting.values), Purpose.SEARCH)
            attempt = store.attempts.start(lease, trial.number)
            store.attempts.finish(lease, _result(attempt.token, setting, identity))
        snapshot = read_snapshot(store, job.id)
        verdict = Verdicts().of(snapshot, session.ranking, session.prior, session.baselines)
        store.jobs.set_answer(lease, None if verdict is None else answer_summary(verdict))
        message = run.journal.strip().rsplit("\n", 1)[-1]
        store.jobs.release(lease, JobState.SUCCEEDED, StopReason.CONVERGED, message)
    return job.id


def start_recording(database: str, run: RunRecord) -> subprocess.Popen[str]:
    """Start a process that stores the run as a job and prints its id: to load what that needs would hold the training up."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as record:
        json.dump(to_plain(run), record)
        record.seek(0)
        words = [sys.executable, "-m", "autotune.inside.job", database]
        return subprocess.Popen(words, stdin=record, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


_CARRIED = {
    "per_device_train_batch_size": "{micro_batch_size}",
    "gradient_accumulation_steps": "{gradient_accumulation_steps}",
    "gradient_checkpointing": "{gradient_checkpointing}",
}
"""Arguments of the Trainer -> the placeholder that carries the knob in a sweep, and in the command that the job exports."""


def templated(words: list[str]) -> list[str]:
    """The command with placeholders in place of the values of the Trainer's arguments."""
    made = [*words]
    for index, word in enumerate(words):
        name, equals, _ = word.removeprefix("--").partition("=")
        placeholder = _CARRIED.get(name.replace("-", "_")) if word.startswith("--") else None
        if placeholder and equals:
            made[index] = f"--{name}={placeholder}"
        elif placeholder and index + 1 < len(words) and not words[index + 1].startswith("--"):
            made[index + 1] = placeholder
    return made


def _result(token: str, setting: VisitedSetting, identity: RunIdentity) -> TrialResult:
    if not setting.step_seconds:
        return TrialResult(attempt=token, outcome=Outcome.INFEASIBLE, message="out of memory; its samples were trained again")
    timing = step_time(setting.step_seconds)
    error = timing.relative_error if math.isfinite(timing.relative_error) else 1.0
    half = student_t_975(max(timing.steps - 1, 1)) * error
    rate = identity.global_batch_size / timing.mean
    return TrialResult(
        attempt=token, outcome=Outcome.OK, message=f"{timing.steps} steps inside of the run",
        step_seconds=tuple(setting.step_seconds[-200:]), within_relative_error=error, warmup_steps=1,
        samples_per_second=Interval(mean=rate, low=max(rate * (1 - half), 0.0), high=rate * (1 + half)),
        environment={"command": shlex.join(["python", *identity.arguments])},
    )  # fmt: skip


def recorded_runs(database: str) -> list[RunRecord]:
    """The newest runs that tuned themselves, the newest last."""
    records = []
    with open_store(database) as store:
        for job in store.jobs.newest(100, having=JobFilter(tags=(TAG,))):
            with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):
                records.append(from_plain(RunRecord, (store.jobs.prior(job.id) or {})[TAG]))
    return records[::-1]


if __name__ == "__main__":
    sys.stdout.write(record_job(sys.argv[1], from_plain(RunRecord, json.load(sys.stdin))))
