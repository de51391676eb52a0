"""Measurements as the tests of knowledge use them: jobs whose trials took what the equations say, give or take."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.knowledge.measurement import Measurement, TrialMeasurement, TrialSetting
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import shipped_rates
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import seconds_of
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import resolve
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.store import Store

CONFIGS = tuple(
    TrialConfig(zero_stage=stage, micro_batch_size=size, precision="bf16", tensor_parallel_size=tensor)
    for stage in (0, 1, 3) for size in (1, 2, 4) for tensor in (1, 2, 4)
)  # fmt: skip
REAL = dataclasses.replace(shipped_rates(), matrix_efficiency=0.6, link_efficiency=0.5, activation_scale=1.1)
"""What the machines of these tests are like, which differs from the shipped coefficients."""


def measured(source: str, count: int, *, seed: int = 0, noise: float = 0.03) -> list[Measurement]:
    """Trials of a source."""
    setting = TrialSetting(
        model=resolve_model("qwen2-0.5b"),
        cluster=resolve_cluster("dgx-a100:1"),
        engine="native",
        global_batch_size=32,
        sequence_length=1024,
    )
    draw = np.random.default_rng(seed)
    configs = [CONFIGS[place] for place in draw.permutation(len(CONFIGS))[:count]]
    cases = cases_of(setting.model, setting.cluster, setting.workload, configs, "native")
    seconds = seconds_of(cases, REAL) * np.exp(noise * draw.standard_normal(count))
    held = memory(cases, REAL).allocated * np.exp(noise / 3 * draw.standard_normal(count))
    return [
        Measurement(
            source=source,
            repeats=2,
            noise=noise,
            measured=TrialMeasurement(setting=setting, config=config, samples_per_second=32 / second, peak_memory_bytes=peak),
        )
        for config, second, peak in zip(configs, seconds.tolist(), held.tolist(), strict=True)
    ]


def run_job(store: Store, measurements: Sequence[Measurement], fields: dict[str, Any] | None = None, **result: Any) -> str:
    """A job of the database with these measurements; the last trial of all runs out of memory."""
    stated = {"model": "qwen2-0.5b", "cluster": "dgx-a100:1", "global_batch_size": 32, "sequence_length": 1024}
    session = resolve(request_from_fields(stated | (fields or {})))
    job = store.jobs.create(request_to_row(session.request)).id
    lease = store.jobs.acquire(job, current_owner())
    for place, each in enumerate(measurements):
        trial = each.measured
        assert isinstance(trial, TrialMeasurement)
        token = store.attempts.start(lease, store.trials.add(lease, trial.config, Purpose.SEARCH).number).token
        rate = trial.samples_per_second or 0.0
        ok = {
            "samples_per_second": Interval(mean=rate, low=rate / 1.02, high=rate * 1.02),
            "peak_memory_bytes": int(trial.peak_memory_bytes or 0),
        }
        figures: dict[str, Any] = (
            {"outcome": Outcome.OK} | ok if place + 1 < len(measurements) else {"outcome": Outcome.INFEASIBLE}
        )
        store.attempts.finish(lease, TrialResult(attempt=token, **figures, **result))
    store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "")
    return job
