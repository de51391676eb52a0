"""The Python client of the service. It only needs the standard library and httpx2, so it runs on any laptop.

The values that it returns are declared in `autotune.wire`, which the service shares.
"""

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
from autotune.client.results import Export
from autotune.wire.choices import Choices, Space, Validation
from autotune.wire.events import Event, LogPart, Progress
from autotune.wire.figures import Figure, StepParts
from autotune.wire.jobs import Job, JobSummary, Overview
from autotune.wire.plans import Plan, Plans
from autotune.wire.predictions import Draft, Estimate, Predicted, Prediction
from autotune.wire.service import AuditEntry, QuotaUse, Usage
from autotune.wire.trials import Attempt, Points, Trial
from autotune.wire.webhooks import Delivery, NewWebhook, Webhook
from search_spaces.errors import Refusal

__all__ = [
    "Attempt",
    "AuditEntry",
    "Choices",
    "Client",
    "ConflictError",
    "Delivery",
    "Draft",
    "Estimate",
    "Event",
    "Export",
    "Figure",
    "ForbiddenError",
    "InvalidRequestError",
    "Job",
    "JobSummary",
    "LogPart",
    "NewWebhook",
    "NotFoundError",
    "Overview",
    "Plan",
    "Plans",
    "Points",
    "Predicted",
    "Prediction",
    "Progress",
    "QuotaUse",
    "Refusal",
    "ServiceError",
    "Space",
    "StepParts",
    "Trial",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
    "Usage",
    "Validation",
    "WaitTimeoutError",
    "Webhook",
]
