"""Completes the OpenAPI document: names of components, error responses of all operations, links."""

import dataclasses
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from api.problems import MEDIA_TYPE
from autotune.wire import figures, jobs, predictions, service, trials
from autotune.wire.predictions import AnsweredQuestion
from autotune.wire.service import FieldProblem, Problem

WIRE_MODELS: Mapping[str, type] = {
    name: kind
    for module in (figures, jobs, predictions, service, trials)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in (Problem, FieldProblem, AnsweredQuestion)
}  # fmt: skip
"""The classes of responses by name, but those of refusals, which leave fields out, and what several share."""
COMPONENTS = {
    "Answer": "AnswerView",
    "Attempt": "AttemptView",
    "AttemptProgress": "ProgressView",
    "AuditEntry": "AuditView",
    "Axis": "AxisView",
    "Band": "BandView",
    "Choice": "ChoiceView",
    "Choices": "ChoicesView",
    "Column": "ColumnView",
    "Delivery": "DeliveryView",
    "DeliveryTry": "TryView",
    "Descriptions": "PlainList",
    "Draft": "DraftView",
    "Estimate": "EstimateView",
    "Figure": "FigureView",
    "FormOption": "OptionView",
    "Gain": "GainView",
    "Interval": "IntervalView",
    "Job": "JobView",
    "JobEvent": "EventView",
    "LogPart": "LogView",
    "Mark": "MarkView",
    "Names": "NameList",
    "NewWebhook": "NewWebhookView",
    "Overview": "OverviewView",
    "Plan": "PlanView",
    "PlanGoodput": "GoodputView",
    "PlanMax": "MaxView",
    "PlanReason": "ReasonView",
    "PlanTie": "TieView",
    "Plans": "PlansView",
    "Points": "PointsView",
    "Predicted": "PredictedView",
    "Prediction": "PredictionView",
    "QuotaUse": "QuotaView",
    "Range": "RangeView",
    "RankMemory": "RankMemoryView",
    "Refusal": "RefusalView",
    "SchedulePoint": "SchedulePointView",
    "Space": "SpaceView",
    "Standing": "StandingView",
    "StepPart": "PartView",
    "StepParts": "PartsView",
    "Table": "TableView",
    "Trial": "TrialView",
    "Usage": "UsageView",
    "Validation": "ValidationView",
    "Verdict": "VerdictView",
    "Webhook": "WebhookView",
}
"""Class -> name of its component in the document, if they differ. Clients are generated from these names: never change one."""
REFUSALS: dict[int, str] = {
    400: "The body is not UTF-8, not JSON, nested too deep, or names a field twice.",
    401: "There is no valid API key.",
    403: "The key lacks the scope, or the request comes from another site's page, or through a proxy to a server without keys.",
    404: "It does not exist, or belongs to another owner.",
    408: "The body took too long to arrive.",
    409: "The job's state does not allow it, or a quota is exhausted; then `quota`, `used` and `limit` describe it.",
    410: "Events from there on were removed because they were old; `detail` says where to begin.",
    412: "The job has changed since.",
    413: "The body is too long.",
    415: "The body is not application/json.",
    421: "The Host is not a name of this server.",
    422: "A field is invalid; `errors` names it.",
    429: "Too many requests; `Retry-After` says when to ask again.",
    503: "The database is unavailable, or the server is busy; try again.",
}
TEXT = {"schema": {"type": "string"}}
HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"required": True, **TEXT}},
    429: {"Retry-After": {"required": True, "description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}},
}
ETAG = {"ETag": {"required": True, "description": "The job's version.", "schema": {"type": "string", "pattern": '^"[0-9-]+"$'}}}
LOCATED = ETAG | {"Location": {"required": True, "description": "Address of the job.", **TEXT}}


class DocumentedApp(FastAPI):
    """A FastAPI app whose OpenAPI document describes all error responses as problem documents."""

    asks_for_keys = True
    """Whether operations need a key as their routes state."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document. Building it takes 0.2 s, so a server does it before it listens."""
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            _rename_components(document)
            problem = TypeAdapter(Problem).json_schema(ref_template=f"{_SCHEMAS}{{model}}")
            schemas |= problem.pop("$defs") | {"Problem": problem}
            _with_keywords(document)
            _link_jobs(document)
            for item in document["paths"].values():
                for method, operation in item.items():
                    if not self.asks_for_keys:
                        operation.pop("security", None)
                    _add_refusals(method, operation)
        return super().openapi()


_SCHEMAS = "#/components/schemas/"


def _rename_components(document: dict[str, Any]) -> None:
    """Give components their names, and require every field of a response: the service sends all of them."""
    schemas = document["components"]["schemas"]
    for name in WIRE_MODELS.keys() & schemas.keys():
        schema = schemas.pop(name)
        for part in schema["properties"].values():
            part.pop("default", None)
        schema |= {"title": COMPONENTS.get(name, name), "required": list(schema["properties"])}
        schemas[schema["title"]] = schema
    _rename_references(document)


def _rename_references(schema: Any) -> None:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            name = reference.removeprefix(_SCHEMAS)
            schema["$ref"] = _SCHEMAS + COMPONENTS.get(name, name)
        for part in schema.values():
            _rename_references(part)
    elif isinstance(schema, list):
        for part in schema:
            _rename_references(part)


def _with_keywords(schema: Any) -> None:
    """Rename bounds to JSON Schema keywords: for a number with a before-validator, pydantic writes its own names."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            keywords = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
            for bound, keyword in keywords.items():
                if bound in schema:
                    schema[keyword] = schema.pop(bound)
        for part in schema.values():
            _with_keywords(part)
    elif isinstance(schema, list):
        for part in schema:
            _with_keywords(part)


def _link_jobs(document: dict[str, Any]) -> None:
    """Add links from each operation that returns jobs to the operations that take a job."""
    operations = [(path, operation) for path, item in document["paths"].items() for operation in item.values()]
    takes_job = [operation["operationId"] for path, operation in operations if path.startswith("/v1/jobs/{job_id}")]
    for _, operation in operations:
        for answer in operation["responses"].values():
            schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
            # Responses with jobs -> the JSON pointer of a job's id in them.
            if pointer := {f"{_SCHEMAS}JobView": "/id", f"{_SCHEMAS}JobPage": "/items/0/id"}.get(schema.get("$ref", "")):
                parameters = {"job_id": f"$response.body#{pointer}"}
                answer["links"] = {name: {"operationId": name, "parameters": parameters} for name in takes_job}


def _add_refusals(method: str, operation: dict[str, Any]) -> None:
    for parameter in operation.get("parameters", ()):
        # An optional parameter's null is only its Python default: a request cannot send it.
        schema = parameter["schema"]
        kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
        if len(kinds) == 1:
            parameter["schema"] = {name: value for name, value in schema.items() if name != "anyOf"} | kinds[0]
    answers = operation["responses"]
    parameters = operation.get("parameters", ())
    statuses = {403, 413, 421, 429, 503, *(int(status) for status in answers if int(status) in REFUSALS)}
    statuses |= {401} if operation.get("security") else set()
    statuses |= {404} if any(parameter["in"] == "path" for parameter in parameters) else set()
    statuses |= {422} if parameters or "requestBody" in operation else set()
    statuses |= {400, 408, 415} if method in ("post", "put", "patch") else set()
    for status in sorted(statuses):
        if status != HTTPStatus.UNPROCESSABLE_ENTITY and "content" in answers.get(str(status), {}):
            continue  # it has its own schema; only for 422 is FastAPI's schema wrong
        description = answers.get(str(status), {}).get("description")
        generic = description in (None, "Validation Error", HTTPStatus(status).phrase)
        answers[str(status)] = {
            "description": REFUSALS[status] if generic else description,
            "content": {MEDIA_TYPE: {"schema": {"$ref": f"{_SCHEMAS}Problem"}}},
        } | ({"headers": HEADERS[status]} if status in HEADERS else {})
