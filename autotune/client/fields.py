"""The fields of a submission, and a model as the service takes it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from autotune.errors import RequestError

Model = str | Path | Mapping[str, Any]
"""A preset's name, a `module:factory` that the server allows, the path of a Hugging Face config.json, or {config: …}."""
KnobValue = bool | int | float | str

_GIVE = "give a preset, the path of a Hugging Face config.json, or module:factory"


class SubmissionFields(TypedDict, total=False):
    """What a job may cost and how it searches. What is left out, or None, has the default of `autotune sweep`."""

    cluster: str | None
    """`local`, or a preset as NAME:NODES."""
    ranks: int | None
    """Ranks of a trial."""
    space: str | None
    """A preset's name."""
    pins: Mapping[str, KnobValue | Sequence[KnobValue]]
    """Knob -> the only value, or the values, that are tried."""
    command: Mapping[str, Any] | None
    """A training script that the service allows, in place of a model: `arguments`, `folder`, and what else there is to say."""
    simple: str | None
    """The framework whose export must say all that is searched without loss."""
    objective: str | None
    """throughput, memory or pareto."""
    strategy: str | None
    seed: int | None
    trials: int | None
    """Search trials that may start on a device."""
    max_seconds: float | None
    """Seconds of active time after which no search trial starts."""
    device_hours: float | None
    """Active hours times ranks after which no search trial starts."""
    run_device_hours: float | None
    """Device-hours of the run that is tuned for: the search ends when a trial costs more than it saves of them."""
    stop_margin: float | None
    """The search ends when it is 95 % sure that nothing untried is faster by more than this share."""
    trial_timeout: float | None
    """Seconds after which a trial is killed."""
    global_batch_size: int | None
    """Samples in an optimizer step, over all ranks."""
    sequence_length: int | None
    """Tokens in a sample."""
    training_steps: int | None
    """Optimizer steps of the run, over which schedules of the data are weighed."""
    document_lengths: Sequence[int] | None
    """Tokens of each document of a sample of the data, at most 1,000; none: every sample is whole."""
    lr: float | None
    """Learning rate of your run: trials train with it, and exported files state it. None: files state none."""
    weight_decay: float | None
    clip: float | None
    """Bound of the gradient norm; 0: no clipping."""
    optimizer: str | None
    memory_limit: int | str | None
    """Bytes a rank may allocate, or text with a unit such as "40GB"."""
    headroom: float | None
    """Share of the limit that the winner leaves free."""
    baseline: Mapping[str, KnobValue] | None
    """Knob -> value of your present configuration: becomes trial 0."""
    failures: Mapping[str, Mapping[str, Any]] | None
    """Rows of the failure table, by name: how a failure is told, and what becomes of its trial."""
    engine: str | None
    runner: str | None
    confirm_repeats: int | None
    """Rounds at most in which the finalists are measured again."""
    control_every: int | None
    """Search trials after which the baseline is measured again, to see whether the machine drifts; 0: never."""
    environment_settings: Sequence[str] | None
    """NAME=VALUE pairs that processes are started with in the last stage, on the best layout; at most 4, or `standard`."""
    allow_unstable: bool | None
    """Whether a trial whose measurement did not settle may win."""
    racing: bool | None
    """Whether a search trial ends as soon as it can no longer reach the best samples/s so far."""
    name: str | None
    """What the job is called."""
    tags: Sequence[str] | None
    """Words to find the job by."""
    note: str | None
    """What is to be known about the job."""
    priority: int
    """Higher ones go first; between -100 and 100."""


class AskedFields(TypedDict, total=False):
    """What is predicted for. What is left out, or None, has the default of `autotune predict`."""

    cluster: str | None
    """`local`, or a preset as NAME:NODES."""
    ranks: int | None
    global_batch_size: int | None
    """Samples in an optimizer step, over all ranks."""
    sequence_length: int | None
    """Tokens in a sample."""
    training_steps: int | None
    """Optimizer steps of the run, over which schedules of the data are weighed."""
    document_lengths: Sequence[int] | None
    """Tokens of each document of a sample of the data, at most 1,000; none: every sample is whole."""
    memory_limit: int | str | None
    """Bytes a rank may allocate, or text with a unit such as "40GB"."""
    engine: str | None
    lora_rank: int | None
    """Rank of low-rank adapters, all else being frozen."""
    lora_targets: Sequence[str] | None
    frozen_bits: int | None


class PlanFields(AskedFields, total=False):
    """What is planned, too. What is left out, or None, has the default of `autotune plan`."""

    space: str | None
    """A preset's name."""
    pins: Mapping[str, KnobValue | Sequence[KnobValue]]
    simple: str | None
    """The framework whose export must say every plan without loss."""
    objective: str | None
    """throughput, memory, cost or devices."""
    top: int | None
    """Plans that are given."""
    price: float | None
    """Of a device for an hour."""
    rate: float | None
    """Samples/s that a plan must reach."""
    share: float | None
    """Of the best rate, with the objective memory."""
    fit_probability: float | None
    max: str | None
    """sequence_length, micro_batch_size or model: plan for the largest that fits."""


def asked_body(model: Model, fields: Mapping[str, Any], known: type[AskedFields]) -> dict[str, Any]:
    """The body of a request to predict or plan: fields that are None left out, a model's file read.

    Raises:
        RequestError: the file cannot be read.
        TypeError: a field does not exist.
    """
    names = {**AskedFields.__annotations__, **known.__annotations__}
    for name in fields:
        if name not in names:
            raise TypeError(f"{name!r} is no field of this request; use some of {', '.join(names)}")
    return {"model": model_body(model), **{name: value for name, value in fields.items() if value is not None}}


def submission_body(model: Model | None, fields: SubmissionFields) -> dict[str, Any]:
    """The body of a request: fields that are None left out, a model's file read.

    Raises:
        RequestError: the file cannot be read.
        TypeError: a field does not exist.
    """
    for name in fields:
        if name not in SubmissionFields.__annotations__:
            raise TypeError(f"{name!r} is no field of a submission; use some of {', '.join(SubmissionFields.__annotations__)}")
    named = {} if model is None else {"model": model_body(model)}
    return {**named, **{name: value for name, value in fields.items() if value is not None}}


def model_body(model: Model) -> str | dict[str, Any]:
    """The model as the service takes it. A text is a path where it has a slash or ends in `.json`, and a name elsewhere.

    Raises:
        RequestError: the file cannot be read.
    """
    if isinstance(model, Mapping):
        return dict(model)
    if isinstance(model, str) and not (model.endswith(".json") or "/" in model or "\\" in model):
        return model
    file = Path(model).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("model", f"{file} cannot be read ({error.strerror})", _GIVE) from None
    except ValueError as error:
        raise RequestError("model", f"{file} is not JSON ({error})", _GIVE) from None
    if not isinstance(config, dict):
        raise RequestError("model", f"{file} holds no JSON object", _GIVE)
    return {"name": _name(config, file), "config": config}


def _name(config: Mapping[str, Any], file: Path) -> str:
    """`_name_or_path` where it was saved with one; else the folder (or the file, where it has a name of its own)."""
    stated = config.get("_name_or_path")
    if isinstance(stated, str) and stated.strip("/"):
        return stated.rstrip("/").rsplit("/", 1)[-1]
    return (file.resolve().parent.name if file.name == "config.json" else file.stem) or "uploaded"
