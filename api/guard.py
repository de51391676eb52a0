"""Refuses requests before they reach a route: too long, too deeply nested, from another site, too many."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from api.identity import IDENTITY
from api.limits import KnownKeys, Rates
from api.problems import problem
from api.routes.page import is_page
from api.settings import Settings
from autotune.client.transport import is_loopback

VERSION = "1"
"""Version of the interface, sent in every response."""


Message = MutableMapping[str, Any]
Refusal = tuple[HTTPStatus, str, dict[str, str]]


class RequestGuard:
    """ASGI middleware that refuses invalid requests."""

    _READING = ("GET", "HEAD", "OPTIONS")
    """Methods that do not change anything."""

    _MOST_VALUES = 5_000
    """Most values of a body, counted by its commas and brackets. Each invalid value is reported, which takes
    microseconds."""

    def __init__(self, app: ASGIApp, settings: Settings, known_keys: KnownKeys) -> None:
        self.app, self.settings, self._known_keys = app, settings, known_keys
        self._rates = Rates(settings.requests_per_second)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _with_common_headers(send)
        # Of a repeated header take the first, as the routes do.
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        refusal = self._refusal(scope, headers)
        if refusal is None and scope["method"] in ("POST", "PUT", "PATCH"):
            try:
                async with asyncio.timeout(self.settings.body_seconds):
                    body = await self._body(receive)
            except TimeoutError:
                # Close the connection: the rest of the body would be read as the next request.
                refusal = HTTPStatus.REQUEST_TIMEOUT, "body: took too long to arrive; send it again", {"Connection": "close"}
            except ClientDisconnect:
                # The received part may look like a complete request.
                refusal = HTTPStatus.BAD_REQUEST, "body: broke off; send it again", {}
            else:
                if body is not None and _values(body) > self._MOST_VALUES:
                    refusal = await asyncio.to_thread(self._body_refusal, body, headers)
                else:
                    refusal = self._body_refusal(body, headers)
                receive = _replayed(body or b"", receive)
        if refusal is not None:
            status, detail, more = refusal
            await problem(status, detail, headers=more)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> Refusal | None:
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > self.settings.body_bytes:
            return (
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"body: is longer than {self.settings.body_bytes:,} bytes; shorten it",
                {},
            )
        site = headers.get("sec-fetch-site", "").lower()
        if scope["method"] not in self._READING and site in ("cross-site", "same-site"):
            return HTTPStatus.FORBIDDEN, "Sec-Fetch-Site: another site's page asks for a change; use this server's own page", {}
        if not self.settings.require_keys:
            # Headers in which proxies name their client, besides X-Forwarded-…
            forwarding = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip")
            forwarded = next((name for name in headers if name in forwarding or name.startswith("x-forwarded-")), None)
            if forwarded is not None:
                # A proxy forwards requests of anyone who can reach it, and without keys every request is allowed.
                detail = f"{forwarded}: comes from a proxy, and this server requires no API keys; start the server with --keys"
                return HTTPStatus.FORBIDDEN, detail, {}
            # Refuse other sites' pages and DNS rebinding: they would act with the rights of the user of this machine.
            if not self._is_ours(headers.get("host", "")):
                return HTTPStatus.MISDIRECTED_REQUEST, "Host: is not a name of this server; use 127.0.0.1 or localhost", {}
        # A browser sends the cookie of a proxy to it, and the rights of this machine's user to itself, whichever page asks.
        if not self.settings.require_keys or IDENTITY in scope:
            origin = headers.get("origin")
            if origin is not None and _authority(origin) != headers.get("host"):
                return HTTPStatus.FORBIDDEN, "Origin: is another site; open the page from this server", {}
        if is_page(scope["path"]) and scope["method"] in self._READING:
            return None
        address = str((scope.get("client") or ("",))[0])
        wait = self._rates.wait(self._known_keys.client(headers.get("authorization"), address))
        if wait > 0:
            return (
                HTTPStatus.TOO_MANY_REQUESTS,
                f"too many requests; try again in {wait:.1f} s",
                {"Retry-After": str(math.ceil(wait))},
            )
        return None

    def _is_ours(self, host: str) -> bool:
        if not host or set(host) & set("/?#@\\ "):
            return False
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name is not None and (is_loopback(name) or name in self.settings.hosts)

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None: longer than allowed, regardless of its Content-Length.

        Raises:
            ClientDisconnect: the client disconnected before the end of the body.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.settings.body_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)

    def _body_refusal(self, body: bytes | None, headers: dict[str, str]) -> Refusal | None:
        """Why a body is refused; None: it is not."""
        refusal = self._unread_refusal(body, headers)
        if refusal is not None or not body:
            return refusal
        try:
            value = _json(body)
        except UnicodeError:
            detail = "body: is not UTF-8, or holds half of a surrogate pair; encode it as UTF-8"
            return HTTPStatus.BAD_REQUEST, detail, {}
        except RecursionError:
            return self._too_deep()
        except ValueError as error:
            return HTTPStatus.BAD_REQUEST, f"body: is not JSON ({error}); correct it", {}
        if _is_deeper(value, self.settings.depth):
            return self._too_deep()
        if _values(body) > self._MOST_VALUES:
            # Measurements do not count.
            rest = {name: field for name, field in value.items() if name != "knowledge"} if isinstance(value, dict) else value
            if _values(json.dumps(rest).encode()) > self._MOST_VALUES:
                return _too_many(self._MOST_VALUES)
        return None

    def _too_deep(self) -> Refusal:
        return HTTPStatus.BAD_REQUEST, f"body: is nested deeper than {self.settings.depth} levels; flatten it", {}

    def _unread_refusal(self, body: bytes | None, headers: dict[str, str]) -> Refusal | None:
        if body is None:
            return (
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"body: is longer than {self.settings.body_bytes:,} bytes; shorten it",
                {},
            )
        if not body:
            return None
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type: is not application/json; send JSON, and say so", {}
        # The same with those of the field `knowledge`, of which only the first invalid one is reported.
        return _too_many(50_000) if _values(body) > 50_000 else None


def _values(body: bytes) -> int:
    return sum(map(body.count, (b",", b"[", b"{")))


def _too_many(most: int) -> Refusal:
    return HTTPStatus.BAD_REQUEST, f"body: holds more than {most:,} values; give fewer", {}


def _with_common_headers(send: Send) -> Send:
    """Add the headers of every response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message["headers"]}
            more = [(b"autotune-api-version", VERSION.encode()), (b"x-content-type-options", b"nosniff")]
            more += [] if b"cache-control" in names else [(b"cache-control", b"no-store")]
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return send_with_headers


def _is_deeper(value: Any, most: int) -> bool:
    """Whether the value is nested deeper than `most` levels."""
    level = [value]
    for _ in range(most):
        level = [
            part
            for item in level
            if isinstance(item, dict | list)
            for part in (item.values() if isinstance(item, dict) else item)
        ]  # fmt: skip
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _json(body: bytes) -> Any:
    """The value of a body. Refuses content that parsers interpret differently, and text that UTF-8 cannot encode.

    Raises:
        UnicodeError: it is not UTF-8, or an escape gives a lone surrogate.
        ValueError: it is not JSON, or names a field twice.
    """
    value = json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_pair_twice)
    if rb"\u" in body:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _no_pair_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field is given twice")
    return fields


def _authority(origin: str) -> str | None:
    """Host and port of an Origin; None: it has none."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _replayed(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Replay the body to the app, then pass on further messages, above all the disconnect of the client."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
