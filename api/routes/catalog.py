"""The catalog: models, clusters, spaces, engines, the choices of a submission form, and the content of a space."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from api.auth import Reader, SettingsOf
from api.computing import Computing
from api.settings import Settings
from api.submission import HIDDEN, UNSHOWN, JobSubmission, KnobName, KnobValue, checked, session_of_submission
from api.views import assumed_views
from autotune.frameworks.exporters import EXPORTERS
from autotune.prediction.planning.question import cluster_of
from autotune.question.assumption import assumed_document
from autotune.question.field import FORM, RequestField, declared_fields, plain_type
from autotune.request.component_names import PREDICTING, strategy_names
from autotune.request.engines import CAPABILITIES, why_unusable
from autotune.request.field_forms import parse_allowed
from autotune.request.job_fields import Objective
from autotune.request.request import PREDICTION_FIELDS, JobRequest
from autotune.request.rows import request_to_row
from autotune.wire.service import (
    Choice,
    Choices,
    ClusterChoice,
    CommandChoice,
    Descriptions,
    FormField,
    FormOption,
    ModelChoice,
    Names,
    Space,
    Validation,
)
from search_spaces.clusters.presets import cluster_preset_names, resolve_cluster
from search_spaces.knob_values import KNOBS, domain_text
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.named import model_names
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.preset_files import preset_tables
from search_spaces.quantities import count_text
from storage.records import Scope

router = APIRouter(prefix="/v1", tags=["catalog"])


class ConfigSubmission(JobSubmission):
    """A request, and a configuration to validate under it."""

    config: dict[KnobName, KnobValue] = Field(max_length=200)
    """Knob -> value; omitted knobs have the values of the space's base."""


@router.get("/models", operation_id="list_models")
async def list_models(_: Reader) -> Names:
    """Models by name."""
    return Names(items=model_names())


@router.get("/clusters", operation_id="list_clusters")
async def list_clusters(_: Reader) -> Names:
    """Clusters by name; NAME:NODES means several nodes of it."""
    return Names(items=("local", *cluster_preset_names()))


@router.get("/spaces", operation_id="list_spaces")
async def list_spaces(_: Reader) -> Names:
    """Search spaces by name."""
    return Names(items=tuple(preset_tables("spaces")))


@router.get("/engines", operation_id="list_engines")
async def list_engines(_: Reader) -> Descriptions:
    """The supported and refused knobs of each engine."""
    return Descriptions(items=tuple(capability.plain() for capability in CAPABILITIES.values()))


@router.get("/knobs", operation_id="list_knobs")
async def list_knobs(_: Reader) -> Descriptions:
    """Every knob."""
    knobs = KNOBS.values()
    return Descriptions(
        items=tuple(
            {"name": k.name, "unit": k.unit, "domain": domain_text(k), "default": k.default, "description": k.description}
            for k in knobs
        )
    )


@router.get("/choices", operation_id="list_choices")
def list_choices(settings: SettingsOf, principal: Reader) -> Choices:
    """All choices that a submission form offers, in one response."""
    return choices(settings, principal.may(Scope.SUBMIT))


@router.post("/spaces/count", operation_id="count_space")
async def count_space(body: JobSubmission, settings: SettingsOf, _: Reader, computing: Computing) -> Space:
    """Count the legal configurations of a request's space, and the points that each rule refuses. 422 if it takes too long."""
    return await computing.run(_counted, body, settings)


def _counted(body: JobSubmission, settings: Settings) -> Space:
    session = session_of_submission(body, settings, settings.count_steps)
    space, census = session.space, session.space.census()
    return Space(
        space=space.name,
        hash=space.hash,
        domains={name: tuple(values) for name, values in space.domains.items()},
        raw=census.raw,
        legal=census.legal,
        merged=census.merged,
        refused=dict(census.refused),
        assumed=assumed_views(assumed_document(session.request.resolved_assumed)),
    )


@router.post("/spaces/validate", operation_id="validate_config")
async def validate_config(body: ConfigSubmission, settings: SettingsOf, _: Reader, computing: Computing) -> Validation:
    """Validate one configuration: whether it is legal, else which rules refuse it, with remedies."""
    return await computing.run(_validated, body, settings)


def _validated(body: ConfigSubmission, settings: Settings) -> Validation:
    submission = JobSubmission(**body.model_dump(exclude={"config"}))
    space = session_of_submission(submission, settings, settings.submission_steps).space
    config = space.canonical(space.base.replace(checked("config", body.config)))
    refusals = space.check(config)
    return Validation(legal=not refusals, config=config.values(), refusals=tuple(refusals))


