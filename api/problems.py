"""Converts errors to problem documents (RFC 9457): problem, field, remedy."""

import logging
from collections.abc import Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from api.refusals import refusals
from autotune.errors import AutotuneError, JobNotResumableError, NoBestError, UnknownFormatError, UnstatedError
from autotune.wire.service import FieldProblem, Problem
from search_spaces.errors import IllegalConfigError, SearchSpaceError
from search_spaces.plain import to_plain
from storage.errors import (
    DamagedRowError,
    DatabaseUnavailableError,
    JobStateError,
    QuotaExceededError,
    SecretError,
    SubmissionConflictError,
    UnknownJobError,
    UnknownTrialError,
    UnknownWebhookError,
)

log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"


def install(app: FastAPI) -> None:
    """Answer every error of the app with a problem document."""

    @app.exception_handler(UnknownJobError)
    @app.exception_handler(UnknownTrialError)
    @app.exception_handler(UnknownWebhookError)
    @app.exception_handler(JobStateError)
    def misfit(_request: Request, error: Exception) -> JSONResponse:
        return problem(HTTPStatus.CONFLICT if isinstance(error, JobStateError) else HTTPStatus.NOT_FOUND, str(error))

    @app.exception_handler(AutotuneError)
    @app.exception_handler(SearchSpaceError)
    def refused_field(_request: Request, error: AutotuneError | SearchSpaceError) -> JSONResponse:
        statuses: dict[type, HTTPStatus] = {
            NoBestError: HTTPStatus.NOT_FOUND,
            UnknownFormatError: HTTPStatus.NOT_FOUND,
            JobNotResumableError: HTTPStatus.CONFLICT,
        }
        status = statuses.get(type(error), HTTPStatus.UNPROCESSABLE_ENTITY)
        remedies, text = {error.field: error.remedy}, error.problem
        if isinstance(error, UnstatedError):
            remedies = {name: f"give {meaning}" for name, meaning in error.meanings.items()}
        if isinstance(error, IllegalConfigError) and error.fields:
            remedies, text = dict.fromkeys(error.fields, error.remedy), f"{error.field}: {error.problem}"
        errors = [FieldProblem(field=name, message=text, remedy=remedy) for name, remedy in remedies.items()]
        return problem(status, str(error), errors)

    @app.exception_handler(QuotaExceededError)
    def used_up(_request: Request, error: QuotaExceededError) -> JSONResponse:
        wrong = f"{error.used:,.10g} of {error.most:,.10g} are used"
        errors = [FieldProblem(field=f"quota.{error.quota}", message=wrong, remedy=error.remedy)]
        # Not 429, after which clients retry automatically: an exhausted quota stays exhausted until the owner acts.
        return problem(HTTPStatus.CONFLICT, str(error), errors, quota=error)

    @app.exception_handler(SecretError)
    def no_secret(_request: Request, error: SecretError) -> JSONResponse:
        # The message contains a server path.
        log.error("%s", error)
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, "secrets cannot be encrypted here; ask the operator of the server")

    @app.exception_handler(SubmissionConflictError)
    def conflict(_request: Request, error: SubmissionConflictError) -> JSONResponse:
        wrong, _, remedy = str(error).partition("; ")
        errors = [FieldProblem(field="Idempotency-Key", message=wrong, remedy=remedy)]
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"Idempotency-Key: {error}", errors)

    @app.exception_handler(DamagedRowError)
    def damaged_row(_request: Request, error: DamagedRowError) -> JSONResponse:
        log.error("%s", error)
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    @app.exception_handler(DatabaseUnavailableError)
    def no_database(_request: Request, _error: DatabaseUnavailableError) -> JSONResponse:
        # The message contains paths and hosts of the server, which clients must not see.
        return problem(HTTPStatus.SERVICE_UNAVAILABLE, "the database cannot be used; try again, then ask the operator")

    @app.exception_handler(RequestValidationError)
    def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
        path = str(getattr(request.scope.get("route"), "path_format", request.scope["path"]))
        errors = refusals(error.errors(), app.openapi(), path, request.method.lower())
        detail = "; ".join(map(str, errors))
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, errors)

    @app.exception_handler(HTTPException)
    def refused(request: Request, error: HTTPException) -> JSONResponse:
        headers, detail = dict(error.headers or {}), str(error.detail)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(_methods(request))
            detail = f"method: {request.method} is not possible here; use {headers['Allow']}"
        elif detail == HTTPStatus.NOT_FOUND.phrase:
            detail = f"path: {request.scope['path']!r} is not an address of this service; see /openapi.json"
        return problem(HTTPStatus(error.status_code), detail, headers=headers)

    @app.exception_handler(Exception)
    def broken(_request: Request, _error: Exception) -> JSONResponse:
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed; its log has the reason")


def _methods(request: Request) -> list[str]:
    """All methods of the path; the router reports only those of one route."""
    routes, scope = request.app.routes, {**request.scope, "path_params": {}}

    def matches(method: str) -> bool:
        return any(route.matches(scope | {"method": method})[0] is Match.FULL for route in routes)

    possible = [method for method in ("DELETE", "GET", "PATCH", "POST", "PUT") if matches(method)]
    return sorted([*possible, "HEAD"]) if "GET" in possible else possible


def problem(
    status: HTTPStatus,
    detail: str,
    errors: Sequence[FieldProblem] = (),
    headers: dict[str, str] | None = None,
    quota: QuotaExceededError | None = None,
) -> JSONResponse:
    """Return a problem document. `errors` names each invalid field; `quota` is the exhausted quota, if that is the reason."""
    shown = tuple(
        FieldProblem(field=_cut(item.field), message=_cut(item.message), remedy=_cut(item.remedy or "")) for item in errors
    )
    document = Problem(
        type="about:blank", title=status.phrase, status=status, detail=_cut(detail), errors=shown or None,
        quota=None if quota is None else quota.quota,
        used=None if quota is None else quota.used,
        limit=None if quota is None else quota.most,
    )  # fmt: skip
    body = {name: value for name, value in to_plain(document).items() if value is not None}
    return JSONResponse(body, status, headers, MEDIA_TYPE)


def _cut(text: str) -> str:
    """The text, shortened, with characters escaped that UTF-8 cannot encode."""
    # Most characters of a message, which may contain text of the request.
    most_characters = 1000
    shown = text if len(text) <= most_characters else text[: most_characters - 1] + "…"
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")
