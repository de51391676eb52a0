"""Two hosts, each a network namespace with its own address and Ray node; the link between them is cut in mid-trial.

Ray's nodes are started, and started again, by the recipe's own scripts (examples/deploy).
"""

import contextlib
import json
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.shaped_link import run_command, why_not
from benchmarks.common.shaped_network import ShapedNetwork
from tests.documents import check_document

ROOT = Path(__file__).parents[3]
KEEPER = ROOT / "examples/deploy/keep-ray-node.sh"
DRIVER = Path(__file__).with_name("two_hosts_driver.py")
HEALTH = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 1000, "failure_threshold": 4}
"""A node that does not answer is declared dead after some 5 s."""
MISSING = why_not() if "AUTOTUNE_CHAOS_KILLS" in os.environ else "takes a minute; runs with `make chaos`"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.ray,
    pytest.mark.chaos,
    pytest.mark.skipif(MISSING is not None, reason=f"two hosts: {MISSING}"),
]


class Hosts:
    """Processes on the hosts of a network, each host with a name of its own."""

    def __init__(self, network: ShapedNetwork, folder: Path) -> None:
        self.network, self.folder = network, folder
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, host: int, *command: object, **streams: Any) -> subprocess.Popen[str]:
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),  # has a token, which the head then asks for
            "RESTART_SECONDS": "1",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            **{f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()},
        }
        for name in ("RAY_ADDRESS", "AUTOTUNE_RAY_ADDRESS", "RAY_AUTH_MODE"):
            environment.pop(name, None)
        if command[0] != KEEPER:  # which finds out by itself
            environment["RAY_AUTH_MODE"] = "token"
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{host}")
        words = [*self.network.command(host), *named, *map(str, command)]
        process = subprocess.Popen(words, env=environment, text=True, **streams)
        self._processes.append(process)
        return process

    def keep_node(self, host: int, *words: object) -> None:
        """A Ray node with two CPUs, kept by the recipe's supervisor."""
        with (self.folder / f"host{host}.log").open("w") as log:
            options = ("--num-cpus=2", "--num-gpus=0", f"--object-store-memory={80 * 2**20}")
            self.start(host, KEEPER, *words, *options, stdout=log, stderr=log)

    def switch_port(self, host: int, state: str) -> None:
        """Pull the host's cable, or put it back: the host itself keeps its interface and address."""
        run_command("ip", "-n", self.network.names[-1], "link", "set", f"port{host}", state)

    def pids(self) -> list[int]:
        """Everything that runs on any of the hosts."""
        told = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in self.network.names]
        return [int(pid) for answer in told for pid in answer.stdout.split()]

    def end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    # Paths of sockets are at most 107 bytes, so that Ray's folder must have a short one.
    folder = Path(tempfile.mkdtemp(prefix="at2h", dir="/tmp"))
    (folder / ".ray").mkdir()
    (folder / ".ray/auth_token").write_text(secrets.token_hex(32))
    try:
        with ShapedNetwork(2, "1gbit") as network:
            hosts = Hosts(network, folder)
            try:
                yield hosts
            finally:
                hosts.end()
                for pid in hosts.pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Lines:
    """What the driver tells, each line waited for up to a limit."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._folder = folder
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def wait_for(self, key: str, seconds: float = 180.0) -> dict[str, Any]:
        limit = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(limit - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"waited {seconds:g} s for {key}: {self._told()}") from None
            assert line is not None, f"the driver ended; waited for {key}: {self._told()}"
            if not line.startswith("{"):  # Ray tells of the node that it lost on standard output
                continue
            told: dict[str, Any] = json.loads(line)
            if key in told:
                return told

    def _told(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.log")))

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as told:
            for line in told:
                self._lines.put(line)
        self._lines.put(None)


def require_sound(hosts: Hosts, address: str, other: str) -> None:
    """The commands for clusters find both hosts, and the link between them, in order."""
    words = (sys.executable, "-c", "from autotune.cli import main; main()")
    options = ("--ray-address", address, "--db", hosts.folder / "jobs.db", "--json")
    shown = hosts.start(0, *words, "cluster", *options, stdout=subprocess.PIPE)
    output = shown.communicate(timeout=60)[0]
    check_document(("cluster", *options), output)
    nodes = json.loads(output)["nodes"]
    assert [(node["host"], node["alive"]) for node in nodes] == [("host0", True), ("host1", True)]
    checked = hosts.start(0, *words, "doctor", "--cluster", *options, stdout=subprocess.PIPE)
    output = checked.communicate(timeout=120)[0]
    check_document(("doctor", *options), output)
    findings = {item["name"]: item for item in json.loads(output)}
    (pair,) = (item for name, item in findings.items() if name.startswith("all-reduce"))
    for item in (pair, findings["ports"], findings[f"gloo's interface on {other}"], findings["torch"]):
        assert item["good"], item
    assert "GB/s for 16 MiB (gloo)" in pair["text"]
    assert findings[f"gloo's interface on {other}"]["text"] == "GLOO_SOCKET_IFNAME=link0"


def test_a_cut_link_loses_the_trial_and_the_node_comes_back(hosts: Hosts) -> None:
    head, other = (hosts.network.address(host) for host in range(2))
    hosts.keep_node(0, "head", f"{head}:6379", f"--temp-dir={hosts.folder}")
    hosts.keep_node(1, "worker", f"{head}:6379")
    with (hosts.folder / "driver.log").open("w") as errors:
        driver = hosts.start(0, sys.executable, DRIVER, f"{head}:6379", stdout=subprocess.PIPE, stderr=errors)
    lines = Lines(driver, hosts.folder)
    before = lines.wait_for("nodes")["nodes"]
    assert sorted(before.values()) == [head, other]
    while lines.wait_for("step")["phase"] != "measure":
        pass

    hosts.switch_port(1, "down")
    lost = lines.wait_for("result")["result"]
    assert lost["outcome"] == "LOST", lost
    assert other in f"{lost['message']} {lost['traceback']}", "the node is not named"
    assert lines.wait_for("gone")["gone"] == [other]

    hosts.switch_port(1, "up")
    after = lines.wait_for("nodes")["nodes"]
    assert sorted(after.values()) == [head, other]
    assert len(set(after) - set(before)) == 1, "the supervisor starts a new node; Ray does not take the old one back"
    again = lines.wait_for("result")["result"]
    assert again["outcome"] == "OK", again
    assert again["samples_per_second"]["mean"] > 0
    assert {rank["host"] for rank in again["ranks"]} == {"host0", "host1"}
    assert driver.wait(60) == 0
    require_sound(hosts, f"{head}:6379", other)

    hosts.end()
    limit = time.monotonic() + 15
    while hosts.pids() and time.monotonic() < limit:
        time.sleep(0.2)
    assert hosts.pids() == []
