"""The client of the service. It needs the standard library and httpx2 alone, so that it runs on any laptop."""

from autotune.client.client import Client
from autotune.client.draft_views import Choices, Draft, Estimate
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
from autotune.client.figure_views import Figure, StepParts
from autotune.client.job_views import Attempt, Event, Export, Job, JobSummary, LogPart, Overview, Progress, Trial
from autotune.client.plan_views import Plan, Plans, Predicted, Prediction, Refusal, Space, Validation
from autotune.client.point_views import Points
from autotune.client.service_views import AuditEntry, Delivery, NewWebhook, QuotaUse, Usage, Webhook
from autotune.client.submission_fields import SubmissionFields

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
