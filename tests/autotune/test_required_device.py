"""A job for GPUs whose ranks have none ends before its first trial, with one line that says what to do."""

import socket
from pathlib import Path

import pytest
import torch

from autotune.session.trial_requests import start_ranks
from executor.engines.command.trial import runs_on_cpu
from executor.errors import RunnerError
from executor.runners.gang_runner import GangsRunner
from executor.runners.local import LocalRunner
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.models.command import CommandModel
from search_spaces.trial import TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

NO_CUDA = torch.version.cuda is None and torch.version.hip is None
pytestmark = pytest.mark.skipif(not NO_CUDA, reason="this torch is built for accelerators")


def refused(runner: GangsRunner) -> str:
    with runner, pytest.raises(RunnerError) as raised:
        runner.measure(MicrobenchmarkRequest(attempt="a", world_size=1))
    return str(raised.value)


@pytest.mark.prove
def test_a_job_for_gpus_does_not_run_on_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forked_ranks: None) -> None:
    """Neither where its cluster has GPUs, nor where the device is left open and the driver lists some."""
    line = (
        f"device: this job needs cuda, but torch {torch.__version__} on host {socket.gethostname()} is built for cpu; install "
        "the CUDA build of torch there, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
    )
    assert refused(start_ranks("local", 1, "cuda")) == line
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA H100 80GB HBM3, 81559'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert refused(LocalRunner(1)) == line


@pytest.mark.parametrize(("kind", "on_cpu"), [("cuda", False), ("cpu", True), (None, True)])
def test_a_script_is_started_for_the_device_of_the_job(kind: str | None, on_cpu: bool) -> None:
    """Its own torch may have CUDA where that of the ranks that watch it has none."""
    request = TrialRequest(
        attempt="a", model=CommandModel(arguments=("train.py",)), config=TrialConfig(),
        workload=Workload(global_batch_size=1, sequence_length=8), world_size=1, engine="command", device_kind=kind,
    )  # fmt: skip
    assert runs_on_cpu(request) is on_cpu
