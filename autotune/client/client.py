"""The client of a service: its connection, and the calls that are about no job."""

import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any

from autotune.client.events import LogCalls
from autotune.client.fields import FIT, PLAN, PREDICTION, SUBMISSION, KnobValue, Model, body_of
from autotune.client.jobs import JobCalls, WebhookCalls
from autotune.client.results import ResultCalls
from autotune.client.transport import HttpTransport
from autotune.wire.predictions import Draft, Estimate, Fits, Plans, Prediction
from autotune.wire.service import AuditPage, Choices, Descriptions, Names, Space, Usage, Validation, Worker, WorkerList
from search_spaces.shared_records import AuditEntry


class CatalogCalls:
    """Calls that are about no job."""

    _transport: HttpTransport

    def models(self) -> tuple[str, ...]:
        """Models by name."""
        return self._transport.get(Names, "/v1/models").items

    def clusters(self) -> tuple[str, ...]:
        """Clusters by name; several nodes of one are NAME:NODES."""
        return self._transport.get(Names, "/v1/clusters").items

    def spaces(self) -> tuple[str, ...]:
        """Search spaces by name."""
        return self._transport.get(Names, "/v1/spaces").items

    def engines(self) -> tuple[Mapping[str, Any], ...]:
        """What each engine honours and refuses."""
        return self._transport.get(Descriptions, "/v1/engines").items

    def knobs(self) -> tuple[Mapping[str, Any], ...]:
        """Every knob: name, unit, domain, default, description."""
        return self._transport.get(Descriptions, "/v1/knobs").items

    def workers(self) -> tuple[Worker, ...]:
        """The workers that gave a sign of life within a minute."""
        return self._transport.get(WorkerList, "/v1/workers").items

    def usage(self, submitter: str | None = None) -> Usage:
        """What the jobs of a submitter take today; None: yours. Others' are shown to operators."""
        return self._transport.get(Usage, "/v1/usage", None if submitter is None else {"submitter": submitter})

    def audit(self, since: datetime | None = None, actor: str | None = None, action: str | None = None) -> Iterator[AuditEntry]:
        """Who did what, newest first; for administrators. `since` has a zone."""
        filters = {"since": None if since is None else since.isoformat(), "actor": actor, "action": action}
        params = {name: text for name, text in filters.items() if text is not None}
        while True:
            page = self._transport.get(AuditPage, "/v1/audit", params)
            yield from page.items
            if page.next is None:
                return
            params["cursor"] = page.next

    def choices(self) -> Choices:
        """The values that a submission's fields may have on this service, in one answer."""
        return self._transport.get(Choices, "/v1/choices")

    def check(self, model: Model | None = None, **fields: Any) -> Draft:
        """Check a submission as `submit` does, and open no job.

        Raises:
            InvalidRequestError: a field is refused.
        """
        return self._transport.post(Draft, "/v1/drafts/check", body_of(model, fields, SUBMISSION))

    def estimate(self, model: Model | None = None, **fields: Any) -> Estimate:
        """What a submission's job may find and what its trials take, predicted; nothing is run.

        Raises:
            InvalidRequestError: a field is refused.
        """
        return self._transport.post(Estimate, "/v1/drafts/estimate", body_of(model, fields, SUBMISSION))

    def count_space(self, model: Model, **fields: Any) -> Space:
        """Count the legal configurations that a submission would search, and what each rule refuses.

        Raises:
            InvalidRequestError: a field is refused.
        """
        return self._transport.post(Space, "/v1/spaces/count", body_of(model, fields, SUBMISSION))

    def validate_config(self, model: Model, config: Mapping[str, KnobValue], **fields: Any) -> Validation:
        """Whether a configuration is legal under a submission, and which rule refuses it with which remedy.

        Args:
            model: as in `submit`.
            config: knob -> value; knobs that are left out have the space's own values.
            fields: as in `submit`.

        Raises:
            InvalidRequestError: a field is refused, or there is no such knob or value.
        """
        body = body_of(model, fields, SUBMISSION) | {"config": dict(config)}
        return self._transport.post(Validation, "/v1/spaces/validate", body)

    def predict(self, model: Model, config: Mapping[str, KnobValue] | None = None, **fields: Any) -> Prediction:
        """Step time and memory of one configuration, predicted; nothing is run.

        Args:
            model: as in `submit`, but no `module:factory`.
            config: knob -> value; knobs that are left out have the device's defaults.
            fields: `PlanningFields` that `autotune predict` takes; what is left out has its defaults.

        Raises:
            InvalidRequestError: a field is refused, or a rule refuses the configuration.
        """
        body = body_of(model, fields, PREDICTION) | {"config": dict(config or {})}
        return self._transport.post(Prediction, "/v1/predictions", body)

    def plan(self, model: Model, **fields: Any) -> Plans:
        """The configurations of a space that are predicted to be best, with the reason for each knob; nothing is run.

        Args:
            model: as in `predict`.
            fields: `PlanningFields` that `autotune plan` takes; what is left out has its defaults.

        Raises:
            InvalidRequestError: a field is refused, nothing fits, or the space is too large.
        """
        return self._transport.post(Plans, "/v1/plans", body_of(model, fields, PLAN))

    def fit(self, model: Model, program: str | None = None, dataset: str | None = None, **fields: Any) -> Fits:
        """Which ways of fine-tuning a model fit on some cards, with their batch, length, rate and hours; nothing is run.

        Args:
            model: as in `predict`.
            program: trl, trainer, axolotl, llamafactory, accelerate or deepspeed, for the fastest way's file; None: no file.
            dataset: the dataset in the file.
            fields: `PlanningFields` that `autotune fit` takes; what is left out has its defaults.

        Raises:
            InvalidRequestError: a field is refused, or no way is possible.
        """
        given = {name: value for name, value in {"program": program, "dataset": dataset}.items() if value is not None}
        return self._transport.post(Fits, "/v1/fits", body_of(model, fields, FIT) | given)


class Client(JobCalls, ResultCalls, LogCalls, CatalogCalls, WebhookCalls):
    """Speaks to a service (`autotune serve`). May be used from several threads, and as a context manager.

    Reading, and whatever may be sent twice, is sent again where the connection breaks, where the service restarts or has too
    much to do: five times within about two seconds, later where the service says so. Every error is a `ServiceError`, or a
    `RequestError` where nothing was sent: one line with the remedy.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, timeout: float = 30.0, outage_seconds: float = 60.0
    ) -> None:
        """Connects to nothing yet.

        Args:
            url: the service's address; None: AUTOTUNE_URL, else http://127.0.0.1:8000.
            api_key: None: AUTOTUNE_API_KEY, else none is sent. It is in no message and no log.
            timeout: seconds that one answer may take.
            outage_seconds: how long `events` and `wait` wait for a service that is away.

        Raises:
            RequestError: address or key cannot be ones.
        """
        key = os.environ.get("AUTOTUNE_API_KEY") if api_key is None else api_key
        address = os.environ.get("AUTOTUNE_URL") or "http://127.0.0.1:8000" if url is None else url
        self._transport = HttpTransport(address, key or None, timeout)
        self._outage_seconds = outage_seconds

    @property
    def url(self) -> str:
        """The service's address."""
        return self._transport.url

    def close(self) -> None:
        """Close every connection. May be called twice."""
        self._transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"
