"""Who asks, and what they may do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from api.settings import Settings
from storage.errors import UnknownJobError
from storage.records import JobRecord, Scope
from storage.store import Store


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks."""

    owner: str
    scopes: frozenset[str]

    @property
    def sees_all(self) -> bool:
        """Whether other people's jobs are theirs to see."""
        return Scope.ADMIN in self.scopes

    def may(self, scope: Scope) -> bool:
        """Whether the scope is among theirs; an administrator has all."""
        return scope in self.scopes or self.sees_all


LOCAL = Principal("", frozenset(Scope))
"""Whoever asks over loopback where no keys are asked for."""
_bearer = HTTPBearer(auto_error=False, scheme_name="key", description="An API key, made with `autotune keys create`.")


def store_of(request: Request) -> Store:
    """The store of the app."""
    return cast(Store, request.app.state.store)


def settings_of(request: Request) -> Settings:
    """The settings of the app."""
    return cast(Settings, request.app.state.settings)


def _principal(request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Principal:
    if not settings_of(request).require_keys:
        return LOCAL
    key = store_of(request).authenticate(credentials.credentials) if credentials is not None else None
    if key is None:
        told = "Authorization: give `Bearer` and an API key that is valid; make one with `autotune keys create`"
        raise HTTPException(401, told, {"WWW-Authenticate": "Bearer"})
    request.app.state.known_keys.add(request.headers["authorization"])
    return Principal(key.owner, key.scopes)


def needs(scope: Scope) -> Callable[[Principal], Principal]:
    """A dependency that lets those pass whose key has the scope."""

    def check(principal: Annotated[Principal, Depends(_principal)]) -> Principal:
        if not principal.may(scope):
            raise HTTPException(403, f"Authorization: this key lacks the scope {scope}; use one that has it")
        return principal

    return check


Reader = Annotated[Principal, Depends(needs(Scope.READ))]
Submitter = Annotated[Principal, Depends(needs(Scope.SUBMIT))]
StoreOf = Annotated[Store, Depends(store_of)]
SettingsOf = Annotated[Settings, Depends(settings_of)]


def visible_job(store: Store, principal: Principal, job_id: str) -> JobRecord:
    """The job, if it is the asker's to see.

    Raises:
        UnknownJobError: it is not there, or not theirs, which must not tell apart.
    """
    job = store.exact_job(job_id)
    if job is None or not (principal.sees_all or job.submitter == principal.owner):
        raise UnknownJobError(f"job_id: there is no job {job_id!r}; list yours with GET /v1/jobs")
    return job
