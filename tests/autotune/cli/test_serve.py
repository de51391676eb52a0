"""`autotune serve` with several API processes, and with TLS."""

import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import psutil
import pytest
from served import end, start, until

from autotune.cli.serve import _require_tls_files
from autotune.client import Client
from autotune.errors import RequestError
from tests.certificates import self_signed
from tests.ports import free_port


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def api_processes(parent: "subprocess.Popen[str]") -> list[psutil.Process]:
    return [child for child in psutil.Process(parent.pid).children() if is_api_process(child)]


def is_api_process(child: psutil.Process) -> bool:
    try:
        return any("spawn_main" in word for word in child.cmdline())
    except psutil.Error:  # it has ended
        return False


@pytest.mark.nightly
def test_several_processes_share_a_port(tmp_path: Path) -> None:
    """One that is killed is replaced, none outlives the first, and jobs are the same to all."""
    port = free_port()
    server = start(tmp_path, "serve", "--no-worker", "--port", port, "--workers", 2)
    try:
        until(lambda: answers(port))
        until(lambda: len(api_processes(server)) == 2)
        with Client(f"http://127.0.0.1:{port}") as client:
            job = client.submit("llama-tiny", ranks=2, trials=3)
        first, second = api_processes(server)
        for ended, sign in ((first, signal.SIGKILL), (second, signal.SIGTERM)):
            before = {child.pid for child in api_processes(server)}
            ended.send_signal(sign)
            until(lambda: {child.pid for child in api_processes(server)} - before)  # noqa: B023  it is called here
        until(lambda: len(api_processes(server)) == 2)
        for _ in range(8):  # each is a connection of its own
            with Client(f"http://127.0.0.1:{port}") as client:
                assert client.job(job).state == "QUEUED"
        other = start(tmp_path, "serve", "--no-worker", "--port", port, "--workers", 2)
        _, error = other.communicate(timeout=60)
        assert (other.returncode, "in use" in error) == (2, True)
        left = api_processes(server)
        server.send_signal(signal.SIGTERM)
        _, error = server.communicate(timeout=60)
        assert server.returncode == 0
        assert error.count("was ended by a signal; starting another") == 2
        assert "Traceback" not in error
        assert not [child for child in left if child.is_running()]
    finally:
        server.kill()
        server.communicate()


@pytest.mark.nightly
def test_processes_end_when_the_first_is_killed(tmp_path: Path) -> None:
    port = free_port()
    server = start(tmp_path, "serve", "--no-worker", "--port", port, "--workers", 2)
    until(lambda: answers(port))
    until(lambda: len(api_processes(server)) == 2)
    children = api_processes(server)
    os.kill(server.pid, signal.SIGKILL)
    end(server)
    until(lambda: not any(child.is_running() for child in children))
    assert not answers(port)


def test_files_of_tls_are_looked_at_before_anything_listens(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    _require_tls_files(None, None)
    _require_tls_files(certificate, key)
    with pytest.raises(RequestError, match="tls_key: is missing"):
        _require_tls_files(certificate, None)
    with pytest.raises(RequestError, match="tls_certificate: is missing"):
        _require_tls_files(None, key)
    with pytest.raises(RequestError, match="cannot be read"):
        _require_tls_files(certificate, tmp_path / "nowhere.pem")
    with pytest.raises(RequestError, match="cannot be used"):
        _require_tls_files(certificate, certificate)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(RequestError, match="cannot be used"):
        _require_tls_files(certificate, self_signed(other)[1])
