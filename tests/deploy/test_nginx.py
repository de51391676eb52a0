"""The recipe with nginx, run: TLS, whose address counts, and streams that arrive at once."""

import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from storage.store import open_store
from tests.certificates import self_signed
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from autotune.cli import main; sys.exit(main())"]
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
MAIN = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
{user}
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/autotune.conf;
}}
"""
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx")


@dataclass(frozen=True)
class Place:
    """nginx before a service."""

    port: int
    plain_port: int
    context: ssl.SSLContext
    key: str

    def connect(self) -> HTTPSConnection:
        return HTTPSConnection("localhost", self.port, context=self.context, timeout=60)


@contextmanager
def behind_nginx(folder: Path, change: Callable[[str], str] = str, *options: str) -> Iterator[Place]:
    """The recipe, changed for this machine, with a service that has these options too."""
    certificate, key = self_signed(folder)
    ports = [free_port() for _ in range(3)]
    with open_store(str(folder / "jobs.db")) as store:
        text = store.keys.create("anna", {"read", "submit"})[1]
    recipe = change((ROOT / "examples/deploy/nginx.conf").read_text())
    for told, here in (
        ("127.0.0.1:8000", f"127.0.0.1:{ports[0]}"), ("listen 443 ", f"listen 127.0.0.1:{ports[1]} "),
        ("listen 80;", f"listen 127.0.0.1:{ports[2]};"), ("/etc/nginx/autotune/certificate.pem", str(certificate)),
        ("/etc/nginx/autotune/key.pem", str(key)),
    ):  # fmt: skip
        assert told in recipe
        recipe = recipe.replace(told, here)
    (folder / "autotune.conf").write_text(recipe)
    user = "user root;" if os.geteuid() == 0 else ""  # the folder of a test is its user's alone
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, user=user))
    serve = ["serve", "--no-worker", "--keys", "--port", str(ports[0]), "--trusted-proxy", "127.0.0.1", *options]
    variables = os.environ | {"AUTOTUNE_DB": str(folder / "jobs.db"), "PYTHONPATH": str(ROOT)}
    assert NGINX is not None
    processes = [
        subprocess.Popen([*COMMAND, *serve], env=variables, cwd=folder, stderr=subprocess.DEVNULL),
        subprocess.Popen([NGINX, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]),
    ]
    place = Place(ports[1], ports[2], ssl.create_default_context(cafile=certificate), text)
    try:
        until = time.monotonic() + 120
        while not _answers(place):
            assert time.monotonic() < until and processes[1].poll() is None, (folder / "error.log").read_text()
            time.sleep(0.2)
        yield place
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with behind_nginx(tmp_path_factory.mktemp("nginx"), str, "--requests-per-second", "2") as place:
        yield place


def _answers(place: Place) -> bool:
    with closing(place.connect()) as client:
        try:
            client.request("GET", "/livez", headers={"Cookie": "session=anna"})
            return client.getresponse().status == 200
        except OSError:
            return False


@pytest.mark.prove
def test_browsers_are_sent_to_tls_and_told_to_stay_there(place: Place) -> None:
    with closing(HTTPConnection("127.0.0.1", place.plain_port, timeout=60)) as client:
        client.request("GET", "/x?y", headers={"Host": "localhost"})
        answer = client.getresponse()
        assert (answer.status, answer.getheader("location")) == (301, "https://localhost/x?y")
    with closing(place.connect()) as client:
        client.request("GET", "/", headers={"Authorization": f"Bearer {place.key}"})
        answer = client.getresponse()
        assert answer.status == 200
        assert answer.getheader("strict-transport-security") == "max-age=31536000"
        assert "default-src 'none'" in str(answer.getheader("content-security-policy"))


@pytest.mark.prove
def test_a_stream_arrives_while_it_is_open(place: Place) -> None:
    mine = {"Authorization": f"Bearer {place.key}", "Content-Type": "application/json"}
    with closing(place.connect()) as client, closing(place.connect()) as streaming:
        client.request("POST", "/v1/jobs", json.dumps({"model": "llama-tiny", "ranks": 2, "trials": 3}), mine)
        job_id = json.loads(client.getresponse().read())["id"]
        streaming.request("GET", f"/v1/jobs/{job_id}/events/stream", headers=mine)
        stream = streaming.getresponse()
        assert stream.status == 200
        while b"event: job_created" not in stream.readline():
            pass
        client.request("POST", f"/v1/jobs/{job_id}/cancel", headers=mine)
        assert client.getresponse().read()
        assert b"event: job_asked" in stream.read()  # to the end, which is the job's


@pytest.mark.prove
def test_what_a_client_says_of_its_address_does_not_count(place: Place) -> None:
    """With a new address for each request nobody would ever wait."""
    statuses = []
    with closing(place.connect()) as client:
        for number in range(60):
            client.request(
                "GET", "/livez", headers={"X-Forwarded-For": f"10.0.0.{number}", "Forwarded": f"for=10.1.0.{number}"}
            )
            answer = client.getresponse()
            answer.read()
            statuses.append(answer.status)
    assert set(statuses) == {200, 429}


class SignIn(BaseHTTPRequestHandler):
    """Answers as oauth2-proxy does with --set-xauthrequest: the cookie names the person."""

    def do_GET(self) -> None:
        person = (self.headers["Cookie"] or "").removeprefix("session=")
        is_asked = self.path == "/oauth2/auth"
        self.send_response(202 if is_asked and person else 401 if is_asked else 200)
        if is_asked and person:
            self.send_header("X-Auth-Request-Email", f"{person}@example.com")
            self.send_header("X-Auth-Request-Groups", "vision,staff")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_people_who_are_signed_in_are_who_the_proxy_says(tmp_path: Path) -> None:
    """The lines of docs/deploy.md, in front of which clients claim to be others."""
    blocks = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/deploy.md").read_text(encoding="utf-8"), re.DOTALL)
    headers = ("--identity-header", "X-Auth-Request-Email", "--groups-header", "X-Auth-Request-Groups")
    with ThreadingHTTPServer(("127.0.0.1", 0), SignIn) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        in_server, in_location = (block.replace("127.0.0.1:4180", f"127.0.0.1:{server.server_port}") for block in blocks)

        def change(recipe: str) -> str:
            first, second = "    location / {\n", "        proxy_pass http://autotune;\n"
            assert first in recipe and second in recipe
            return recipe.replace(first, in_server + first).replace(second, second + in_location)

        with behind_nginx(tmp_path, change, *headers) as place:
            forged = {"X-Auth-Request-Email": "root", "X-Auth-Request-Groups": "administrator"}
            submitters = []
            for cookie in ({"Cookie": "session=anna"}, {"Cookie": "session=bert", **forged}):
                with closing(place.connect()) as client:
                    body = json.dumps({"model": "llama-tiny", "ranks": 2, "trials": 3, "team": "vision"})
                    client.request("POST", "/v1/jobs", body, {**cookie, "Content-Type": "application/json"})
                    answer = client.getresponse()
                    assert answer.status == 202
                    submitters.append(json.loads(answer.read())["submitter"])
            assert submitters == ["anna@example.com", "bert@example.com"]
            for unknown in ({}, forged, {"Authorization": f"Bearer {place.key}"}):
                with closing(place.connect()) as client:
                    client.request("GET", "/v1/jobs", headers=unknown)
                    assert client.getresponse().status == 403
        server.shutdown()
