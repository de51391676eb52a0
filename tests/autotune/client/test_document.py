"""The client against the service's document: every operation has a method, and what is sent and read is what it says."""

import dataclasses
import json
import re
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qs, urlsplit

import jsonschema
import pytest
import served

from api.document import COMPONENTS, WIRE_MODELS
from autotune import Client
from autotune.client import Job
from autotune.client.fields import FIT, PLAN, PREDICTION, SUBMISSION
from autotune.client.transport import decode

DOCUMENT: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs" / "openapi.json").read_text())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
OPERATIONS = {
    operation["operationId"]: (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    if isinstance(operation, dict)
}
NEED_NO_METHOD = {"live", "ready", "metrics"}
"""Operations for those who run the service, not for those who use it."""

JOB = "20300131-120000-abcd"
FIELDS: dict[str, Any] = {
    "cluster": "local", "ranks": 2, "space": "zero", "simple": "deepspeed", "pins": {"zero_stage": [1, 2]},
    "objective": "memory", "goodput": [], "strategy": "tpe",
    "seed": 1, "trials": 3, "max_seconds": 9.5, "trial_timeout": 8.5, "global_batch_size": 8, "sequence_length": 64,
    "lr": 3e-4, "weight_decay": 0.05, "clip": 0.5, "optimizer": "sgd",
    "training_steps": 1000, "document_lengths": [64, 17, 8], "expert_loads": [[3.0, 1.0]],
    "memory_limit": 10**9, "headroom": 0.1, "baseline": {"zero_stage": 1}, "engine": "native", "runner": "local",
    "confirm_repeats": 2, "control_every": 5, "allow_unstable": True, "racing": False, "device_hours": 4.0,
    "loss_depends_on_batch": True,
    "run_device_hours": 100.0, "stop_margin": 0.02, "priority": 5,
    "environment_settings": ["MALLOC_ARENA_MAX=1", "OMP_WAIT_POLICY=passive"],
    "failures": {"killed": {"retries": 1}}, "name": "nightly", "tags": ["a100", "smoke"], "note": "after the upgrade",
    "team": "vision",
    "trackers": ["wandb"], "knowledge": {"settings": [{}], "measurements": [{}]},
    "command": {"arguments": ["python", "train.py", "{micro_batch_size}"], "folder": "/srv", "script_knobs": {"a": ["1"]}},
}  # fmt: skip
ASKED: dict[str, Any] = {
    "cluster": "dgx-h100:2", "ranks": 16, "global_batch_size": 64, "sequence_length": 2048, "memory_limit": 10**9,
    "training_steps": 1000, "document_lengths": [64, 17, 8], "expert_loads": [[3.0, 1.0]], "engine": "native",
    "simple": "megatron", "lora_rank": 8, "lora_targets": ["query"], "frozen_bits": 4,
    "knowledge": {"settings": [], "measurements": []},
}  # fmt: skip
PLANNED: dict[str, Any] = ASKED | {
    "space": "3d", "pins": {"zero_stage": [1, 2], "precision": "bf16"}, "objective": "memory", "top": 3, "price": 2.5,
    "rate": 10.0, "share": 0.5, "goodput": {"spares": [0, 2]}, "fit_probability": 0.9, "max": "sequence_length",
}  # fmt: skip
FITTED: dict[str, Any] = {name: value for name, value in ASKED.items() if name != "simple"} | {
    "pins": {"zero_stage": 2}, "fit_probability": 0.9, "max": "sequence_length", "price": 2.5, "methods": ["lora"],
    "libraries": ["loss=projection"], "run_tokens": 10**9, "epochs": 3.0, "dataset_rows": 5000,
}  # fmt: skip
MODEL = {"name": "mine", "config": {"model_type": "llama"}}
CALLS: dict[str, Callable[[Client], Any]] = {
    "submit_job": lambda client: client.submit(MODEL, idempotency_key="mine", **FIELDS),
    "list_jobs": lambda client: list(client.jobs(state=["RUNNING", "PAUSED"], submitter="anna", limit=5)),
    "list_overviews": lambda client: client.overviews([JOB]),
    "get_job": lambda client: client.job(JOB),
    "pause_job": lambda client: client.pause(JOB),
    "resume_job": lambda client: client.resume(JOB, trials=30),
    "stop_job": lambda client: client.stop(JOB),
    "cancel_job": lambda client: client.cancel(JOB),
    "clone_job": lambda client: client.clone(JOB),
    "create_link": lambda client: client.share(JOB, days=3),
    "list_links": lambda client: client.links(JOB),
    "withdraw_link": lambda client: client.withdraw_link(JOB, "0123456789ab"),
    "change_job": lambda client: client.extend(sample(Job), trials=5, max_seconds=7.5),
    "list_trials": lambda client: list(client.trials(JOB, first=3)),
    "list_attempts": lambda client: client.attempts(JOB, 2),
    "list_points": lambda client: client.points(JOB, since=4),
    "list_figures": lambda client: client.figures(JOB),
    "get_figure": lambda client: client.figure(JOB, "timeline"),
    "get_parts": lambda client: client.step_parts(JOB, 3),
    "get_differences": lambda client: client.differences(JOB, 3, 5),
    "list_leaderboard": lambda client: client.leaderboard(model="llama-tiny", cluster="local"),
    "get_explanation": lambda client: client.explanation(JOB),
    "get_report": lambda client: client.report(JOB, "md"),
    "get_best": lambda client: client.best(JOB),
    "export_best": lambda client: client.export(JOB, "deepspeed"),
    "list_events": lambda client: list(client.events(JOB, after=1, follow=False)),
    "stream_events": lambda client: list(client.events(JOB, after=2)),
    "list_progress": lambda client: client.progress(JOB),
    "list_logs": lambda client: list(client.logs(JOB, 2, attempt=1, rank=0, after=1)),
    "read_log": lambda client: client.log_text(JOB, 2, attempt=1, rank=0, tail=5),
    "stream_logs": lambda client: list(client.logs(JOB, 2, after=2, follow=True)),
    "list_models": lambda client: client.models(),
    "list_clusters": lambda client: client.clusters(),
    "list_spaces": lambda client: client.spaces(),
    "list_engines": lambda client: client.engines(),
    "list_knobs": lambda client: client.knobs(),
    "list_choices": lambda client: client.choices(),
    "check_job": lambda client: client.check(MODEL, **FIELDS),
    "estimate_job": lambda client: client.estimate(MODEL, **FIELDS),
    "count_space": lambda client: client.count_space(MODEL, **FIELDS),
    "predict": lambda client: client.predict(MODEL, {"zero_stage": 3}, **ASKED),
    "plan": lambda client: client.plan(MODEL, **PLANNED),
    "fit": lambda client: client.fit(MODEL, "trl", "my/data", **FITTED),
    "list_audit": lambda client: list(client.audit(actor="anna", action="job.submit")),
    "get_usage": lambda client: client.usage("anna"),
    "list_workers": lambda client: client.workers(),
    "create_webhook": lambda client: client.create_webhook("https://example.com/hook"),
    "list_webhooks": lambda client: client.webhooks(),
    "delete_webhook": lambda client: client.delete_webhook("0123456789ab"),
    "list_deliveries": lambda client: client.deliveries("0123456789ab", limit=5),
    "validate_config": lambda client: client.validate_config(MODEL, {"zero_stage": 3}, **FIELDS),
}
VIEWS: dict[type, str] = {kind: COMPONENTS.get(name, name) for name, kind in WIRE_MODELS.items()}
"""Class -> its component in the document."""


def test_every_operation_has_a_method() -> None:
    missing = OPERATIONS.keys() - CALLS.keys() - NEED_NO_METHOD
    assert not missing, f"the client has no method for {', '.join(sorted(missing))}; add one here and in autotune/client"
    assert (CALLS.keys() | NEED_NO_METHOD) <= OPERATIONS.keys(), "the document lacks what is listed here"


@pytest.mark.parametrize("operation_id", CALLS)
def test_what_is_sent_and_read_is_what_the_document_says(operation_id: str) -> None:
    seen: list[served.Request] = []

    def answer(request: served.Request) -> served.Answer:
        seen.append(request)
        return _answer(operation_id, len(seen))

    with served.answering(answer) as url, Client(url) as client:
        CALLS[operation_id](client)
    assert seen
    for request in seen:
        _check(operation_id, request)


@pytest.mark.parametrize("kind", VIEWS, ids=lambda kind: kind.__name__)
def test_the_values_are_those_of_the_document(kind: type) -> None:
    schema = SCHEMAS[VIEWS[kind]]
    hints = get_type_hints(kind)
    assert {field.name for field in dataclasses.fields(kind)} == schema["properties"].keys()
    stated = {name: _read(part) for name, part in schema["properties"].items()}
    assert {name: _of(hint) for name, hint in hints.items()} == stated
    assert set(schema["required"]) == set(hints), "a field that may be missing cannot be read"


def test_every_answer_has_a_value() -> None:
    answers = {
        content["schema"]["$ref"].rpartition("/")[2]
        for operation_id, (_, _, operation) in OPERATIONS.items()
        if operation_id not in NEED_NO_METHOD
        for status, response in operation["responses"].items()
        if status.startswith("2")
        for content in response.get("content", {}).values()
        if "$ref" in content.get("schema", {})
    }
    assert answers <= set(VIEWS.values())
    assert COMPONENTS.keys() <= WIRE_MODELS.keys(), "a component has the name of a class that is not there"


def properties(schema: str) -> set[str]:
    return {*SCHEMAS[schema]["properties"]}


def test_the_fields_of_a_submission_are_those_of_the_document() -> None:
    assert {"model", *SUBMISSION} == properties("JobSubmission")
    assert FIELDS.keys() == {*SUBMISSION}, "the call above leaves fields out"
    assert properties("ConfigSubmission") - properties("JobSubmission") == {"config"}


def test_the_fields_of_what_is_predicted_are_those_of_the_document() -> None:
    assert {"model", "config", *PREDICTION} == properties("PredictionRequest")
    known = {*PLAN}
    assert {"model", *known} == properties("PlanRequest")
    assert {"model", "program", "dataset", *FIT} == properties("FitRequest")
    asked = (ASKED.keys(), PLANNED.keys(), FITTED.keys())
    assert asked == ({*PREDICTION}, known, {*FIT}), "the calls above leave fields out"
    with Client("http://127.0.0.1:1") as client, pytest.raises(TypeError, match="'tops' is no field of this request; use"):
        client.plan("llama-tiny", tops=3)


def test_a_field_that_does_not_exist() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(TypeError, match="'trails' is no field of a submission; use"):
        client.submit("llama-tiny", trails=3)


def sample(kind: type[Any]) -> Any:
    """A value of the kind, from its schema."""
    return decode(kind, _sample({"$ref": f"#/components/schemas/{VIEWS[kind]}"}))


def _check(operation_id: str, request: served.Request) -> None:
    method, template, operation = OPERATIONS[operation_id]
    parts = urlsplit(request.path)
    assert request.method == method
    assert re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), parts.path)
    known = {(item["in"], item["name"].lower()): item for item in operation.get("parameters", ())}
    for name, values in parse_qs(parts.query).items():
        item = known.pop(("query", name))
        for value in values:
            _fits(value, item["schema"])
    ours = {name for kind, name in known if kind == "header"} & request.headers.keys()
    further = {"idempotency-key", "if-match", "if-none-match", "last-event-id"} & request.headers.keys()
    assert further == ours, "a header is sent that the document does not have"
    if "requestBody" in operation:
        _fits(json.loads(request.body), operation["requestBody"]["content"]["application/json"]["schema"])
    else:
        assert request.body == b""


