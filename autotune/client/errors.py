"""Errors of the client.

ServiceError                            the service failed, or what answers is none
├── UnreachableError   (ConnectionError)  no answer came
├── UnavailableError   (ConnectionError)  the service is there, and cannot serve this now
├── UnauthorizedError  (PermissionError)  no API key was given, or one that is not valid
├── ForbiddenError     (PermissionError)  the key does not allow it
├── NotFoundError      (LookupError)      there is no such job, or it is not yours; or it has no best configuration yet
├── ConflictError      (ValueError)       it does not fit the state that the job is in, or the job has changed since
├── InvalidRequestError (ValueError)      a field of the request is refused
└── WaitTimeoutError   (TimeoutError)     the job did not end in time
"""

from autotune.wire.service import FieldProblem


class ServiceError(Exception):
    """Base of all errors of the client: one line that names what is wrong and the remedy, and never an API key."""

    def __init__(self, message: str, status: int | None = None, problems: tuple[FieldProblem, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; None: there was no answer."""
        self.problems = problems


class UnreachableError(ServiceError, ConnectionError):
    """No answer came: nobody listens there, or the connection broke and did not come back."""


class UnavailableError(ServiceError, ConnectionError):
    """The service is there and cannot serve this now: too many requests, its database is away, it restarts."""


class UnauthorizedError(ServiceError, PermissionError):
    """No API key was given, or one that is unknown, revoked or expired."""


class ForbiddenError(ServiceError, PermissionError):
    """The API key lacks the scope."""


class NotFoundError(ServiceError, LookupError):
    """There is no such thing, or it is not yours to see; or the job has no best configuration yet."""


class ConflictError(ServiceError, ValueError):
    """What was asked does not fit the state that the job is in, or the job has changed since it was read."""


class InvalidRequestError(ServiceError, ValueError):
    """A field of the request is refused: `problems` names each, with the remedy."""


class WaitTimeoutError(ServiceError, TimeoutError):
    """The job did not end within the time that was given."""
