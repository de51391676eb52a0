"""A rank on the cores near its device: every thread of it, while the trial runs."""

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from executor.engine import RankContext
from executor.trial.process import bound_to_node, cores_near
from executor.trial.run import run_trial
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OWN = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(OWN) < 2, reason="with one core there is nothing to choose")
HALVES = (frozenset(OWN[: len(OWN) // 2]), frozenset(OWN[len(OWN) // 2 :]))


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Of this process's cores half on each of two nodes, and a device on the second."""
    for node, cores in enumerate(HALVES):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, sorted(cores))), encoding="ascii")
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n", encoding="ascii")
    return tmp_path


class Waiting:
    """A thread that was there before, or is started inside, and tells where it may run."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ended.wait)
        self._thread.start()

    @property
    def cores(self) -> set[int]:
        return os.sched_getaffinity(self._thread.native_id or 0)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def thread() -> Iterator[Waiting]:
    waiting = Waiting()
    yield waiting
    waiting.end()


@pytest.mark.parametrize("rank", [0, 1])
def test_all_threads_run_on_one_node_and_afterwards_where_they_did(
    sysfs: Path, thread: Waiting, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    threads = torch.get_num_threads()
    with bound_to_node(CPU, True, sysfs):
        assert os.sched_getaffinity(0) == thread.cores == HALVES[rank]
        assert torch.get_num_threads() <= len(HALVES[rank])
        later = Waiting()
        assert later.cores == HALVES[rank]
    assert os.sched_getaffinity(0) == thread.cores == later.cores == set(OWN)
    assert torch.get_num_threads() == threads
    later.end()


def test_a_trial_that_fails_leaves_the_process_as_it_was(sysfs: Path) -> None:
    with pytest.raises(ValueError, match="failed"), bound_to_node(CPU, True, sysfs):
        raise ValueError("failed")
    assert os.sched_getaffinity(0) == set(OWN)


def test_a_gpu_tells_its_node(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor.trial.process._pci_address", lambda _: "0000:3b:00.0")
    assert cores_near(CUDA, sysfs) == HALVES[1]
    monkeypatch.setattr("executor.trial.process._pci_address", lambda _: "0000:af:00.0")
    assert cores_near(CUDA, sysfs) == frozenset()  # of which the system tells nothing


def test_ranks_are_spread_in_equal_numbers(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    met = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        met.append(cores_near(CPU, sysfs))
    assert met == [HALVES[0], HALVES[0], HALVES[1], HALVES[1]]


def test_nothing_changes_where_nothing_is_to_choose(sysfs: Path, tmp_path: Path) -> None:
    with bound_to_node(CPU, False, sysfs):
        assert os.sched_getaffinity(0) == set(OWN)
    with bound_to_node(CPU, True, tmp_path / "elsewhere"):
        assert os.sched_getaffinity(0) == set(OWN)
    (sysfs / "devices/system/node/node0/cpulist").write_text("100000", encoding="ascii")  # none that this process may use
    with bound_to_node(CPU, True, sysfs):
        assert os.sched_getaffinity(0) == set(OWN)


def test_a_trial_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(_: Path) -> Mapping[int, frozenset[int]]:
        return dict(enumerate(HALVES))

    monkeypatch.setattr("executor.trial.process.numa_nodes", two)
    spec = ModelSpec(
        name="small", family="llama", num_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        ffn_hidden_size=24, vocab_size=32, sequence_length=16,
    )  # fmt: skip
    request = TrialRequest(
        attempt="one", model=spec, config=TrialConfig(numa_binding=True), world_size=1,
        workload=Workload(global_batch_size=2, sequence_length=16),
        fidelity=Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2, measure_memory=False),
    )  # fmt: skip
    met: list[set[int]] = []
    result = run_trial(RankContext(rank=0, world_size=1, device=CPU), request, lambda _: met.append(os.sched_getaffinity(0)))
    assert result.outcome is Outcome.OK
    assert all(cores == HALVES[0] for cores in met)
    assert met
    assert os.sched_getaffinity(0) == set(OWN)
