"""Guided search in a study of one's own."""

from typing import Any

import optuna
import pytest

import autotune
from autotune.errors import RequestError

SPACE: dict[str, Any] = {
    "model": "llama-tiny", "cluster": "dgx-a100:1", "space": "3d", "global_batch_size": 32, "sequence_length": 128,
}  # fmt: skip


def study_of(sampler: optuna.samplers.BaseSampler, direction: str = "maximize") -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(direction=direction, sampler=sampler)


def rate(config: dict[str, Any]) -> float:
    """Tensor parallelism is dear, larger micro-batches are better."""
    return 100.0 * (1 + 0.2 * config["micro_batch_size"]) / config["tensor_parallel_size"] / config["pipeline_parallel_size"]


@pytest.mark.prove
def test_it_proposes_legal_configurations_each_once() -> None:
    sampler = autotune.GuidedSampler(**SPACE)
    study, seen = study_of(sampler), []

    def objective(trial: optuna.Trial) -> float:
        seen.append(tuple(sampler.config(trial).items()))
        return rate(dict(seen[-1]))

    study.optimize(objective, n_trials=10)
    assert len(set(seen)) == 10
    assert study.best_value >= 0.9 * 100.0 * (1 + 0.2 * 4)


@pytest.mark.prove
def test_seconds_may_be_minimized_and_the_same_is_proposed() -> None:
    found = []
    for direction in ("maximize", "minimize"):
        sampler = autotune.GuidedSampler(**SPACE)
        study = study_of(sampler, direction)
        for _ in range(6):
            trial = study.ask(sampler.distributions)
            value = rate(sampler.config(trial))
            study.tell(trial, value if direction == "maximize" else 1 / value)
        found.append([trial.params for trial in study.trials])
    assert found[0] == found[1]


def test_failed_and_violated_trials_are_heard() -> None:
    sampler = autotune.GuidedSampler(**SPACE)
    study = study_of(sampler)
    first = study.ask(sampler.distributions)
    first.set_constraint("memory", 1.0)
    study.tell(first, 1.0)
    second = study.ask(sampler.distributions)
    study.tell(second, state=optuna.trial.TrialState.FAIL)
    third, fourth = study.ask(sampler.distributions), study.ask(sampler.distributions)
    params = [trial.params for trial in (first, second, third, fourth)]
    assert len({tuple(sorted(each.items())) for each in params}) == 4


def test_a_value_that_is_no_rate_is_told() -> None:
    sampler = autotune.GuidedSampler(**SPACE)
    study = study_of(sampler)
    study.tell(study.ask(sampler.distributions), -3.0)
    with pytest.raises(RequestError, match=r"trial 0 has the value -3\.0"):
        study.ask(sampler.distributions)


def test_wrong_fields_are_refused_at_once() -> None:
    with pytest.raises(RequestError, match="global_batch: is not a field"):
        autotune.GuidedSampler("llama-tiny", global_batch=3)
