"""The fields of a submission, a prediction and a plan by name, and a model as the service takes it."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.question.field import service_fields
from autotune.question.question import PlanningFields
from autotune.request.job_fields import JobFields

Model = str | Path | Mapping[str, Any]
"""A preset's name, a `module:factory` that the server allows, the path of a Hugging Face config.json, or {config: …}."""


KnobValue = bool | int | float | str
SUBMISSION = (*(name for name in service_fields(JobFields) if name != "model"), "priority")
"""Fields of a submission: those of a job that a service accepts, and its place in the queue."""
PLAN = tuple(name for name in service_fields(PlanningFields, "plan") if name != "model")
"""Fields of a plan."""
FIT = tuple(name for name in service_fields(PlanningFields, "fit") if name != "model")
"""Fields of a fit."""
PREDICTION = tuple(name for name in service_fields(PlanningFields, "predict") if name not in ("model", "pins"))
"""Fields of a prediction, whose knobs are its `config`."""


def body_of(model: Model | None, fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The body of a request: fields that are None left out, a model's file read.

    Raises:
        RequestError: the file cannot be read.
        TypeError: a field does not exist.
    """
    for name in fields:
        if name not in names:
            body = "a submission" if names is SUBMISSION else "this request"
            raise TypeError(f"{name!r} is no field of {body}; use some of {', '.join(names)}")
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
    give = "give a preset, the path of a Hugging Face config.json, or module:factory"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("model", f"{file} cannot be read ({error.strerror})", give) from None
    except ValueError as error:
        raise RequestError("model", f"{file} is not JSON ({error})", give) from None
    if not isinstance(config, dict):
        raise RequestError("model", f"{file} holds no JSON object", give)
    return {"name": _name(config, file), "config": config}


def _name(config: Mapping[str, Any], file: Path) -> str:
    """`_name_or_path` where it was saved with one; else the folder (or the file, where it has a name of its own)."""
    saved_name = config.get("_name_or_path")
    if isinstance(saved_name, str) and saved_name.strip("/"):
        return saved_name.rstrip("/").rsplit("/", 1)[-1]
    return (file.resolve().parent.name if file.name == "config.json" else file.stem) or "uploaded"
