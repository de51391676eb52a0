"""The service itself: what a submission can choose from, use of quotas, audit log, webhooks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from autotune.wire.predictions import AssumedValue
from search_spaces.errors import Refusal
from search_spaces.shared_records import AuditEntry, DeliveryTry


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A name with a note."""

    name: str
    note: str
    """What the name refers to, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice(Choice):
    """A model."""

    sequence_length: int
    """Most tokens per sample that it is made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice(Choice):
    """A cluster."""

    device_kind: str
    """cpu or cuda."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandChoice:
    """An allowed command: its required first words, and its folder."""

    folder: str
    """Working directory on the server."""
    arguments: tuple[str, ...]
    """The first words of the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOption:
    """One of the values of an entry."""

    value: str
    label: str
    """The text that the form shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """An entry of the form for a field of a submission."""

    name: str
    """Name of the field."""
    label: str
    """The text that the form shows."""
    section: str
    """The part of the form that contains it: workload, machine, goal, search or labels."""
    kind: str
    """number, percent, bytes, choice, switch, text, words (separated by spaces) or texts (separated by |)."""
    measure: str
    """Unit of the value. Empty: it has none."""
    hint: str
    """Help text."""
    options: tuple[FormOption, ...]
    """The values of a choice. Empty: the entry is not a choice."""
    foresees: bool
    """Whether the field only applies to strategies of `Choices.foreseeing`."""
    required_on: str
    """The kind of devices on which a submission must state it. Empty: it has a default on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values that a submission's fields may have on this server, and their defaults."""

    models: tuple[ModelChoice, ...]
    factories: tuple[str, ...]
    """`module:factory` models that the server allows."""
    commands: tuple[CommandChoice, ...]
    """Commands that the server allows. Empty if the key lacks the scope `submit`."""
    clusters: tuple[ClusterChoice, ...]
    spaces: tuple[Choice, ...]
    engines: tuple[Choice, ...]
    """If an engine cannot run on the server's machine, the note says what is missing."""
    objectives: tuple[str, ...]
    strategies: tuple[str, ...]
    foreseeing: tuple[str, ...]
    """Strategies that can stop when no improvement is expected. `stop_margin` and `run_device_hours` only apply to them."""
    optimizers: tuple[str, ...]
    runners: tuple[str, ...]
    exports: tuple[str, ...]
    """Formats of `GET /v1/jobs/{id}/export`."""
    fields: tuple[FormField, ...]
    """The entries of the form, in order."""
    defaults: Mapping[str, Any]
    """Field -> default. None: the field has no default."""
    may_submit: bool
    """Whether the key may submit jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The content of a search space."""

    space: str
    """Name of the space."""
    hash: str
    """Hash of its content."""
    domains: Mapping[str, tuple[Any, ...]]
    """Knob -> values."""
    raw: int
    """Number of points of the Cartesian product."""
    legal: int
    """Number of distinct legal configurations."""
    merged: int
    """Number of points that are equivalent to a legal configuration."""
    refused: Mapping[str, int]
    """Rule -> number of points that it refuses."""
    assumed: tuple[AssumedValue, ...] = ()
    """What nobody stated, without alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Whether a configuration is legal."""

    legal: bool
    config: Mapping[str, Any]
    """Knob -> value, in canonical form."""
    refusals: tuple[Refusal, ...]
    """The rules that refuse it. Empty: it is legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of presets or figures."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptions:
    """Descriptions as plain data."""

    items: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """The use of a quota."""

    quota: str
    """queued_jobs, stored_bytes, streams, device_hours (of the day) or webhooks."""
    used: float
    """In the unit of the quota."""
    limit: float | None
    """In the unit of the quota. None: there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker that gave a sign of life within a minute."""

    host: str
    pid: int
    started: datetime
    seen: datetime
    """Its last sign of life."""
    runners: tuple[str, ...]
    """The runners whose jobs it takes. Empty: all."""
    devices: tuple[str, ...]
    """The kinds of device, cpu or cuda, whose jobs it takes. Empty: all."""
    is_busy: bool
    """Whether it runs a job."""
    problem: str
    """Why its last start of ranks failed, in detail only for operators. Empty: it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerList:
    """The workers, oldest first."""

    items: tuple[Worker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resource use of a submitter's jobs."""

    submitter: str
    day: str
    """YYYY-MM-DD, in UTC."""
    device_seconds: float
    """Seconds for which workers held the jobs on that day, times the devices of each job."""
    running_jobs: int
    queued_jobs: int
    quotas: tuple[QuotaUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Entries of the audit log, newest first."""

    items: tuple[AuditEntry, ...]
    next: str | None
    """`cursor` of the next page. None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An address that the service calls when a job of its owner ends."""

    id: str
    owner: str
    url: str
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWebhook(Webhook):
    """A webhook with its secret, which the service shows only once."""

    secret: str = field(repr=False)
    """The key that signs deliveries, as specified by https://www.standardwebhooks.com."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookList:
    """Webhooks, oldest first."""

    items: tuple[Webhook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A notification of a webhook: sent, or still to be sent."""

    id: str
    """The `webhook-id` of every try."""
    job: str
    """Id of the job that ended."""
    created: datetime
    state: str
    """pending, delivered or given_up."""
    due: datetime | None
    """Time of the next try. None: there is none."""
    tries: tuple[DeliveryTry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryList:
    """Deliveries, newest first."""

    items: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One invalid field."""

    field: str
    """Name of the field; a part of it is `field.part`."""
    message: str
    """What is wrong."""
    remedy: str | None = None
    """What to do about it. None or empty: no remedy is known."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a request was refused (RFC 9457). Fields that are None are omitted."""

    type: str
    title: str
    """Name of the status code."""
    status: int
    """HTTP status code."""
    detail: str
    """What is wrong, in one line."""
    errors: tuple[FieldProblem, ...] | None = None
    """The invalid fields. None: no field is invalid."""
    quota: str | None = None
    """Name of the exhausted quota. None: no quota is the reason."""
    used: float | None = None
    """The used amount of the quota."""
    limit: float | None = None
    """The limit of the quota."""
