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
from autotune.wire.figures import Figure, StepParts
from autotune.wire.jobs import Job, JobSummary, Overview
from autotune.wire.predictions import Draft, Estimate, Fits, Plan, Plans, Predicted, Prediction
from autotune.wire.service import Choices, Delivery, NewWebhook, QuotaUse, Space, Usage, Validation, Webhook
from autotune.wire.trials import Attempt, Points, Trial
from search_spaces.errors import Refusal
from search_spaces.shared_records import AttemptProgress, AuditEntry, JobEvent, LogPart

__all__ = [
    "Attempt",
    "AttemptProgress",
    "AuditEntry",
    "Choices",
    "Client",
    "ConflictError",
    "Delivery",
    "Draft",
    "Estimate",
    "Export",
    "Figure",
    "Fits",
    "ForbiddenError",
    "InvalidRequestError",
    "Job",
    "JobEvent",
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
