"""The web page: its files as they are, whoever asks. What it shows needs a key where the service asks for keys."""

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
SWAGGER_UI = ("swagger-ui-bundle.js", "swagger-ui.css", "LICENSE")
"""Of the package `fastapi_standalone_docs`, which carries a released build of Swagger UI; served as `vendor/swagger/…`."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Endings of what is served; a file of any other is not."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    # Asked for again each time, and mostly answered 304: nobody works with the page of the release before.
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
    """The body by gzip: the library of the charts is a megabyte."""
    digest: str


@router.get("/")
def index(known: IfNoneMatch = "", accepted: AcceptEncoding = "") -> Response:
    """The page."""
    return _answer("index.html", known, accepted)


@router.get("/docs")
def docs(known: IfNoneMatch = "", accepted: AcceptEncoding = "") -> Response:
    """The OpenAPI document, to read and to try out."""
    return _answer("docs.html", known, accepted)


@router.get("/page/{name:path}")
def part(name: str, known: IfNoneMatch = "", accepted: AcceptEncoding = "") -> Response:
    """A file of the page."""
    return _answer(name, known, accepted)


def is_page(path: str) -> bool:
    """Whether a path is one of the page's own: known to everybody, read from memory, held against nobody."""
    return path in ("/", "/docs") or path.startswith("/page/")


def _answer(name: str, known: str, accepted: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404, "the page has no such file; open / instead")
    packs = any(re.fullmatch(r"\s*gzip\s*(;\s*q=(1|0?\.[1-9]).*)?", coding) for coding in accepted.split(","))
    tag = f'"{file.digest}{"-gzip" if packs else ""}"'
    headers = HEADERS | {"ETag": tag}
    if tag in known:
        return Response(status_code=304, headers=headers)
    if packs:
        headers["Content-Encoding"] = "gzip"
    return Response(file.packed if packs else file.body, headers=headers, media_type=file.media_type)


@cache
def _files() -> Mapping[str, _File]:
    """Every file by its name. Nothing else can be asked for: no request makes a path."""
    ours = {
        path.relative_to(FOLDER).as_posix(): _file(path.suffix, path.read_bytes())
        for path in FOLDER.rglob("*")
        if path.suffix in TYPES and path.is_file()
    }
    swagger = files("fastapi_standalone_docs") / "static" / "swagger"
    for name in SWAGGER_UI:
        ours[f"vendor/swagger/{name}"] = _file(Path(name).suffix or ".txt", (swagger / name).read_bytes())
    return ours


def _file(suffix: str, body: bytes) -> _File:
    digest = hashlib.sha256(body).hexdigest()[:32]
    return _File(TYPES[suffix], body, gzip.compress(body, compresslevel=6, mtime=0), digest)
