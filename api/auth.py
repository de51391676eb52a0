"""Who asks, and what they may do."""

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from starlette.exceptions import HTTPException

from api.settings import Settings
from storage.errors import UnknownJobError
from storage.records import ApiKey, JobRecord, Scope
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
# Dependencies are coroutines, although some wait for nothing: FastAPI gives each of the others a thread, at every request.


async def store_of(request: Request) -> Store:
    """The store of the app."""
    return cast(Store, request.app.state.store)


async def settings_of(request: Request) -> Settings:
    """The settings of the app."""
    return cast(Settings, request.app.state.settings)


class Needs(SecurityBase):
    """Lets those pass whose key has the scope. One dependency does it all: FastAPI solves each of them at every request."""

    def __init__(self, scope: Scope) -> None:
        self.model = HTTPBearer(description="An API key, made with `autotune keys create`.")
        self.scheme_name = "key"
        self._scope = scope

    async def __call__(self, request: Request) -> Principal:
        principal = await _principal(request)
        if not principal.may(self._scope):
            raise HTTPException(403, f"Authorization: this key lacks the scope {self._scope}; use one that has it")
        return principal


async def _principal(request: Request) -> Principal:
    state = request.app.state
    if not state.settings.require_keys:
        return LOCAL
    scheme, text = get_authorization_scheme_param(request.headers.get("Authorization"))
    key: ApiKey | None = await state.keys.key(text) if scheme.lower() == "bearer" and text else None
    if key is None:
        told = "Authorization: give `Bearer` and an API key that is valid; make one with `autotune keys create`"
        raise HTTPException(401, told, {"WWW-Authenticate": "Bearer"})
    request.app.state.known_keys.add(request.headers["authorization"])
    return Principal(key.owner, key.scopes)


Reader = Annotated[Principal, Depends(Needs(Scope.READ))]
Submitter = Annotated[Principal, Depends(Needs(Scope.SUBMIT))]
StoreOf = Annotated[Store, Depends(store_of)]
SettingsOf = Annotated[Settings, Depends(settings_of)]


def visible_job(store: Store, principal: Principal, job_id: str, field: str = "job_id") -> JobRecord:
    """The job, if it is the asker's to see.

    Raises:
        UnknownJobError: it is not there, or not theirs, which must not tell apart.
    """
    return if_visible(store.exact_jobs([job_id]).get(job_id), principal, job_id, field)


def if_visible(job: JobRecord | None, principal: Principal, job_id: str, field: str = "job_id") -> JobRecord:
    """What `visible_job` says of a job that was looked for."""
    if job is None or not (principal.sees_all or job.submitter == principal.owner):
        raise UnknownJobError(f"{field}: there is no job {job_id!r}; list yours with GET /v1/jobs")
    return job