def choices(settings: Settings, may_submit: bool) -> Choices:
    """The available choices, for a client with or without the right to submit."""
    commands = [parse_allowed(text) for text in settings.commands] if may_submit else []
    return Choices(
        models=_models(),
        factories=tuple(settings.factories),
        commands=tuple(CommandChoice(folder=folder, arguments=tuple(words)) for folder, words in commands),
        clusters=_clusters(),
        spaces=tuple(
            Choice(name=name, note=str(table.get("description", ""))) for name, table in preset_tables("spaces").items()
        ),
        engines=tuple(Choice(name=name, note=_missing(name)) for name in CAPABILITIES),
        objectives=tuple(map(str, Objective)),
        strategies=tuple(strategy_names()),
        foreseeing=tuple(sorted(PREDICTING)),
        optimizers=tuple(OPTIMIZERS),
        runners=tuple(settings.runners),
        exports=tuple(EXPORTERS),
        fields=_form_fields(settings),
        defaults=_defaults() | {"runner": settings.runners[0]},
        may_submit=may_submit,
    )


def _form_fields(settings: Settings) -> tuple[FormField, ...]:
    labels = {name: " – ".join(filter(None, (name, _missing(name)))) for name in CAPABILITIES}
    options = {"engine": tuple(FormOption(value=name, label=label) for name, label in labels.items())} | {
        name: tuple(FormOption(value=str(value), label=str(value)) for value in values)
        for name, values in {
            "objective": list(Objective), "strategy": strategy_names(), "optimizer": OPTIMIZERS, "runner": settings.runners,
        }.items()
    }  # fmt: skip
    form_fields = [
        FormField(
            name=name, label=declared.label, section=declared.section, kind=_kind(name, kind, declared, options),
            measure=declared.measure, hint=declared.help_of(FORM), options=options.get(name, ()),
            foresees=name in PREDICTION_FIELDS, required_on=declared.required_on,
        )
        for name, declared, kind, _ in declared_fields(JobRequest)
        if declared.label
    ]  # fmt: skip
    priority = FormField(
        name="priority", label="Priority", section="search", kind="number", measure="",
        hint="-100 to 100; higher ones go first.", options=(), foresees=False, required_on="",
    )  # fmt: skip
    return (*form_fields, priority)


def _kind(name: str, kind: Any, declared: RequestField, options: Mapping[str, tuple[FormOption, ...]]) -> str:
    """How a field is entered."""
    plain = plain_type(kind)
    special_kinds = {
        "memory_limit": "bytes",
        "environment_settings": "texts",
        "tags": "words",
        "goodput": "texts",
        "trackers": "words",
    }
    if name in options or name in special_kinds:
        return special_kinds.get(name, "choice")
    if plain is bool:
        return "switch"
    return "text" if plain is str else "percent" if declared.unit == "SHARE" else "number"


@cache
def _models() -> tuple[ModelChoice, ...]:
    models = [(name, resolve_model(name)) for name in model_names()]
    return tuple(
        ModelChoice(name=name, note=f"{count_text(model.parameter_count)} parameters", sequence_length=model.sequence_length)
        for name, model in models
    )


@cache
def _clusters() -> tuple[ClusterChoice, ...]:
    local = cluster_of("local", None, None).device
    cluster_choices = [ClusterChoice(name="local", note="this server's own devices", device_kind=local.kind)]
    for name in cluster_preset_names():
        node = resolve_cluster(name)
        linked = f", {node.link_domain_size} in a link domain" if node.nodes_per_link_domain > 1 else ""
        note = f"{node.devices_per_node} x {node.device.name} a node{linked}"
        cluster_choices.append(ClusterChoice(name=name, note=note, device_kind=node.device.kind))
    return tuple(cluster_choices)


@cache
def _defaults() -> dict[str, Any]:
    # The defaults of the workload follow from the model and the cluster.
    row = request_to_row(JobRequest(model="-")) | {"global_batch_size": None, "sequence_length": None}
    fields = (
        name for name in JobSubmission.model_fields if name in row and name not in ("model", "command", *HIDDEN, *UNSHOWN)
    )
    return {name: row[name] for name in fields} | {"priority": 0}


def _missing(engine: str) -> str:
    refusal = why_unusable(engine)
    return "" if refusal is None else f"{refusal.message}; {refusal.remedy}"