def _fits(value: Any, schema: Mapping[str, Any]) -> None:
    """A text of a query stands for what it says, and for a list of one."""
    told = [value, [value], *([int(value)] if isinstance(value, str) and value.isdigit() else [])]
    validator = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
    assert any(validator.is_valid(item) for item in told), list(validator.iter_errors(value))


def _answer(operation_id: str, number: int) -> served.Answer:
    """An answer as the document has it: the first page names a second one, which is the last."""
    _, _, operation = OPERATIONS[operation_id]
    if operation_id in ("stream_events", "stream_logs"):
        kind = "EventView" if operation_id == "stream_events" else "LogView"
        event = _sample({"$ref": f"#/components/schemas/{kind}"}) | {"sequence": 3}
        stream = (200, served.STREAM, f"id: 3\nevent: x\ndata: {json.dumps(event)}\n\n".encode())
        return stream if number == 1 else (204, served.STREAM, b"")
    (status,) = [status for status in operation["responses"] if status.startswith("2")]
    if status == "204":
        return 204, served.JSON, b""
    ((_, content),) = operation["responses"][status]["content"].items()
    told = _sample(content["schema"]) if "schema" in content else {}
    if number > 1:
        told = {"items": [], "next": told["next"] if operation_id in ("list_events", "list_logs") else None}
    return int(status), served.JSON, json.dumps(told).encode()


