"""Job submissions: the fields of a tuning request, except those that name paths or code on the server."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from api.computing import ThreadPool
from api.fields import Body, DocumentLengths, ExpertLoads, Integer, Length, RowName, Size, SubmittedCommand, SubmittedRow
from api.settings import Settings
from autotune.errors import RequestError
from autotune.goodput.terms import parse_terms, require_published
from autotune.question.field import SERVICE, RequestField, declared_fields, plain_type, service_fields
from autotune.request.checks import LONGEST, MOST_TAGS, TAG
from autotune.request.job_fields import FIELDS
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_fields, request_to_row
from autotune.session.resolve import require_workload, resolve
from autotune.session.resolved import Resolver
from autotune.session.session import Session
from search_spaces.clusters.cards import count_and_cards
from search_spaces.clusters.presets import cluster_preset_names, is_cluster_name, resolve_cluster, unknown_cluster
from search_spaces.environment import MOST_SETTINGS
from search_spaces.errors import SearchSpaceError
from search_spaces.knob import Value
from search_spaces.knob_values import check_value
from search_spaces.models.huggingface import is_factory_reference, known_model, model_spec_from_config
from search_spaces.models.model import ModelSpec
from search_spaces.models.named import model_names
from search_spaces.preset_files import preset_tables, unknown_name
from search_spaces.space import check_domain, parse_domain

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]*$")]
KnobValue = (
    bool
    | Annotated[int, Field(ge=-(2**53), le=2**53)]
    | Annotated[float, Field(allow_inf_nan=False, ge=-1e18, le=1e18)]
    | Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f]*$")]
)
KnobName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[a-z0-9_]+$")]
KnobValues = Annotated[
    dict[KnobName, KnobValue | Annotated[list[KnobValue], Field(min_length=1, max_length=100, fail_fast=True)]],
    Field(max_length=100),
]


JobName = Annotated[str, Field(max_length=LONGEST["name"], pattern=r"^[^\x00-\x1f]*$")]
JobNote = Annotated[str, Field(max_length=LONGEST["note"], pattern=r"^[^\x00-\x08\x0b-\x1f]*$")]
JobTag = Annotated[str, Field(pattern=f"^{TAG.pattern}$")]


def _of_two_fields(content: Any) -> Any:
    """Refuses a content of many fields at once: pydantic reports each."""
    if isinstance(content, dict) and len(content) > 2:
        raise RequestError("knowledge", f"has {len(content):,} fields", "give settings and measurements")
    return content


KnowledgeContent = Annotated[
    dict[Literal["settings", "measurements"], Annotated[list[dict[str, Any]], Field(fail_fast=True)]],
    Field(max_length=2),
    BeforeValidator(_of_two_fields),
]
"""Settings and measurements; what they hold is checked with the rest of the request."""
JobTags = Annotated[list[JobTag], Field(max_length=MOST_TAGS, fail_fast=True)]


class UploadedModel(BaseModel):
    """A Hugging Face config.json inside the request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # The pattern excludes paths and `module:factory`.
    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "uploaded"
    config: dict[str, Any]


def _declared_type(declared: RequestField, kind: Any) -> Any:
    """The type of a field with the bounds of its declaration."""
    plain = plain_type(kind)
    if plain is bool:
        return bool
    if plain is str:
        return Name
    limits = {"ge": declared.least, "le": declared.most, "gt": declared.above, "lt": declared.below}
    convert = int if plain is int else float
    bounds: Any = {name: convert(bound) for name, bound in limits.items() if bound is not None}
    return Annotated[Integer if plain is int else float, Field(**bounds)]


def declared_body(name: str, record: type, names: Collection[str], own_types: Mapping[str, Any]) -> Any:
    """The class of a body with these fields of a record. A field that is omitted or null has its default."""
    fields: dict[str, Any] = {
        field: (own_types.get(field, _declared_type(declared, kind)) | None, Field(None, description=declared.help_of(SERVICE)))
        for field, declared, kind, _ in declared_fields(record)
        if field in names
    }
    return create_model(name, __base__=Body, **fields)


