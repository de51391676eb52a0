"""Guided search as an Optuna sampler, for the user's own study."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import BaseTrial, FrozenTrial, TrialState

from autotune.errors import RequestError
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from autotune.session.session import Session
from autotune.strategies.optuna_samplers import Axes
from search_spaces.knob import Value
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

_OUTCOMES = {TrialState.COMPLETE: Outcome.OK, TrialState.PRUNED: Outcome.PRUNED, TrialState.FAIL: Outcome.FAILED}


class GuidedSampler(BaseSampler):
    """Proposes the knobs of a training configuration as `autotune sweep --strategy guided` does.

    The study maximizes samples/s, or minimizes seconds per step (or any quantity that falls as samples/s rise):

        sampler = GuidedSampler(model="llama-3-8b", cluster="dgx-h100:1", space="3d", global_batch_size=64)
        study = optuna.create_study(direction="maximize", sampler=sampler)

        def objective(trial):
            config = sampler.config(trial)          # {knob: value} to run
            if out_of_memory:
                trial.set_constraint("memory", 1.0)  # and return any value
            return samples_per_second

    A trial with a violated constraint ran out of memory; one that raised failed; a pruned one counts with its last
    intermediate value. Proposals depend only on the study's trials.
    """

    def __init__(self, model: str, *, cluster: str = "local", space: str = "zero", seed: int = 0, **fields: Any) -> None:
        """Resolve the search space.

        Args:
            model: a preset's name or the path of a Hugging Face config.json.
            cluster: as `--cluster`.
            space: as `--space`.
            seed: seed of the random draws after all promising configurations were tried.
            **fields: other fields of a request: ranks, global_batch_size, sequence_length, pins, engine, memory_limit…

        Raises:
            RequestError: a field is wrong.
            SearchSpaceError: a name or a pin cannot be resolved.
        """
        request = {"model": model, "cluster": cluster, "space": space, "seed": seed, **fields, "strategy": "guided"}
        self._session: Session = resolve(request_from_fields(request))
        self._axes = Axes(self._session.space)
        self._domains = {name: self._session.space.domains[name] for name in self._axes.sizes}
        self._independent = RandomSampler(seed=seed)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The distributions of the varying knobs, for `study.ask(sampler.distributions)`."""
        return {name: CategoricalDistribution(values) for name, values in self._domains.items()}

    def config(self, trial: BaseTrial) -> dict[str, Value]:
        """Return all knobs of the configuration for a trial; it suggests those that vary."""
        params = {name: trial.suggest_categorical(name, values) for name, values in self._domains.items()}
        return self._config(params).every_value()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        """Return the distributions of all varying knobs: they are sampled jointly."""
        return self.distributions

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Return the next configuration of guided search; empty if all were tried: then the knobs are drawn at random."""
        self._raise_error_if_multi_objective(study)
        other_trials = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        history = [
            self._record(study, other) for other in other_trials if other.state in _OUTCOMES and self._is_whole(other.params)
        ]
        pending = [
            self._config(other.params)
            for other in other_trials
            if other.state is TrialState.RUNNING and self._is_whole(other.params)
        ]
        proposed = self._session.strategy.propose(self._session.space, history, pending, 1, self._session.request.seed)
        if not proposed:
            return {}
        places = self._axes.places(proposed[0])
        return {name: self._domains[name][index] for name, index in places.items() if name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw a parameter that is not a knob at random."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def _config(self, params: Mapping[str, Any]) -> TrialConfig:
        space = self._session.space
        return space.admitted(space.base.replace({name: params[name] for name in self._domains}))

    def _is_whole(self, params: Mapping[str, Any]) -> bool:
        return params.keys() >= self._domains.keys()

    def _record(self, study: Study, trial: FrozenTrial) -> TrialRecord:
        config, result = self._config(trial.params), _result(study, trial)
        now = datetime.now(UTC)
        return TrialRecord(
            job_id="study", number=trial.number, config=config, config_hash=config.hash, purpose=Purpose.SEARCH,
            fidelity="full", repeat=0, counted=True, outcome=result.outcome, result=result, attempts=1,
            created=trial.datetime_start or now, started=trial.datetime_start, finished=trial.datetime_complete,
        )  # fmt: skip


def _result(study: Study, trial: FrozenTrial) -> TrialResult:
    violated = any(value > 0 for value in (trial.constraints or {}).values())
    outcome = Outcome.INFEASIBLE if violated else _OUTCOMES[trial.state]
    rate = _rate(study, trial)
    if outcome not in (Outcome.OK, Outcome.PRUNED) or rate is None:
        return TrialResult(attempt="", outcome=outcome if outcome is not Outcome.OK else Outcome.FAILED)
    return TrialResult(attempt="", outcome=outcome, samples_per_second=Interval(mean=rate, low=rate, high=rate))


def _rate(study: Study, trial: FrozenTrial) -> float | None:
    """The trial's value if it is maximized, its inverse if it is minimized; None: the trial has no finite value."""
    value = trial.value if trial.state is TrialState.COMPLETE else trial.intermediate_values.get(trial.last_step or 0)
    if value is None or not math.isfinite(value):
        return None
    if value <= 0:
        raise RequestError("objective", f"trial {trial.number} has the value {value}", "return samples/s, or seconds of a step")
    return 1.0 / value if study.direction is StudyDirection.MINIMIZE else value
