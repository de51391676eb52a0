"""Services for tests of the client: the real one in a thread, the real one as a process, and one that answers as it is told."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn

from api.app import create_app
from api.settings import Settings

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from autotune.cli import main; sys.exit(main())"]
MEASURED = {
    "outcome": "OK", "losses": [5.0, 4.5], "step_seconds": [0.1] * 5, "within_relative_error": 0.01, "peak_memory_bytes": 10**6,
    "samples_per_second": {"mean": 80.0, "low": 79.0, "high": 81.0},
}  # fmt: skip


@contextmanager
def service(database: str, **settings: Any) -> Iterator[str]:
    """The address of a service on the database, in a thread of this process."""
    app = create_app(Settings(database_url=database, **{"require_keys": False, **settings}))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    with patch("api.app.gc"):  # what a service sets aside once and for good; here many come and go in one process
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def start(folder: Path, *words: object) -> "subprocess.Popen[str]":
    """The command as a process, in the folder, on the database `jobs.db` there."""
    environment = os.environ | {"AUTOTUNE_DB": str(folder / "jobs.db"), "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.Popen(
        [*COMMAND, *map(str, words)], env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def start_service(folder: Path, port: int) -> "subprocess.Popen[str]":
    """`autotune serve --no-worker` as a process, once it is ready."""
    process = start(folder, "serve", "--no-worker", "--port", port)
    until(lambda: _answers(port), 30)
    return process


def start_worker(folder: Path, seconds_per_trial: float) -> "subprocess.Popen[str]":
    """`autotune worker` as a process, which answers every trial from a table."""
    (folder / "table.json").write_text(json.dumps({"*": MEASURED, "seconds_per_trial": seconds_per_trial}))
    return start(folder, "worker", "--replay", "table.json")


def end(process: "subprocess.Popen[str]") -> None:
    """End a process and close its pipes."""
    process.terminate()
    process.communicate(timeout=60)


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until it holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


@dataclass(frozen=True)
class Request:
    """What was sent."""

    method: str
    path: str
    """With its query."""
    headers: Mapping[str, str]
    """By name in lower case."""
    body: bytes


Answer = tuple[int, Mapping[str, str], bytes]
JSON = {"Content-Type": "application/json", "Autotune-API-Version": "1"}
PROBLEM = {"Content-Type": "application/problem+json", "Autotune-API-Version": "1"}
STREAM = {"Content-Type": "text/event-stream", "Autotune-API-Version": "1"}


@contextmanager
def answering(answer: Callable[[Request], Answer | None]) -> Iterator[str]:
    """The address of a server that answers so; None: it closes the connection without a word."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            told = answer(Request(self.command, self.path, headers, self.rfile.read(length)))
            if told is None:
                self.close_connection = True
                return
            self.send_response(told[0])
            for name, value in told[1].items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(told[2])

        def do_POST(self) -> None:
            self.do_GET()

        def do_PATCH(self) -> None:
            self.do_GET()

        def do_DELETE(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def forwarded(request: Request, url: str) -> Answer:
    """What the service at `url` answers to the request."""
    headers = {name: value for name, value in request.headers.items() if name != "host"}
    sent = urllib.request.Request(url + request.path, request.body or None, headers, method=request.method)
    with urllib.request.urlopen(sent) as answer:
        return answer.status, {name: value for name, value in answer.headers.items() if name != "connection"}, answer.read()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz"):
            return True
    except OSError:
        return False
