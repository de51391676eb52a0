"""Serves the static files of the web page, without a key. The data that it shows needs a key if the service requires keys."""

import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Header, Response
from starlette.exceptions import HTTPException

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parent.parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Suffixes of served files; other files are not served."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    # Revalidated each time, mostly with a 304 response, so that no client uses the page of an old release.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}
IfNoneMatch = Annotated[str, Header(alias="If-None-Match", max_length=1000)]
AcceptEncoding = Annotated[str, Header(alias="Accept-Encoding", max_length=1000)]


@dataclass(frozen=True, slots=True)
class _File:
    media_type: str
    body: bytes
    packed: bytes
    """The gzip-compressed body; the chart library has a megabyte."""
    digest: str


@router.get("/")
def index(etags: IfNoneMatch = "", accepted: AcceptEncoding = "") -> Response:
    """The page."""
    return _answer("index.html", etags, accepted)


@router.get("/docs")
def docs(etags: IfNoneMatch = "", accepted: AcceptEncoding = "") -> Response:
    """The interactive API documentation."""
    return _answer("docs.html", etags, accepted)


@router.get("/page/{name:path}")
def part(name: str, etags: IfNoneMatch = "", accepted: AcceptEncoding = "") -> Response:
    """A file of the page."""
    return _answer(name, etags, accepted)


def is_page(path: str) -> bool:
    """Whether a path belongs to the page: public, served from memory, and exempt from rate limits."""
    return path in ("/", "/docs") or path.startswith("/page/")


def _answer(name: str, etags: str, accepted: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404, "the page has no such file; open / instead")
    packs = any(re.fullmatch(r"\s*gzip\s*(;\s*q=(1|0?\.[1-9]).*)?", coding) for coding in accepted.split(","))
    tag = f'"{file.digest}{"-gzip" if packs else ""}"'
    headers = HEADERS | {"ETag": tag}
    if tag in etags:
        return Response(status_code=304, headers=headers)
    if packs:
        headers["Content-Encoding"] = "gzip"
    return Response(file.packed if packs else file.body, headers=headers, media_type=file.media_type)


@cache
def _files() -> Mapping[str, _File]:
    """Every served file by name. A request never becomes a file system path."""
    ours = {
        path.relative_to(FOLDER).as_posix(): _file(path.suffix, path.read_bytes())
        for path in FOLDER.rglob("*")
        if path.suffix in TYPES and path.is_file()
    }
    swagger = files("fastapi_standalone_docs") / "static" / "swagger"
    # Files of a released Swagger UI build; served as `vendor/swagger/…`.
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "LICENSE"):
        ours[f"vendor/swagger/{name}"] = _file(Path(name).suffix or ".txt", (swagger / name).read_bytes())
    return ours


def _file(suffix: str, body: bytes) -> _File:
    digest = hashlib.sha256(body).hexdigest()[:32]
    return _File(TYPES[suffix], body, gzip.compress(body, compresslevel=6, mtime=0), digest)
