"""The choices that a submission form offers."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from api.settings import Settings
from api.submission import HIDDEN, UNSHOWN, JobSubmission
from autotune.exports import EXPORTERS
from autotune.request.component_names import GAIN_PREDICTING, strategy_names
from autotune.request.engines import CAPABILITIES, why_unusable
from autotune.request.field import FORM, RequestField
from autotune.request.field_forms import parse_allowed
from autotune.request.request import PREDICTION_FIELDS, JobRequest, Objective, declared_fields, plain_type
from autotune.request.rows import request_to_row
from autotune.wire.choices import Choice, Choices, CommandChoice, FormField, FormOption
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.preset_files import preset_tables


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
        foreseeing=tuple(sorted(GAIN_PREDICTING)),
        optimizers=tuple(OPTIMIZERS),
        runners=tuple(settings.runners),
        exports=tuple(EXPORTERS),
        fields=_form_fields(settings),
        defaults=_defaults() | {"runner": settings.runners[0]},
        may_submit=may_submit,
    )


def _form_fields(settings: Settings) -> tuple[FormField, ...]:
    options = {"engine": tuple(FormOption(value=name, label=_labelled(name)) for name in CAPABILITIES)} | {
        name: tuple(FormOption(value=str(value), label=str(value)) for value in values)
        for name, values in {
            "objective": list(Objective), "strategy": strategy_names(), "optimizer": OPTIMIZERS, "runner": settings.runners,
        }.items()
    }  # fmt: skip
    found = [
        FormField(
            name=name, label=declared.label, section=declared.section, kind=_kind(name, kind, declared, options),
            measure=declared.measure, hint=declared.help_of(FORM), options=options.get(name, ()),
            foresees=name in PREDICTION_FIELDS,
        )
        for name, declared, kind, _ in declared_fields()
        if declared.label
    ]  # fmt: skip
    priority = FormField(
        name="priority", label="Priority", section="search", kind="number", measure="",
        hint="-100 to 100; higher ones go first.", options=(), foresees=False,
    )  # fmt: skip
    return (*found, priority)


def _kind(name: str, kind: Any, declared: RequestField, options: Mapping[str, tuple[FormOption, ...]]) -> str:
    """How a field is entered."""
    plain = plain_type(kind)
    own = {"memory_limit": "bytes", "environment_settings": "texts", "tags": "words", "goodput": "texts", "trackers": "words"}
    if name in options or name in own:
        return own.get(name, "choice")
    if plain is bool:
        return "switch"
    return "text" if plain is str else "percent" if declared.unit == "SHARE" else "number"


def _labelled(engine: str) -> str:
    missing = _missing(engine)
    return f"{engine} – {missing}" if missing else engine


@cache
def _models() -> tuple[Choice, ...]:
    models = [resolve_model(name) for name in preset_tables("models")]
    return tuple(Choice(name=one.name, note=f"{_short(one.parameter_count)} parameters") for one in models)


@cache
def _clusters() -> tuple[Choice, ...]:
    found = [Choice(name="local", note="this server's own devices")]
    for name in preset_tables("clusters"):
        node = resolve_cluster(name)
        linked = f", {node.link_domain_size} in a link domain" if node.nodes_per_link_domain > 1 else ""
        found.append(Choice(name=name, note=f"{node.devices_per_node} x {node.device.name} a node{linked}"))
    return tuple(found)


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


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"
