"""What is refused before a request reaches a route: too long, too deep, from elsewhere, too many."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import problem
from api.rates import KnownKeys, Rates
from api.routes.page import is_page
from api.settings import Settings
from autotune.ops.network import is_loopback
from autotune.request.field_names import OLD_NAMES, OLD_VALUES, SINCE, with_present_names

VERSION = "1"
"""Of the interface, told in every answer."""

MOST_VALUES = 5_000
"""Of a body, counted by the commas and brackets in it: each value that is wrong is told apart, which takes microseconds."""
READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
FORWARDING = ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip")
"""Headers by which proxies say whom they speak for, beside X-Forwarded-…"""

_OLD_NAMES = tuple(f'"{old}"'.encode() for old in (*OLD_NAMES, *(old for values in OLD_VALUES.values() for old in values)))

Message = MutableMapping[str, Any]
Refusal = tuple[HTTPStatus, str, dict[str, str]]


class Guard:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: Settings, known_keys: KnownKeys) -> None:
        self.app, self.settings, self._known_keys = app, settings, known_keys
        self._rates = Rates(settings.requests_per_second)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = _told(send)
        # Of a header that comes twice the first one, as the routes read it.
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        refusal = self._refusal(scope, headers)
        if refusal is None and scope["method"] in ("POST", "PUT", "PATCH"):
            try:
                async with asyncio.timeout(self.settings.body_seconds):
                    body = await self._body(receive)
            except TimeoutError:
                # Its rest would be read as the next request.
                refusal = HTTPStatus.REQUEST_TIMEOUT, "body: took too long to arrive; send it again", {"Connection": "close"}
            except ClientDisconnect:
                # What has come may read as a whole request, which nobody sent.
                refusal = HTTPStatus.BAD_REQUEST, "body: broke off; send it again", {}
            else:
                refusal, value = self._body_refusal(body, headers)
                receive = _again(body or b"", receive)
                if refusal is None and (notes := _old_name_notes(body or b"", value)):
                    send = _with_deprecation(send, notes)
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
        if scope["method"] not in READING and site in ("cross-site", "same-site"):
            return HTTPStatus.FORBIDDEN, "Sec-Fetch-Site: another site's page asks for a change; use this server's own page", {}
        if not self.settings.require_keys:
            forwarded = next((name for name in headers if name in FORWARDING or name.startswith("x-forwarded-")), None)
            if forwarded is not None:
                # A proxy speaks for whoever reaches it, and here everybody may do everything.
                told = f"{forwarded}: comes from a proxy, and no API keys are asked for; start the server with --keys"
                return HTTPStatus.FORBIDDEN, told, {}
            # A page of another site, or a name that was made to point here, must not speak for the person at this machine.
            if not self._is_ours(headers.get("host", "")):
                return HTTPStatus.MISDIRECTED_REQUEST, "Host: is none of this server's names; use 127.0.0.1 or localhost", {}
            origin = headers.get("origin")
            if origin is not None and _authority(origin) != headers.get("host"):
                return HTTPStatus.FORBIDDEN, "Origin: is another site; open the page from this server", {}
        if is_page(scope["path"]) and scope["method"] in READING:
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
        """The whole body; None: longer than allowed, whatever its header said.

        Raises:
            ClientDisconnect: the client went away before its end.
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

    def _body_refusal(self, body: bytes | None, headers: dict[str, str]) -> tuple[Refusal | None, Any]:
        """Why a body is refused; None: it is not, and this is what it holds."""
        refusal = self._unread_refusal(body, headers)
        if refusal is not None or not body:
            return refusal, None
        try:
            value = _json(body)
        except UnicodeError:
            told = "body: is not UTF-8, or holds half of a surrogate pair; encode it as UTF-8"
            return (HTTPStatus.BAD_REQUEST, told, {}), None
        except RecursionError:
            return self._too_deep(), None
        except ValueError as error:
            return (HTTPStatus.BAD_REQUEST, f"body: is not JSON ({error}); correct it", {}), None
        return (self._too_deep() if _is_deeper(value, self.settings.depth) else None), value

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
        if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
            return HTTPStatus.BAD_REQUEST, f"body: holds more than {MOST_VALUES:,} values; give fewer", {}
        return None


def _told(send: Send) -> Send:
    """Add what every answer has."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message["headers"]}
            more = [(b"autotune-api-version", VERSION.encode()), (b"x-content-type-options", b"nosniff")]
            more += [] if b"cache-control" in names else [(b"cache-control", b"no-store")]
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return told


def _old_name_notes(body: bytes, fields: Any) -> list[str]:
    """A line for each field that a body names by an old name. Such a body is accepted only where the field is known."""
    if not any(old in body for old in _OLD_NAMES):
        return []
    notes: list[str] = []
    if isinstance(fields, dict) and not any(OLD_NAMES.get(name) in fields for name in fields):
        with_present_names(fields, notes.append)
    return notes


def _with_deprecation(send: Send, notes: list[str]) -> Send:
    """Add the header `Deprecation` (RFC 9745) to an answer that is not a refusal; its parameter `note` says what to rename."""
    value = f'@{SINCE};note="{"; ".join(notes)}"'.encode()

    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < HTTPStatus.BAD_REQUEST:
            message["headers"] = [*message["headers"], (b"deprecation", value)]
        await send(message)

    return noted


def _is_deeper(value: Any, most: int) -> bool:
    """Whether the value is nested deeper than allowed."""
    level = [value]
    for _ in range(most):
        level = [
            part
            for one in level
            if isinstance(one, dict | list)
            for part in (one.values() if isinstance(one, dict) else one)
        ]  # fmt: skip
        if not level:
            return False
    return any(isinstance(one, dict | list) for one in level)


def _json(body: bytes) -> Any:
    """The value of a body. What parsers read differently, or what no answer and no database could hold, is refused.

    Raises:
        UnicodeError: it is not UTF-8, or an escape makes half of a surrogate pair.
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
    raise ValueError(f"{text} is no number of JSON")


def _again(body: bytes, receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Give the body to the app, and afterwards whatever comes: above all that the client went away."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
