"""Who asks, and what they may do.

Each route names the role that it needs by the type of its principal: Reader, Submitter, Steerer, Operator, Administrator. What
names none is open to everybody. docs/security.md has the table of them all, which a test compares with the routes.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from starlette.exceptions import HTTPException

from api.keys import KeyReader
from api.settings import Settings
from storage.errors import UnknownJobError
from storage.records import ApiKey, JobRecord, Scope
from storage.service_records import Actor, Quotas
from storage.store import Store


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks."""

    owner: str
    scopes: frozenset[str]
    actor: Actor = field(compare=False)
    """Who it is to the audit log and the quotas."""

    @property
    def sees_all(self) -> bool:
        """Whether other people's jobs are theirs to see and steer."""
        return self.may(Scope.OPERATE)

    def may(self, scope: Scope) -> bool:
        """Whether the scope is among theirs, or in one that is: an administrator has all, an operator reads."""
        return scope in self.scopes or Scope.ADMIN in self.scopes or (scope is Scope.READ and Scope.OPERATE in self.scopes)


# Dependencies are coroutines, although some wait for nothing: FastAPI gives each of the others a thread, at every request.


async def store_of(request: Request) -> Store:
    """The store of the app."""
    return cast(Store, request.app.state.store)


async def settings_of(request: Request) -> Settings:
    """The settings of the app."""
    return cast(Settings, request.app.state.settings)


class Needs(SecurityBase):
    """Lets those pass whose key has the scope. One dependency does it all: FastAPI solves each of them at every request."""

    def __init__(self, *scopes: Scope) -> None:
        """
        Args:
            scopes: any of which is enough.
        """
        self.model = HTTPBearer(description="An API key, made with `autotune keys create`.")
        self.scheme_name = "key"
        self.scopes = scopes

    async def __call__(self, request: Request) -> Principal:
        principal = await _principal(request)
        if not any(map(principal.may, self.scopes)):
            raise HTTPException(403, f"Authorization: this key lacks the scope {' or '.join(self.scopes)}; use one that has it")
        return principal


async def _principal(request: Request) -> Principal:
    state = request.app.state
    source = "" if request.client is None else request.client.host
    limits: Quotas = state.settings.quotas
    if not state.settings.require_keys:
        return Principal("", frozenset(Scope), Actor(name="", source=source, limits=limits))
    scheme, text = get_authorization_scheme_param(request.headers.get("Authorization"))
    key: ApiKey | None = await state.keys.key(text) if scheme.lower() == "bearer" and text else None
    if key is None:
        told = "Authorization: give `Bearer` and an API key that is valid; make one with `autotune keys create`"
        raise HTTPException(401, told, {"WWW-Authenticate": "Bearer"})
    request.app.state.known_keys.add(request.headers["authorization"])
    return Principal(key.owner, key.scopes, Actor(name=key.owner, key_id=key.id, source=source, limits=limits))


Reader = Annotated[Principal, Depends(Needs(Scope.READ))]
Submitter = Annotated[Principal, Depends(Needs(Scope.SUBMIT))]
Steerer = Annotated[Principal, Depends(Needs(Scope.SUBMIT, Scope.OPERATE))]
"""Changes a job that they see: their own, or as an operator anybody's."""
Operator = Annotated[Principal, Depends(Needs(Scope.OPERATE))]
Administrator = Annotated[Principal, Depends(Needs(Scope.ADMIN))]
StoreOf = Annotated[Store, Depends(store_of)]
SettingsOf = Annotated[Settings, Depends(settings_of)]


async def while_allowed(request: Request, parts: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """The parts of a stream, as long as the key of its request is good."""
    _, text = get_authorization_scheme_param(request.headers.get("Authorization"))
    keys: KeyReader = request.app.state.keys
    async with aclosing(keys.while_good(text, parts) if request.app.state.settings.require_keys else parts) as allowed:
        async for part in allowed:
            yield part


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
