"""The client of the service. It needs the standard library and httpx2 alone, so that it runs on any laptop."""

from autotune.client.client import Client
from autotune.client.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
    WaitTimeoutError,
)
from autotune.client.fields import SubmissionFields
from autotune.client.views import (
    Attempt,
    Delivery,
    Event,
    Export,
    Job,
    NewWebhook,
    Refusal,
    Space,
    Trial,
    Usage,
    Validation,
    Webhook,
)

__all__ = [
    "Attempt",
    "Client",
    "ConflictError",
    "Delivery",
    "Event",
    "Export",
    "ForbiddenError",
    "InvalidRequestError",
    "Job",
    "NewWebhook",
    "NotFoundError",
    "Refusal",
    "ServiceError",
    "Space",
    "SubmissionFields",
    "Trial",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
    "Usage",
    "Validation",
    "WaitTimeoutError",
    "Webhook",
]
