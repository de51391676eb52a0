"""What a checkup runs on a node, run here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from executor.errors import RunnerError
from executor.runners.ray import on_node
from executor.runners.ray.on_node import NodeProbe
from executor.runners.ray.runner import _gpus
from executor.runners.transport import RANK_MAIN

ROOT = Path(__file__).parents[3]
END = """
import json, sys
from executor.runners.ray.on_node import NodeProbe
probe, rank = NodeProbe(), int(sys.argv[1])
if rank == 0:
    port = probe.open_store("127.0.0.1")
    print(port, flush=True)
else:
    port = int(sys.argv[2])
print(json.dumps(probe.all_reduce(rank, "127.0.0.1", port, [4096, 65536], "gloo")))
"""


def test_a_node_tells_of_itself() -> None:
    found = NodeProbe().facts(RANK_MAIN)
    assert found["interfaces"]["lo"] == "127.0.0.1"
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"ray", "torch"} <= set(found["versions"])
    assert found["rank_main"] and found["shared_memory_bytes"] > 0
    assert not NodeProbe().facts("/none/rank_main.py")["rank_main"]


def test_a_node_tells_of_its_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"--query-gpu=name,driver_version": ["H100, 570.1", "H100, 570.1"], "topo": ["GPU0 NV18"]}
    monkeypatch.setattr(on_node, "_command", lambda _, asked, *__: told[asked])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    found = NodeProbe().facts(RANK_MAIN)
    assert (found["gpus"], found["topology"]) == (["H100", "H100"], ["GPU0 NV18"])
    assert found["versions"].items() >= {"driver": "570.1", "NCCL": "2.27.5"}.items()


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    is_cuda = True


def test_a_pair_of_devices_is_timed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    ones = torch.ones

    def on_device(size: int, device: torch.device) -> torch.Tensor:
        calls.append(device.type)
        return ones(size).as_subclass(OnCuda)

    monkeypatch.setattr(torch, "ones", on_device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(on_node, "_store", lambda *_, **__: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: calls.append(backend))
    monkeypatch.setattr(dist, "all_reduce", lambda _: calls.append("all_reduce"))
    assert len(NodeProbe().all_reduce(0, "a", 1, [4096], "nccl")["seconds"]) == 1
    assert calls[:5] == ["nccl", "cuda", "synchronize", "all_reduce", "synchronize"]


@pytest.mark.parametrize(
    ("wanted", "device", "there", "gpus"),
    [(None, "cuda", 8, 1), (None, "auto", 4, 1), (None, "auto", 3, 0), (0.5, "auto", 1, 0.5)],
)
def test_ranks_ask_for_devices_where_the_job_does(
    monkeypatch: pytest.MonkeyPatch, wanted: float | None, device: str, there: int, gpus: float
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": there})
    assert _gpus(4, wanted, device) == gpus
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(RunnerError, match="the Ray cluster has none"):
        _gpus(4, 1.0, device)


def test_what_is_installed_is_told_without_importing_it() -> None:
    assert [*on_node.installed({"torch": "torch", "missing": "no-such-distribution"})] == ["torch"]


def test_a_port_is_reached_and_a_closed_one_is_told() -> None:
    probe = NodeProbe()
    port = probe.listen()
    open_one, closed = probe.reach([("127.0.0.1", port), ("127.0.0.1", 1)])
    assert open_one == ""
    assert "refused" in closed


@pytest.mark.nightly
def test_a_pair_is_measured_by_both_of_its_ranks() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, "-c", END]
    with subprocess.Popen([*words, "0"], env=environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        port = first.stdout.readline().strip()
        second = subprocess.run([*words, "1", port], env=environment, capture_output=True, text=True, timeout=60)
        told = [json.loads(first.stdout.read()), json.loads(second.stdout)]
    assert all(len(answer["seconds"]) == 2 and min(answer["seconds"]) > 0 for answer in told)


@pytest.mark.prove
def test_a_rank_whose_other_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_node, "JOIN_SECONDS", 1.0)
    assert NodeProbe().all_reduce(1, "127.0.0.1", 1, [4096], "gloo")["problem"]
