"""The batch scripts and the entrypoint of the RayJob, run with real Ray nodes and trials.

Slurm is a stand-in (slurm.py); the jobs of Ray are its own.
"""

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.deploy.crds import FOLDER, ROOT
from tests.ports import free_port

DEPLOY = ROOT / "examples/deploy"
AUTOTUNE = f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; from autotune.cli import main; sys.exit(main())" "$@"\n'
QUESTION = ("llama-tiny", "--runner", "ray", "--ranks", "2", "--global-batch-size", "4")
BRIEF = ("--trial-seconds", "0.1")
pytestmark = [pytest.mark.nightly, pytest.mark.ray]


class Host:
    """A folder to submit from, in which `autotune`, `python3`, `ray`, `sbatch`, `srun` and `scontrol` are there to type."""

    def __init__(self, folder: Path) -> None:
        tools, state = folder / "bin", folder / "state"
        self.folder, self.state = folder / "work", state
        for path in (tools, state, self.folder, folder / "home"):
            path.mkdir()
        (tools / "autotune").write_text(AUTOTUNE)
        (tools / "autotune").chmod(0o755)
        for name in ("sbatch", "srun", "scontrol"):
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tools / "slurm"}/{name}" "$@"\n')
            (tools / name).chmod(0o755)
        (tools / "slurm").mkdir()
        for name in ("sbatch", "srun", "scontrol"):
            (tools / "slurm" / name).symlink_to(ROOT / "tests/deploy/slurm.py")
        hidden = ("AUTOTUNE_", "RAY_", "SLURM_")
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | {
            "PATH": f"{tools}:{DEPLOY}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder / "home"),
            "SLURM_STAND_IN": str(state),
            "AUTOTUNE_DEPLOY": str(DEPLOY),
            "RAY_TMPDIR": f"/tmp/{folder.name}"[:40],  # short: it is part of the paths of sockets
        }

    def call(self, *words: str, **further: str) -> str:
        ran = subprocess.run(words, cwd=self.folder, env=self.variables | further, capture_output=True, text=True)
        assert ran.returncode == 0, f"{shlex.join(words)}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def wait(self, condition: Callable[[], bool], seconds: float = 600) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.log()
            time.sleep(0.2)

    def end(self) -> None:
        """End all that still has this host's variables."""
        ours = [process for process in psutil.process_iter() if process.pid != os.getpid() and self._has(process)]
        for process in ours:
            process.kill()
        psutil.wait_procs(ours, 30)

    def _has(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("SLURM_STAND_IN") == str(self.state)
        except (psutil.Error, OSError):
            return False


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.end()


def preempt(host: Host) -> None:
    """The signal to the script alone, as at the end of its time."""
    os.kill(int((host.state / "batch.pid").read_text()), signal.SIGTERM)


def test_a_sweep_in_an_allocation_is_preempted_and_goes_on(host: Host) -> None:
    submitted = host.call(
        "sbatch", "--nodes=2", "--gpus-per-node=0", str(DEPLOY / "autotune.sbatch"), *QUESTION, *BRIEF, "--trials", "4"
    )
    assert submitted == "Submitted batch job 4242\n"
    host.wait(lambda: "trial 1:" in host.log())
    first = (host.state / "batch.pid").read_text()
    preempt(host)
    host.wait(lambda: (host.state / "batch.pid").read_text() != first)
    host.wait((host.state / "ended").exists)
    log = host.log()
    assert (host.state / "ended").read_text() == "0", log
    assert "succeeded: 4 of 4 trials are spent" in log
    best = json.loads((host.folder / "best-config-4242.json").read_text())
    assert (best["job"]["request"]["ranks"], best["job"]["request"]["runner"]) == (2, "ray")
    assert len(json.loads(host.call("autotune", "jobs", "--db", "autotune-4242.db", "--json"))) == 1
    assert [path for path in psutil.process_iter() if host._has(path)] == [], "something outlives the job"


def test_a_service_in_an_allocation_continues_its_job(host: Host) -> None:
    port = str(free_port())
    service = {"AUTOTUNE_PORT": port}
    host.call("sbatch", "--nodes=1", "--gpus-per-node=0", str(DEPLOY / "autotune-service.sbatch"), **service)
    key = host.call("autotune", "keys", "create", "anna", "--db", "autotune-service.db").splitlines()[-1].split()[-1]
    client = {"AUTOTUNE_URL": f"http://127.0.0.1:{port}", "AUTOTUNE_API_KEY": key}
    host.wait(lambda: "the service is at" in host.log())
    host.call("bash", "-c", "until curl -sf $AUTOTUNE_URL/livez; do sleep 0.2; done", **client)
    job = host.call("autotune", "submit", *QUESTION, "--trials", "3", **client).strip()
    host.wait(lambda: json.loads(host.call("autotune", "show", job, "--json", **client))["trials"] != [])
    first = (host.state / "batch.pid").read_text()
    preempt(host)
    host.wait(lambda: (host.state / "batch.pid").read_text() != first)
    host.call("bash", "-c", "until curl -sf $AUTOTUNE_URL/livez; do sleep 0.2; done", **client)
    host.call("autotune", "watch", job, **client)
    assert json.loads(host.call("autotune", "show", job, "--json", **client))["job"]["state"] == "SUCCEEDED"


@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="Ray's jobs need ray[default]: make extras")
def test_the_entrypoint_of_the_ray_job(host: Host) -> None:
    """As KubeRay does it: a head without CPUs that has the dashboard, and the words handed to a shell as they stand."""
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text("utf-8"))["spec"]
    script, model, *_ = job["entrypoint"].split()
    assert model == "llama-3-8b"
    port, dashboard = free_port(), free_port()
    nodes = (
        f"--head --port={port} --num-cpus=0 --dashboard-host=127.0.0.1 --dashboard-port={dashboard}",
        f"--address=127.0.0.1:{port} --num-cpus=2",
    )
    for options in nodes:
        ours = ("--node-ip-address=127.0.0.1", "--num-gpus=0", f"--object-store-memory={80 * 2**20}")
        words = ("ray", "start", *options.split(), *ours)
        host.call(*words, AUTOTUNE_DB=str(host.folder / "rayjob.db"), AUTOTUNE_OUT=str(host.folder / "best-config.json"))
    address = ("--address", f"http://127.0.0.1:{dashboard}")
    entrypoint = shlex.join((script, *QUESTION, *BRIEF, "--trials", "3"))
    # A node's agent takes jobs some seconds after its node has started.
    submit = f"ray job submit {shlex.join(address)} --no-wait --submission-id {{}} -- {entrypoint}"
    submit = f"for _ in {{{{1..60}}}}; do {submit} && break; done"
    host.call("bash", "-c", submit.format("first"))
    host.wait(lambda: "trial 0:" in host.call("ray", "job", "logs", *address, "first"))
    host.call("ray", "job", "stop", *address, "first")
    host.call("bash", "-c", submit.format("second"))
    output = host.call("ray", "job", "logs", *address, "--follow", "second")
    assert "succeeded: 3 of 3 trials are spent" in output
    best = json.loads((host.folder / "best-config.json").read_text())
    assert (best["job"]["request"]["ranks"], best["job"]["request"]["runner"]) == (2, "ray")