OWN_TYPES: Mapping[str, Any] = {
    "document_lengths": DocumentLengths, "expert_loads": ExpertLoads, "memory_limit": Size, "sequence_length": Length,
    "name": JobName, "note": JobNote, "team": JobName, "tags": JobTags, "knowledge": KnowledgeContent,
    "goodput": Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=40, fail_fast=True)],
    "trackers": Annotated[list[Name], Field(max_length=10, fail_fast=True)],
    "environment_settings": Annotated[
        list[Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f]*$")]],
        Field(max_length=MOST_SETTINGS, fail_fast=True),
    ],
}  # fmt: skip
"""Types of fields that are not numbers, switches or names."""
# Without the fields that `JobSubmission` states itself: their types are bodies of their own.
_DeclaredFields: Any = declared_body(
    "_DeclaredFields",
    JobRequest,
    {*service_fields(JobRequest)} - {"model", "command", "pins", "baseline", "failures"},
    OWN_TYPES,
)


class JobSubmission(_DeclaredFields):  # type: ignore[misc]
    """What to tune, and its budget. Omitted fields have the defaults of `autotune sweep`."""

    model: Name | UploadedModel | None = None
    """A preset's name, a config.json, or a `module:factory` that the server allows. Omitted if there is a command."""
    command: SubmittedCommand | None = None
    """A training script that the server allows."""
    pins: KnobValues = Field({})
    baseline: Annotated[dict[KnobName, KnobValue], Field(max_length=100)] | None = None
    failures: Annotated[dict[RowName, SubmittedRow], Field(max_length=100)] | None = None
    """Rows of the failure table, by name."""
    priority: Annotated[Integer, Field(ge=-100, le=100)] = 0
    """Jobs with a higher priority run first."""


HIDDEN = ("data_path", "nvme_path", "checkpoint_path", "python_path", "fidelity", "ray_address")
"""Request fields that only the server sets: they name its paths and hosts, or the cost of its trials."""

UNSHOWN = ("knowledge",)
"""Fields that clients can set and that answers leave out, because they are large."""


def session_of_submission(body: JobSubmission, settings: Settings, most_steps: int) -> Session:
    """Resolve and check a submission, without access to files of the server and without imports.

    Args:
        body: the submission.
        settings: the settings of the server.
        most_steps: most steps for counting the session's space.

    Raises:
        RequestError, SearchSpaceError: one line that names the field and the remedy.
    """
    return resolve(*_request(body, settings), most_steps)


def session_of_job(body: JobSubmission, settings: Settings) -> Session:
    """As `session_of_submission`, of a job that is about to be opened.

    Raises:
        UnstatedError: a job on GPUs states no sequence length or global batch.
    """
    request, model = _request(body, settings)
    session = resolve(request, model, settings.submission_steps)
    require_workload(request, session)
    return session


@dataclass(frozen=True, slots=True)
class Resolved:
    """A resolved submission, in the form of a job's row."""

    row: Mapping[str, Any]
    devices: int
    body_hash: str
    """Empty: not requested."""


async def resolved_submission(
    body: JobSubmission, length: int, settings: Settings, resolver: Resolver, pool: ThreadPool, hashed: bool
) -> Resolved:
    """Resolve and check a submission. Raises what `session_of_submission` and `Pool.run` raise.

    The event loop does only short work: it looks up bodies of up to 4 KiB in the cache; all else runs in a thread.

    Args:
        body: the submission.
        length: its size in bytes.
        settings: the settings of the server.
        resolver: the cache of resolved requests.
        pool: threads for requests that are not cached.
        hashed: whether to compute `body_hash`.
    """
    # Most bytes of a body that is processed in the event loop, which takes a millisecond or two.
    if length <= 4_096 and body.failures is None and body.command is None:
        cached = resolver.known(*_request(body, settings))
        if cached is not None:
            return _row(body, cached, hashed)
    return await pool.run(_resolved, body, settings, resolver, hashed)


def _resolved(body: JobSubmission, settings: Settings, resolver: Resolver, hashed: bool) -> Resolved:
    request, model = _request(body, settings)
    return _row(body, resolver.resolved(request, model, settings.submission_steps), hashed)


def _row(body: JobSubmission, request: JobRequest, hashed: bool) -> Resolved:
    return Resolved(request_to_row(request), request.devices, body_hash(body) if hashed else "")


def _request(body: JobSubmission, settings: Settings) -> tuple[JobRequest, ModelSpec | None]:
    """The request, and the model if it was uploaded."""
    fields = body.model_dump(exclude_none=True, exclude={"priority", "model"})
    _require_names(fields, settings)
    with errors_about("goodput"):
        require_published(parse_terms(fields.get("goodput", ())))
    require_pins(body.pins)
    if body.baseline is not None:
        fields["baseline"] = checked("baseline", body.baseline)
    if body.command is not None:
        command = body.command
        fields["command"] = command.model_dump(exclude_none=True) | {"folder": command.folder.rstrip("/") or "/"}
        settings.allow_list.require_words(command.folder, command.arguments, command.environment_knobs)
    if body.model is None:
        return request_from_fields(fields), None
    fields["model"], uploaded = uploaded_or_named(body.model, settings)
    return request_from_fields(fields), uploaded


