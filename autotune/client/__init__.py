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
from autotune.client.views import Attempt, Event, Export, Job, Refusal, Space, Trial, Validation

__all__ = [
    "Attempt",
    "Client",
    "ConflictError",
    "Event",
    "Export",
    "ForbiddenError",
    "InvalidRequestError",
    "Job",
    "NotFoundError",
    "Refusal",
    "ServiceError",
    "Space",
    "SubmissionFields",
    "Trial",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
    "Validation",
    "WaitTimeoutError",
]