def _sample(schema: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return _sample(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return _sample(schema["anyOf"][0])
    if "type" not in schema:
        return 4  # a value of any type
    if schema["type"] == "object":
        return {name: _sample(part) for name, part in schema.get("properties", {}).items()}
    if schema["type"] == "array":
        return [_sample(schema["items"])] if schema["items"] else []
    text = "2030-01-31T12:00:00Z" if schema.get("format") == "date-time" else JOB
    return {"string": text, "integer": 3, "boolean": True, "number": 1.5}[schema["type"]]


def _read(schema: Mapping[str, Any]) -> Any:
    """What a schema says, in the words of `_of`."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        first, null = schema["anyOf"]
        assert null == {"type": "null"}
        return ("or none", _read(first))
    match schema.get("type"):
        case "array":
            return ("list", _read(schema["items"]))
        case "object":
            further = schema["additionalProperties"]
            return ("mapping", "any" if further is True else _read(further))
        case "string":
            return "time" if schema.get("format") == "date-time" else "string"
        case None:
            return "any"
        case other:
            return other


def _of(hint: Any) -> Any:
    """What a field's type says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        assert arguments[1] is type(None)
        return ("or none", _of(arguments[0]))
    if origin is tuple:
        return ("list", _of(arguments[0]))
    if origin is Mapping:
        return ("mapping", _of(arguments[1]))
    words = {str: "string", int: "integer", bool: "boolean", float: "number", datetime: "time", Any: "any"}
    return words.get(hint) or VIEWS[hint]
