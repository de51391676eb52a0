"""Exports a job as an Optuna study: its knobs are the parameters, samples/s is the value. Opens and closes Optuna storages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import RequestError
from search_spaces.knob import Value, ValueKind
from search_spaces.knob_values import KNOBS
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig
from storage.address import without_password
from storage.records import JobRecord, TrialRecord


def write_study(storage: str, name: str, job: JobRecord, trials: Sequence[TrialRecord]) -> str:
    """Write the job's trials that have an outcome, in order; return the study's name.

    Raises:
        RequestError: the storage cannot be used, or already has a study of that name.
    """
    with optuna_storage(storage, "storage") as opened:
        try:
            study = optuna.create_study(storage=opened, study_name=name, direction="maximize")
        except DuplicatedStudyError as error:
            raise RequestError(
                "name", f"{without_password(storage)} already has a study {name!r}", "give another --name"
            ) from error
        for key, value in _about(job).items():
            study.set_user_attr(key, value)
        ended = [trial for trial in trials if trial.outcome is not None]
        distributions = _distributions(job, [trial.config for trial in ended])
        study.add_trials([_frozen(trial, distributions) for trial in ended])
    return name


def _distributions(job: JobRecord, configs: Sequence[TrialConfig]) -> dict[str, BaseDistribution]:
    """Distributions of the searched knobs, if the request has them, and of all knobs that differ between trials."""
    domains: Mapping[str, Sequence[Value]] = job.request.get("resolved_domains") or {}
    distributions = {}
    for name in KNOBS:
        values = dict.fromkeys([*domains.get(name, ()), *(getattr(config, name) for config in configs)])
        if len(values) > 1:
            distributions[name] = _distribution(name, list(values))
    return distributions


def _distribution(name: str, values: list[Value]) -> BaseDistribution:
    kind, numbers = KNOBS[name].kind, [value for value in values if not isinstance(value, str)]
    if kind is ValueKind.INT:
        least, most = int(min(numbers)), int(max(numbers))
        return IntDistribution(least, most, log=least >= 1 and most > 8)
    if kind is ValueKind.FLOAT:
        return FloatDistribution(float(min(numbers)), float(max(numbers)))
    return CategoricalDistribution(sorted(values, key=str))


def _frozen(trial: TrialRecord, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    # Outcome -> Optuna state. All other outcomes become FAIL.
    states = {Outcome.OK: TrialState.COMPLETE, Outcome.PRUNED: TrialState.PRUNED}
    state = states.get(trial.outcome, TrialState.FAIL) if trial.outcome else TrialState.FAIL
    measured = trial.result.samples_per_second if trial.result else None
    if measured is None:
        state = TrialState.FAIL
    rate = measured.mean if measured is not None and state is not TrialState.FAIL else None
    frozen = create_trial(
        state=state,
        value=rate,
        params={name: getattr(trial.config, name) for name in distributions},
        distributions=distributions,
        user_attrs=_attributes(trial),
        # Optuna reads the last value of a pruned trial from here.
        intermediate_values={0: rate} if rate is not None and state is TrialState.PRUNED else {},
        # 1 for a configuration that can never run (out of memory, refused), else 0.
        constraints={"fits": 1.0 if trial.outcome in (Outcome.INFEASIBLE, Outcome.INVALID) else 0.0},
    )
    frozen.datetime_start = _naive(trial.started or trial.created)
    frozen.datetime_complete = _naive(trial.finished or trial.created)
    return frozen


def _attributes(trial: TrialRecord) -> dict[str, Any]:
    """User attributes for what Optuna has no field for."""
    result = trial.result
    attributes: dict[str, Any] = {
        "trial": trial.number,
        "purpose": trial.purpose.value,
        "repeat": trial.repeat,
        "outcome": trial.outcome.value if trial.outcome else "",
        "config_hash": trial.config_hash,
    }
    if trial.number == 0:
        attributes["baseline"] = True
    if result is None:
        return attributes
    if result.message:
        attributes["message"] = result.message
    if result.samples_per_second is not None:
        attributes |= {"low": result.samples_per_second.low, "high": result.samples_per_second.high}
    if result.peak_memory_bytes is not None:
        attributes["peak_memory_bytes"] = result.peak_memory_bytes
    return attributes


def _about(job: JobRecord) -> dict[str, Any]:
    request = job.request
    names = ("model", "cluster", "engine", "space", "strategy", "seed", "global_batch_size", "sequence_length", "ranks")
    attributes = {"job": job.id, "state": job.state.value, "value": "samples_per_second"}
    return {**attributes, **{name: request.get(name) for name in names}}


def _naive(time: datetime) -> datetime:
    """The local time without a zone, as Optuna stores it."""
    return time.astimezone().replace(tzinfo=None)


@contextmanager
def optuna_storage(url: str, field: str) -> Iterator[RDBStorage]:
    """Open the storage at the URL; errors name `field`.

    Raises:
        RequestError: the storage cannot be opened, read or written.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    try:
        storage = RDBStorage(url)
        yield storage
    except RequestError:
        raise
    except (SQLAlchemyError, ImportError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        problem = f"{without_password(url)} cannot be used ({reason})"
        raise RequestError(field, problem, "give a URL such as sqlite:///studies.db") from error
    finally:
        if storage is not None:
            storage.remove_session()
            storage.engine.dispose()
