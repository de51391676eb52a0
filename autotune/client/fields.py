"""The fields of a submission, and a model as the service takes it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from autotune.client.submission_fields import KnobValue, SubmissionFields
from autotune.errors import RequestError

Model = str | Path | Mapping[str, Any]
"""A preset's name, a `module:factory` that the server allows, the path of a Hugging Face config.json, or {config: …}."""

_GIVE = "give a preset, the path of a Hugging Face config.json, or module:factory"


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
    expert_loads: Sequence[Sequence[float]] | None
    """Relative numbers of tokens that choose each expert: a row for all layers with experts, or one for each; none: equal."""
    memory_limit: int | str | None
    """Bytes a rank may allocate, or text with a unit such as "40GB"."""
    engine: str | None
    lora_rank: int | None
    """Rank of low-rank adapters, all else being frozen."""
    lora_targets: Sequence[str] | None
    frozen_bits: int | None
    knowledge: Mapping[str, Any] | None
    """Measurements to learn from: their settings and measurements."""


class PlanFields(AskedFields, total=False):
    """What is planned, too. What is left out, or None, has the default of `autotune plan`."""

    space: str | None
    """A preset's name."""
    pins: Mapping[str, KnobValue | Sequence[KnobValue]]
    simple: str | None
    """The framework whose export must say every plan without loss."""
    objective: str | None
    """throughput, memory, cost, devices or goodput."""
    top: int | None
    """Plans that are given."""
    price: float | None
    """Of a device for an hour."""
    rate: float | None
    """Samples/s that a plan must reach."""
    share: float | None
    """Of the best rate, with the objective memory."""
    goodput: Mapping[str, KnobValue | Sequence[KnobValue]] | None
    """For the objective goodput: failures, tokens, spares, and the other inputs of `--goodput`."""
    fit_probability: float | None
    max: str | None
    """sequence_length, micro_batch_size or model: plan for the largest that fits."""


def asked_body(model: Model, fields: Mapping[str, Any], fields_class: type[AskedFields]) -> dict[str, Any]:
    """The body of a request to predict or plan: fields that are None left out, a model's file read.

    Raises:
        RequestError: the file cannot be read.
        TypeError: a field does not exist.
    """
    names = {**AskedFields.__annotations__, **fields_class.__annotations__}
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
    model_field = {} if model is None else {"model": model_body(model)}
    return {**model_field, **{name: value for name, value in fields.items() if value is not None}}


def is_path(model: str) -> bool:
    """Whether a text is the path of a model's file, and not a name: it has a slash or ends in `.json`."""
    return model.endswith(".json") or "/" in model or "\\" in model


def model_body(model: Model) -> str | dict[str, Any]:
    """The model as the service takes it; a path's file is read.

    Raises:
        RequestError: the file cannot be read.
    """
    if isinstance(model, Mapping):
        return dict(model)
    if isinstance(model, str) and not is_path(model):
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
    saved_name = config.get("_name_or_path")
    if isinstance(saved_name, str) and saved_name.strip("/"):
        return saved_name.rstrip("/").rsplit("/", 1)[-1]
    return (file.resolve().parent.name if file.name == "config.json" else file.stem) or "uploaded"
