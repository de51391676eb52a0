"""The choices that a submission form offers."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from api.settings import Settings
from api.submission import HIDDEN, JobSubmission
from autotune.exports import EXPORTERS
from autotune.request.command_field import parse_allowed
from autotune.request.engines import CAPABILITIES, why_unusable
from autotune.request.field import FORM, RequestField
from autotune.request.request import PREDICTION_FIELDS, JobRequest, Objective, declared_fields, plain_type, request_to_row
from autotune.request.strategy_names import GAIN_PREDICTING, strategy_names
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.optimizers import OPTIMIZERS
from search_spaces.preset_files import preset_tables

Plain = dict[str, Any]


class ChoiceView(BaseModel):
    """A name with a note."""

    name: str
    note: str


class CommandChoice(BaseModel):
    """The required first words of a command, and its folder."""

    folder: str
    arguments: list[str]


class OptionView(BaseModel):
    """One of the values of an entry."""

    value: str
    label: str


class FormField(BaseModel):
    """An entry of the form for a field of a submission."""

    name: str
    label: str
    section: str
    """The part of the form that it stands in: workload, machine, goal, search or labels."""
    kind: str
    """number, percent, bytes, choice, switch, text, words (separated by spaces) or texts (separated by |)."""
    measure: str
    """Its unit; empty: none."""
    hint: str
    options: list[OptionView]
    """Of a choice."""
    foresees: bool
    """Whether it only goes with strategies of `foreseeing`."""


class ChoicesView(BaseModel):
    """The values that a submission's fields may have on this server, and their defaults."""

    models: list[ChoiceView]
    factories: list[str]
    """`module:factory` models that this server allows."""
    commands: list[CommandChoice]
    """Commands that this server allows; empty if the key lacks the scope `submit`."""
    clusters: list[ChoiceView]
    spaces: list[ChoiceView]
    engines: list[ChoiceView]
    """The note says what is missing if an engine cannot run on this machine."""
    objectives: list[str]
    strategies: list[str]
    foreseeing: list[str]
    """Strategies that can stop when no improvement is expected; `stop_margin` and `run_device_hours` apply to them."""
    optimizers: list[str]
    runners: list[str]
    exports: list[str]
    """Formats of `GET /v1/jobs/{id}/export`."""
    fields: list[FormField]
    """The entries of the form, in order."""
    defaults: Plain
    """Field -> default; null: no default value."""
    may_submit: bool


def choices(settings: Settings, may_submit: bool) -> ChoicesView:
    """The available choices, for a client with or without the right to submit."""
    commands = [parse_allowed(text) for text in settings.commands] if may_submit else []
    return ChoicesView(
        models=_models(),
        factories=list(settings.factories),
        commands=[CommandChoice(folder=folder, arguments=list(words)) for folder, words in commands],
        clusters=_clusters(),
        spaces=[
            ChoiceView(name=name, note=str(table.get("description", ""))) for name, table in preset_tables("spaces").items()
        ],
        engines=[ChoiceView(name=name, note=_missing(name)) for name in CAPABILITIES],
        objectives=list(Objective),
        strategies=list(strategy_names()),
        foreseeing=sorted(GAIN_PREDICTING),
        optimizers=list(OPTIMIZERS),
        runners=list(settings.runners),
        exports=list(EXPORTERS),
        fields=_form_fields(settings),
        defaults=_defaults() | {"runner": settings.runners[0]},
        may_submit=may_submit,
    )


def _form_fields(settings: Settings) -> list[FormField]:
    options = {"engine": [OptionView(value=name, label=_labelled(name)) for name in CAPABILITIES]} | {
        name: [OptionView(value=value, label=value) for value in values]
        for name, values in {
            "objective": list(Objective), "strategy": strategy_names(), "optimizer": OPTIMIZERS, "runner": settings.runners,
        }.items()
    }  # fmt: skip
    found = [
        FormField(
            name=name, label=declared.label, section=declared.section, kind=_kind(name, kind, declared, options),
            measure=declared.measure, hint=declared.help_of(FORM), options=options.get(name, []),
            foresees=name in PREDICTION_FIELDS,
        )
        for name, declared, kind, _ in declared_fields()
        if declared.label
    ]  # fmt: skip
    priority = FormField(
        name="priority", label="Priority", section="search", kind="number", measure="",
        hint="-100 to 100; higher ones go first.", options=[], foresees=False,
    )  # fmt: skip
    return [*found, priority]


def _kind(name: str, kind: Any, declared: RequestField, options: Mapping[str, list[OptionView]]) -> str:
    """How a field is entered."""
    plain, own = plain_type(kind), {"memory_limit": "bytes", "environment_settings": "texts", "tags": "words"}
    if name in options or name in own:
        return own.get(name, "choice")
    if plain is bool:
        return "switch"
    return "text" if plain is str else "percent" if declared.unit == "SHARE" else "number"


def _labelled(engine: str) -> str:
    missing = _missing(engine)
    return f"{engine} – {missing}" if missing else engine


@cache
def _models() -> list[ChoiceView]:
    models = [resolve_model(name) for name in preset_tables("models")]
    return [ChoiceView(name=one.name, note=f"{_short(one.parameter_count)} parameters") for one in models]


@cache
def _clusters() -> list[ChoiceView]:
    found = [ChoiceView(name="local", note="this server's own devices")]
    for name in preset_tables("clusters"):
        node = resolve_cluster(name)
        found.append(ChoiceView(name=name, note=f"{node.devices_per_node} x {node.device.name} a node"))
    return found


@cache
def _defaults() -> Plain:
    row = request_to_row(JobRequest(model="-"))
    fields = (name for name in JobSubmission.model_fields if name in row and name not in ("model", "command", *HIDDEN))
    return {name: row[name] for name in fields} | {"priority": 0}


def _missing(engine: str) -> str:
    refusal = why_unusable(engine)
    return "" if refusal is None else f"{refusal.message}; {refusal.remedy}"


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"
