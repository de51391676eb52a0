"""Authentication and authorization, with a cache of API keys that are valid for a few seconds.

Each route states its required role by the type of its principal: Reader, Submitter, Steerer, Operator, Administrator. A route
without one is public. docs/security.md has the table of all routes, which a test compares with the code.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, cast

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from fastapi.security.utils import get_authorization_scheme_param
from starlette.exceptions import HTTPException

from api.identity import IDENTITY, Identity
from api.settings import Settings
from autotune.errors import RequestError
from storage.errors import DatabaseUnavailableError, UnknownJobError
from storage.records import ApiKey, Audience, JobRecord, Scope
from storage.service_records import Actor, Quotas
from storage.store import Store

INCLUDED_IN = {
    Scope.READ: (Scope.OBSERVE, Scope.OPERATE, Scope.ADMIN),
    Scope.OBSERVE: (Scope.OPERATE, Scope.ADMIN),
    Scope.SUBMIT: (Scope.ADMIN,),
    Scope.OPERATE: (Scope.ADMIN,),
    Scope.ADMIN: (),
}
"""Scope -> scopes that include it."""
SECONDS_OF_STREAM = 600.0
"""Longest stream of a person whom a proxy has identified: a new request shows that the proxy still lets them in."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The client of a request."""

    owner: str
    scopes: frozenset[str]
    actor: Actor = field(compare=False)
    """The client's identity for the audit log and the quotas."""
    teams: frozenset[str] = frozenset()
    """Whose jobs they see besides their own."""
    job: str = ""
    """The only job that they see, because they came by a link to it."""

    @property
    def sees_all(self) -> bool:
        """Whether they may see other owners' jobs."""
        return self.may(Scope.OBSERVE)

    @property
    def audience(self) -> Audience | None:
        """The jobs that they may see; None: all."""
        return None if self.sees_all else Audience(self.owner, self.teams)

    def may(self, scope: Scope) -> bool:
        """Whether they have the scope, directly or by another one, which includes it."""
        return not self.scopes.isdisjoint({scope, *INCLUDED_IN[scope]})

    def require_team(self, team: str) -> None:
        """Check the team that they show a job to.

        Raises:
            RequestError: it is not theirs.
        """
        if team and not self.sees_all and team not in self.teams:
            yours = ", ".join(sorted(self.teams)) or "none"
            raise RequestError("team", f"{team!r} is not one of yours ({yours})", "name one that is, or leave it out")


# Dependencies are coroutines, although some never await: FastAPI runs every other dependency in a thread for each request.


async def store_of(request: Request) -> Store:
    """The store of the app."""
    return cast(Store, request.app.state.store)


async def settings_of(request: Request) -> Settings:
    """The settings of the app."""
    return cast(Settings, request.app.state.settings)


class RequiredScope(SecurityBase):
    """Requires a key, or an identified person, with the scope.

    It is a single dependency, because FastAPI resolves each dependency for every request."""

    def __init__(self, *scopes: Scope) -> None:
        """
        Args:
            scopes: alternatives; one of them is enough.
        """
        self.model = HTTPBearer(description="An API key, made with `autotune keys create`.")
        self.scheme_name = "key"
        self.scopes = scopes

    async def __call__(self, request: Request) -> Principal:
        principal = await _principal(request)
        if not any(map(principal.may, self.scopes)):
            raise HTTPException(
                403, f"Authorization: lacks the scope {' or '.join(self.scopes)}; use a key that has it, or ask for the role"
            )
        if principal.job and request.path_params.get("job_id") != principal.job:
            raise HTTPException(403, f"Authorization: is a link to job {principal.job} only; sign in to see more")
        return principal


async def _principal(request: Request) -> Principal:
    state = request.app.state
    source = "" if request.client is None else request.client.host
    limits: Quotas = state.settings.quotas
    if not state.settings.require_keys:
        return Principal("", frozenset(Scope), Actor(name="", source=source, limits=limits))
    scheme, text = get_authorization_scheme_param(request.headers.get("Authorization"))
    key: ApiKey | None = await state.keys.key(text) if scheme.lower() == "bearer" and text else None
    if (identity := request.scope.get(IDENTITY)) is not None:
        if key is None or not key.job:
            return _person(identity, state.settings.roles, Actor(name=identity.name, source=source, limits=limits))
        del request.scope[IDENTITY]  # a link shows what it shows, whoever opens it
    if key is None:
        detail = "Authorization: give `Bearer` and a valid API key; make one with `autotune keys create`"
        raise HTTPException(401, detail, {"WWW-Authenticate": "Bearer"})
    request.app.state.known_keys.add(request.headers["authorization"])
    actor = Actor(name=key.owner, key_id=key.id, source=source, limits=limits)
    return Principal(key.owner, key.scopes, actor, key.teams, key.job)


def _person(identity: Identity, roles: Iterable[str], actor: Actor) -> Principal:
    """The person whom a proxy has identified, with the roles of everybody and of their groups."""
    by_group = [role.rpartition("=") for role in roles]
    scopes = frozenset(scope for group, equals, scope in by_group if not equals or group in identity.groups)
    return Principal(identity.name, scopes, actor, frozenset(identity.groups))


