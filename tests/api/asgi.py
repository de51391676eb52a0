"""A client that says what no well-behaved one can: any bytes as method, path, headers and body."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A request as a server hands it to the app."""

    method: str = "GET"
    target: bytes = b"/v1/jobs"
    headers: tuple[Header, ...] = ()
    body: tuple[bytes, ...] = ()
    """In parts, as it arrives."""
    ends: bool = True
    """Whether the last part says so; else the client goes away after it."""

    def scope(self) -> dict[str, Any]:
        """As uvicorn makes it: percent-encodings resolved, whatever they stand for."""
        path, _, query = self.target.partition(b"?")
        return {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self.method, "scheme": "http",
            "path": unquote(path.decode("latin-1")), "raw_path": path, "query_string": query, "root_path": "",
            "headers": [(name.lower(), value) for name, value in self.headers], "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


async def ask(app: Any, request: Raw) -> Answer:
    """Send one request to the app and return all of its answer."""
    parts: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": not request.ends or number < len(request.body) - 1}
        for number, part in enumerate(request.body or (b"",))
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(request.scope(), receive, send)
    return _answer(sent)


def _answer(sent: Sequence[dict[str, Any]]) -> Answer:
    assert sent and sent[0]["type"] == "http.response.start"
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))
