"""The recipe with nginx, run: TLS, whose address counts, and streams that arrive at once."""

import json
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("nginx")
    certificate, key = self_signed(folder)
    ports = [free_port() for _ in range(3)]
    with open_store(str(folder / "jobs.db")) as store:
        text = store.keys.create("anna", {"read", "submit"})[1]
    recipe = (ROOT / "examples/deploy/nginx.conf").read_text()
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
    serve = ["serve", "--no-worker", "--keys", "--port", str(ports[0]), "--trusted-proxy", "127.0.0.1"]
    serve += ["--requests-per-second", "2"]
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


def _answers(place: Place) -> bool:
    with closing(place.connect()) as client:
        try:
            client.request("GET", "/livez")
            return client.getresponse().status == 200
        except OSError:
            return False


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