Reader = Annotated[Principal, Depends(RequiredScope(Scope.READ))]
Submitter = Annotated[Principal, Depends(RequiredScope(Scope.SUBMIT))]
Steerer = Annotated[Principal, Depends(RequiredScope(Scope.SUBMIT, Scope.OPERATE))]
"""May change a job that they can see: their own, or as an operator any job."""
Operator = Annotated[Principal, Depends(RequiredScope(Scope.OPERATE))]
Administrator = Annotated[Principal, Depends(RequiredScope(Scope.ADMIN))]
StoreOf = Annotated[Store, Depends(store_of)]
SettingsOf = Annotated[Settings, Depends(settings_of)]


async def while_allowed(request: Request, parts: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """The parts of a stream, as long as the key of its request is valid."""
    if IDENTITY in request.scope:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS_OF_STREAM), aclosing(parts):
                async for part in parts:
                    yield part
        return
    _, text = get_authorization_scheme_param(request.headers.get("Authorization"))
    keys: KeyReader = request.app.state.keys
    async with aclosing(keys.while_valid(text, parts) if request.app.state.settings.require_keys else parts) as allowed:
        async for part in allowed:
            yield part


def visible_job(store: Store, principal: Principal, job_id: str, field: str = "job_id") -> JobRecord:
    """The job, if the principal may see it.

    Raises:
        UnknownJobError: the job does not exist, or is not theirs. Both give the same error, so it does not reveal which.
    """
    return if_visible(store.jobs.exact([job_id]).get(job_id), principal, job_id, field)


def if_visible(job: JobRecord | None, principal: Principal, job_id: str, field: str = "job_id") -> JobRecord:
    """As `visible_job`, for a job that was looked up before."""
    audience = principal.audience
    if job is None or not (audience is None or audience.includes(job) or job.id == principal.job):
        raise UnknownJobError(f"{field}: there is no job {job_id!r}; list yours with GET /v1/jobs")
    return job


def controlled_job(store: Store, principal: Principal, job_id: str) -> JobRecord:
    """As `visible_job`, for a change: only its owner and operators may make one.

    Raises:
        HTTPException: they only see it.
    """
    job = visible_job(store, principal, job_id)
    if job.submitter != principal.owner and not principal.may(Scope.OPERATE):
        raise HTTPException(403, f"job_id: belongs to {job.submitter or 'the database'}, whose job you only see; clone it")
    return job


KEY_SECONDS = 4.0
"""How long a valid key is cached, which is also the longest time that a revoked key keeps working."""
CHECK_SECONDS = 0.5
"""How often a stream checks its key. With `KEY_SECONDS`, revoking a key ends its streams within 5 s."""


@dataclass(frozen=True, slots=True)
class _Known:
    key: ApiKey
    until: float


class KeyReader:
    """Looks up keys, and caches valid ones for `KEY_SECONDS`. Invalid keys are looked up each time."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[ApiKey | None]] = {}
        self._notes: set[asyncio.Task[None]] = set()

    async def key(self, text: str) -> ApiKey | None:
        """The key with that text; None: it is not a key, was revoked, or has expired."""
        # Keep a digest, not the text, so that memory contains no usable key.
        name = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        entry = self._known.get(name)
        if entry is not None and self._clock() < entry.until:
            expires = entry.key.expires
            if expires is None or expires > datetime.now(UTC):
                return entry.key
        if name not in self._asked:
            self._asked[name] = asyncio.create_task(self._look(name, text))
        return await asyncio.shield(self._asked[name])

    async def _look(self, name: bytes, text: str) -> ApiKey | None:
        began = self._clock()
        try:
            key = await asyncio.to_thread(self._store.keys.authenticate, text)
        finally:
            del self._asked[name]
        self._known.pop(name, None)
        if key is not None:
            self._known[name] = _Known(key, began + KEY_SECONDS)
            if len(self._known) > 10_000:  # the one that was looked up first is removed first
                self._known.popitem(last=False)
            note = asyncio.create_task(self._note(key))
            self._notes.add(note)
            note.add_done_callback(self._notes.discard)
        return key

    async def _note(self, key: ApiKey) -> None:
        """Record the use of a key in the background: the database may be full, or its writers busy."""
        with contextlib.suppress(DatabaseUnavailableError):
            await asyncio.to_thread(self._store.keys.note_use, key)

    async def while_valid(self, text: str, parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """The parts of a stream, until its key is revoked or expires. An outage of the database does not end a stream."""
        coming: asyncio.Future[bytes] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(parts))
                done, _ = await asyncio.wait((coming,), timeout=CHECK_SECONDS)
                if not await self._is_valid(text):
                    return
                if done:
                    try:
                        part = coming.result()
                    except StopAsyncIteration:
                        return
                    finally:
                        coming = None
                    yield part
        finally:
            if coming is not None:
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                    await coming
            await parts.aclose()

    async def _is_valid(self, text: str) -> bool:
        try:
            return await self.key(text) is not None
        except DatabaseUnavailableError:
            return True
