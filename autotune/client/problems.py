"""From an answer that tells of an error (RFC 9457) to the error."""

from typing import Any

import httpx2

from autotune.client.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
)
from autotune.wire.problems import FieldProblem

MOST_TEXT = 1000
"""Characters of an answer that a message repeats."""
_KINDS: dict[int, type[ServiceError]] = {
    401: UnauthorizedError, 403: ForbiddenError, 404: NotFoundError, 409: ConflictError, 412: ConflictError,
    429: UnavailableError, 502: UnavailableError, 503: UnavailableError, 504: UnavailableError,
}  # fmt: skip


def error_of(answer: httpx2.Response, url: str, had_key: bool) -> ServiceError:
    """The error that the answer tells of, in one line."""
    status = answer.status_code
    document = _document(answer)
    kind = _KINDS.get(status) or (InvalidRequestError if 400 <= status < 500 else ServiceError)
    if document is None:
        reason = f"{status} {answer.reason_phrase}".strip()
        if kind is UnavailableError:
            return kind(f"url: {url} cannot serve now ({reason}); try again", status)
        return ServiceError(f"url: {url} answers {reason}, but not as an autotune service; check AUTOTUNE_URL or --url", status)
    if kind is UnauthorizedError:
        return kind(_unauthorized(url, had_key), status)
    problems = tuple(_problem(item) for item in document.get("errors", ()) if isinstance(item, dict))
    detail = "; ".join(map(str, problems)) or one_line(str(document.get("detail") or document.get("title")))
    return kind(detail, status, problems)


def one_line(text: str) -> str:
    """The text on one line, without what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))[:MOST_TEXT]


def quoted(text: str) -> str:
    """A text of the user's as a message may repeat it."""
    return one_line(text)[:100]


def _unauthorized(url: str, had_key: bool) -> str:
    make = "make one with `autotune keys create` where the service runs"
    if had_key:
        return f"api_key: {url} does not take it (unknown, revoked or expired); {make}"
    return f"api_key: {url} asks for an API key; set AUTOTUNE_API_KEY, or {make}"


def _document(answer: httpx2.Response) -> dict[str, Any] | None:
    if answer.headers.get("content-type", "").partition(";")[0] != "application/problem+json":
        return None
    try:
        document = answer.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _problem(item: dict[str, Any]) -> FieldProblem:
    field, message, remedy = (one_line(str(item.get(name, ""))) for name in ("field", "message", "remedy"))
    return FieldProblem(field=field, message=message, remedy=remedy)
