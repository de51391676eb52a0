"""Requests to one service: what is tried again, how answers are decoded, and which errors (RFC 9457) come out."""

import dataclasses
import ipaddress
import json
import random
import ssl
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import httpx2

from autotune.client.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
)
from autotune.errors import RequestError
from autotune.wire.service import FieldProblem

T = TypeVar("T")

SILENCE_SECONDS = 45.0
"""After which a stream is given up: the service gives a sign of life every 15 s."""


class HttpTransport:
    """May be used from several threads."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        """Connects to nothing yet.

        Raises:
            RequestError: address or key cannot be ones.
        """
        self.url = checked_url(url)
        self.has_key = bool(api_key)
        self._timeout = timeout
        headers = {"Authorization": f"Bearer {_checked_key(api_key)}"} if api_key else {}
        parts = urlsplit(self.url)
        # What the environment says of proxies is not meant for this machine's own services.
        local = is_loopback(parts.hostname or "")
        # Certificates take 0.1 s to load: where no TLS is spoken, a context that trusts nobody does.
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if local and parts.scheme == "http" else True
        self._http = httpx2.Client(headers=headers, timeout=timeout, trust_env=not local, verify=verify)

    def close(self) -> None:
        """Close every connection. May be called twice."""
        self._http.close()

    def get(self, kind: type[T], path: str, params: Mapping[str, Any] | None = None) -> T:
        """Ask, and return the answer as the dataclass `kind`."""
        return self._decoded(kind, self.send("GET", path, params=params))

    def post(
        self, kind: type[T], path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> T:
        """Send what may be sent twice, and return the answer as the dataclass `kind`."""
        return self._decoded(kind, self.send("POST", path, body=body, headers=headers))

    def once(self, kind: type[T], path: str, body: Mapping[str, Any]) -> T:
        """Send what must not be sent twice, and return the answer as the dataclass `kind`."""
        return self._decoded(kind, self.send("POST", path, body=body, repeatable=False))

    def patch(self, kind: type[T], path: str, body: Mapping[str, Any], headers: Mapping[str, str], repeatable: bool) -> T:
        """Send a change, and return the answer as the dataclass `kind`."""
        return self._decoded(kind, self.send("PATCH", path, body=body, headers=headers, repeatable=repeatable))

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> httpx2.Response:
        """Send a request until it is answered.

        Tried again, after pauses that grow: where the connection breaks or the service is away (502, 503, 504), if the request
        may be sent twice; in any case where it never left, or was turned away as one too many (429).

        Raises:
            ServiceError: what the answer says, or that there is none.
        """
        content = None if body is None else encoded(body)
        sent = {**(headers or {}), **({"Content-Type": "application/json"} if content is not None else {})}
        for pause in pauses():
            try:
                answer = self._http.request(method, self.url + path, params=params, content=content, headers=sent)
            except httpx2.TransportError as error:
                is_unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
                if pause is None or not (repeatable or is_unsent):
                    raise self._unreachable(error) from None
            else:
                if not answer.is_error and not answer.is_redirect:
                    return self._ours(answer)
                wait = _retry_after(answer, self._timeout)
                again = answer.status_code == 429 or (repeatable and answer.status_code in (502, 503, 504))
                if pause is None or not again or wait is None:
                    raise error_of(answer, self.url, self.has_key)
                pause = max(pause, wait)
            time.sleep(pause)
        raise AssertionError("unreachable")

    @contextmanager
    def stream(
        self, path: str, headers: Mapping[str, str], params: Mapping[str, Any] | None = None
    ) -> Iterator[Iterator[tuple[str, str]] | None]:
        """Open a stream of events, without trying again: kind and data of its messages as they come; None: there are no more.

        Raises:
            ServiceError: as `send`; within the block UnreachableError where the stream breaks or falls silent.
        """
        timeout = httpx2.Timeout(self._timeout, read=SILENCE_SECONDS)
        try:
            with self._http.sse(self.url + path, params=params, headers=headers, timeout=timeout) as source:
                answer = source.response
                if answer.is_error or answer.is_redirect:
                    answer.read()
                    raise error_of(answer, self.url, self.has_key)
                ended = self._ours(answer).status_code == 204
                yield None if ended else ((item.event, item.data) for item in source if item.data)
        except httpx2.TransportError as error:
            raise self._unreachable(error) from None

    def _ours(self, answer: httpx2.Response) -> httpx2.Response:
        if "autotune-api-version" not in answer.headers:
            problem = f"{self.url} answers, but is no autotune service"
            raise ServiceError(f"url: {problem}; check AUTOTUNE_URL or --url", answer.status_code)
        return answer

    def _decoded(self, kind: type[T], answer: httpx2.Response) -> T:
        try:
            return decode(kind, answer.json())
        except (KeyError, TypeError, ValueError) as error:
            problem = one_line(f"{type(error).__name__}: {error}")
            raise ServiceError(
                f"answer: of {self.url} cannot be read ({problem}); use the client of the service's version", answer.status_code
            ) from error

    def _unreachable(self, error: httpx2.TransportError) -> UnreachableError:
        reason = one_line(str(error)) or type(error).__name__
        remedy = "start `autotune serve`, or check AUTOTUNE_URL or --url"
        return UnreachableError(f"url: {self.url} gives no answer ({reason}); {remedy}")


def pauses() -> Iterator[float | None]:
    """Seconds to wait after each try; None: it was the last one."""
    for number in range(4):
        # Spread, so that clients that were cut off together do not come back together.
        yield 0.1 * 2**number * random.uniform(0.5, 1.5)
    yield None


def encoded(body: Mapping[str, Any]) -> bytes:
    """The body as JSON.

    Raises:
        RequestError: it holds what JSON cannot say.
    """
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        remedy = "give finite numbers, texts, lists and mappings"
        raise RequestError("request", f"cannot be written as JSON ({error})", remedy) from None


def checked_url(url: str) -> str:
    """The address without a slash at its end.

    Raises:
        RequestError: it is no address of a service. A password in it is not repeated.
    """
    remedy = "give one such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url.strip())
        parts.port  # noqa: B018  raises where it is no number
    except ValueError as error:
        raise RequestError("url", f"is no address ({error})", remedy) from None
    if "@" in parts.netloc:
        raise RequestError("url", "holds a user or a password", "leave them out, and give an API key (AUTOTUNE_API_KEY)")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError("url", f"{quoted(url.partition('?')[0])!r} is no address of a service", remedy)
    if parts.query or parts.fragment:
        raise RequestError("url", f"{quoted(url)!r} has more than an address", remedy)
    return url.strip().rstrip("/")


def _checked_key(key: str) -> str:
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        # The key itself is not repeated: what is wrong is likely a part of a right one.
        raise RequestError("api_key", "is no API key", "give the text that `autotune keys create` printed")
    return key


def _retry_after(answer: httpx2.Response, most: float) -> float | None:
    """Seconds that the service asks to wait; None: longer than a request may last."""
    text = answer.headers.get("retry-after", "0")
    seconds = float(text) if text.isascii() and text.isdigit() else 0.0
    return seconds if seconds <= most else None


def decode(kind: type[T], data: Any) -> T:
    """Return the dataclass `kind` from decoded JSON. A field that an older service does not send has its default.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or has another type.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"is not an object; {kind.__name__} was expected")
    hints = _type_hints(kind)  # type: ignore[arg-type]
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    present_fields = (item for item in fields if item.name in data or item.default is dataclasses.MISSING)
    return kind(**{item.name: _value(hints[item.name], data[item.name]) for item in present_fields})


_type_hints = cache(get_type_hints)


def _value(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(arguments[0], value)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in value)
    if origin is Mapping:
        return {name: _value(arguments[1], item) for name, item in value.items()}
    if kind is datetime:
        return datetime.fromisoformat(value)
    if dataclasses.is_dataclass(kind):
        return decode(kind, value)  # type: ignore[arg-type]
    if kind is not Any and isinstance(kind, type) and not isinstance(value, kind):
        raise TypeError(f"{value!r:.100} is not {kind.__name__}")
    return value


_KINDS: dict[int, type[ServiceError]] = {
    401: UnauthorizedError, 403: ForbiddenError, 404: NotFoundError, 409: ConflictError, 412: ConflictError,
    429: UnavailableError, 502: UnavailableError, 503: UnavailableError, 504: UnavailableError,
}  # fmt: skip


def error_of(answer: httpx2.Response, url: str, had_key: bool) -> ServiceError:
    """The error of an answer, in one line."""
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
    """The text on one line, at most 1000 characters of it, without what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in " ".join(text.split()))[:1000]


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


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
