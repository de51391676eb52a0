"""The page's files: whole, safe, and nothing else of the server's disk."""

import gzip
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from api.reference import document
from api.routes.page import FOLDER, TYPES
from tests.api.conftest import problem_of

FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
OURS = [name for name in FILES if not name.startswith("vendor/")]
POLICY = {
    "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self' data:", "connect-src": "'self'",
    "font-src": "'self'", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
}  # fmt: skip


def test_the_page_is_at_the_root(refusing: TestClient) -> None:
    answer = refusing.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == (FOLDER / "index.html").read_text()


@pytest.mark.prove(every=4)
@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_as_it_is(refusing: TestClient, name: str) -> None:
    answer = refusing.get(f"/page/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == TYPES[Path(name).suffix]


@pytest.mark.parametrize("path", ["/", "/docs", "/page/index.html", "/page/main.mjs"])
def test_what_a_browser_is_told(refusing: TestClient, path: str) -> None:
    headers = refusing.get(path).headers
    told = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert told == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cache-control"] == "no-cache"


def test_what_is_known_is_not_sent_again(refusing: TestClient) -> None:
    first = refusing.get("/page/main.mjs")
    again = refusing.get("/page/main.mjs", headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert refusing.get("/page/main.mjs", headers={"If-None-Match": '"other"'}).status_code == 200
    assert refusing.get("/page/style.css").headers["etag"] != first.headers["etag"]


@pytest.mark.parametrize(
    ("accepted", "packs"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("gzip;q=0", False), ("identity", False), ("", False), ("x-gzip", False)],
)
def test_it_is_packed_for_who_takes_that(refusing: TestClient, accepted: str, packs: bool) -> None:
    with refusing.stream("GET", "/page/main.mjs", headers={"Accept-Encoding": accepted}) as answer:
        body = b"".join(answer.iter_raw())
    assert (answer.headers.get("content-encoding") == "gzip") is packs
    assert (gzip.decompress(body) if packs else body) == (FOLDER / "main.mjs").read_bytes()
    assert answer.headers["vary"] == "Accept-Encoding"


@pytest.mark.parametrize(
    "path",
    [
        "/page/", "/page/none.mjs", "/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page//etc/passwd",
        "/page/%2fetc%2fpasswd", "/page/charts", "/page/charts/", "/page/vendor/..%5c..%5capp.py", "/page/index.html%00",
        "/page/MAIN.MJS", "/page",
    ],
)  # fmt: skip
def test_nothing_else_is_served(refusing: TestClient, path: str) -> None:
    problem_of(refusing.get(path), 404)


def test_it_asks_for_no_key_and_is_held_against_nobody(serve: Callable[..., TestClient]) -> None:
    client = serve(require_keys=True, requests_per_second=0.1)
    assert {client.get(path).status_code for path in ("/", "/page/main.mjs") * 5} == {200}
    problem_of(client.get("/v1/jobs"), 401)
    problem_of(client.get("/v1/jobs"), 429)


def test_a_name_that_was_made_to_point_here_gets_no_page(refusing: TestClient) -> None:
    problem_of(refusing.get("/", headers={"Host": "example.com"}), 421)


def test_it_is_no_part_of_the_interface() -> None:
    paths = json.loads(document())["paths"]
    assert "/v1/jobs" in paths
    assert not [path for path in paths if path == "/" or path.startswith("/page")]


def test_the_package_has_all_of_it() -> None:
    """`tests/test_wheel.py` looks into the wheel; what is not named here would not get there."""
    project = tomllib.loads((FOLDER.parent.parent / "pyproject.toml").read_text())
    assert "page/**/*" in project["tool"]["setuptools"]["package-data"]["api"]
    assert {Path(name).suffix for name in FILES} <= TYPES.keys()


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith(".mjs")])
def test_text_of_users_reaches_no_markup(name: str) -> None:
    """The policy would stop most of it; here it does not even stand."""
    text = (FOLDER / name).read_text()
    found = re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|renderMode: \"html\"", text
    )
    assert not found, found


@pytest.mark.parametrize("name", OURS)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\"'\s)]*", (FOLDER / name).read_text()))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    page = (FOLDER / "index.html").read_text()
    assert all('src="/page/' in tag for tag in re.findall(r"<script[^>]*>", page))
    assert "<style" not in page
    assert not re.search(r"\s(?:style|on[a-z]+)=", page)


def test_every_import_is_there() -> None:
    for name in (name for name in OURS if name.endswith(".mjs")):
        for wanted in re.findall(r"""(?:from|import)\s*\(?\s*"(\.[^"]+)\"""", (FOLDER / name).read_text()):
            assert ((FOLDER / name).parent / wanted).resolve().is_file(), f"{name} imports {wanted}"
    for wanted in re.findall(r'(?:href|src)="/page/([^"]+)"', (FOLDER / "index.html").read_text()):
        assert (FOLDER / wanted).is_file(), wanted


def test_the_documentation_loads_nothing_from_elsewhere(refusing: TestClient) -> None:
    page = refusing.get("/docs").text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(loaded) == 5
    for address in loaded:
        assert address.startswith("/page/")
        assert refusing.get(address).status_code == 200
    assert not re.search(r"<script>|<style|style=", page)
    problem_of(refusing.get("/redoc"), 404)