def uploaded_or_named(model: str | UploadedModel, settings: Settings) -> tuple[str, ModelSpec | None]:
    """The model's name, and the model if it was uploaded.

    Raises:
        RequestError, SearchSpaceError: the server does not know or allow the model, or cannot read it.
    """
    if not isinstance(model, UploadedModel):
        return _allowed_model(model, settings), None
    if model.name in preset_tables("models"):
        raise RequestError("model.name", f"{model.name!r} is the name of a preset", "choose another")
    with errors_about("model.config"):
        return model.name, model_spec_from_config(model.config, model.name)


@contextmanager
def errors_about(field: str) -> Iterator[None]:
    """Errors about a part of a field name the field too: `pins.zero_stage`."""
    try:
        yield
    except (RequestError, SearchSpaceError) as error:
        if error.field == field:
            raise
        raise RequestError(f"{field}.{error.field}", error.problem, error.remedy) from None


def checked(field: str, values: Mapping[str, KnobValue]) -> dict[str, Value]:
    """Check that each value is in its knob's domain.

    Raises:
        RequestError: there is no such knob, or its domain lacks the value; the message names the knob in the field.
    """
    with errors_about(field):
        return {name: check_value(name, value) for name, value in values.items()}


def require_pins(pins: Mapping[str, Any]) -> None:
    """As `checked`, of values, lists of values and texts of domains."""
    with errors_about("pins"):
        for name, pin in pins.items():
            parse_domain(name, pin) if isinstance(pin, str) else check_domain(name, pin if isinstance(pin, list) else [pin])


def shown_fields(request: dict[str, Any]) -> dict[str, Any]:
    """The fields of a stored request that a client can set."""
    return {name: request[name] for name in FIELDS if name in request and name not in (*HIDDEN, *UNSHOWN)}


def body_hash(body: JobSubmission) -> str:
    """A hash of the submission that does not depend on the formatting of its JSON."""
    return hashlib.sha256(json.dumps(body.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _allowed_model(name: str, settings: Settings) -> str:
    if is_factory_reference(name):
        settings.allow_list.require_factory(name)
        return name
    if known_model(name) is None:
        content = "give {config: …} with the content of the config.json"
        if re.match(r"[./~]", name) or name.endswith(".json"):
            raise RequestError("model", f"{name} is a path, and the service reads no files", content)
        raise _about("model", unknown_name("model preset", name, model_names(), f"or {content}", listed_by="GET /v1/models"))
    return name


def _require_names(fields: dict[str, Any], settings: Settings) -> None:
    require_preset_names(fields.get("cluster", "local"), fields.get("space", "zero"))
    if fields.get("runner", settings.runners[0]) not in settings.runners:
        raise RequestError("runner", f"{fields['runner']!r} is not known", f"use one of {', '.join(settings.runners)}")
    fields.setdefault("runner", settings.runners[0])


def require_preset_names(cluster: str, space: str) -> None:
    """Accept only names of presets and cards; the file system is not searched for other names.

    Raises:
        RequestError, SearchSpaceError: `cluster` or `space` is not such a name.
    """
    name = cluster.partition(":")[0]
    if cluster != "local":
        try:
            if name == "local" or not is_cluster_name(name):
                raise _unknown_cluster(cluster)
            resolve_cluster(cluster)
        except SearchSpaceError as error:
            raise _about("cluster", error) from None
    if space not in preset_tables("spaces"):
        raise _about("space", unknown_name("space", space, preset_tables("spaces")))


def _unknown_cluster(cluster: str) -> SearchSpaceError:
    """As of a command, whose remedies may also be a path."""
    error = unknown_cluster(cluster)
    if error.field != cluster.partition(":")[0] or count_and_cards(error.field) is not None:
        return error
    names, otherwise = ("local", *cluster_preset_names()), "or give NAME:NODES, COUNTxMEMORY or COUNTxDEVICE (8xh100)"
    return unknown_name("cluster preset", error.field, names, otherwise, listed_by="GET /v1/clusters")


def _about(field: str, error: SearchSpaceError) -> SearchSpaceError | RequestError:
    """The error about a value, as one about the field that holds it."""
    return error if error.field == field else RequestError(field, f"{error.field}: {error.problem}", error.remedy)
