"""Webhooks, and their deliveries."""

from dataclasses import dataclass, field
from datetime import datetime


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
class DeliveryTry:
    """One request to a receiver."""

    time: datetime
    seconds: float
    """Duration of the request."""
    status: int | None
    """Status code of the receiver. None: it did not answer."""
    error: str
    """Why the request failed. Empty: it did not fail."""


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
