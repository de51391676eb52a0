"""Branches that only CUDA executes, with a stand-in for what `torch.cuda` and the driver answer.

Which branch has its substitute where is declared in `benchmarks/gpu/branches.py`.
"""

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor import detect, profile
from executor.engine import RankContext
from executor.engines.command.watch import device_bytes
from executor.engines.deepspeed import package
from executor.engines.session import ParallelSession
from executor.measurement import device as devices
from executor.measurement.device import DeviceEvents, environment, set_expandable_segments
from executor.measurement.kernels import compute_cases, host_copy
from executor.measurement.microbenchmark import Stopwatch, _Bench, _free_bytes, _left_over
from executor.parallel import copies
from executor.parallel.copies import HostPool
from executor.parallel.graphs import CudaCapture
from executor.parallel.summed_products import add_product, can_add
from executor.profile import ModuleClock
from executor.runners import rank_loop
from executor.trial import process
from search_spaces.clusters.microbenchmark import Operation

CUDA = torch.device("cuda", 0)
CONTEXT = RankContext(rank=0, world_size=1, device=CUDA)


class Cuda:
    """What `torch.cuda` answers; `calls` are the names of what was asked for, `clock` the device's time in milliseconds."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.clock = 0.0

    def answer(self, name: str, value: object = None) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> object:
            self.calls.append(name)
            return value

        return call

    def event(self, **_: bool) -> Any:
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            self.calls.append("record")
            event.at = self.clock

        event.record = record
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def work(self) -> None:
        """A quarter of a second of the device's time, none of the host's."""
        self.calls.append("work")
        self.clock += 250.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    properties = SimpleNamespace(uuid="0123", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=1)
    answers = {
        "synchronize": None, "empty_cache": None, "mem_get_info": (600, 1000), "max_memory_reserved": 300,
        "memory_reserved": 250, "memory_allocated": 7, "memory_stats": {"num_alloc_retries": 3},
        "get_device_name": "H", "is_bf16_supported": False,
        "get_device_capability": (9, 0), "get_device_properties": properties, "graph_pool_handle": (0, 1),
    }  # fmt: skip
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, stand_in.answer(name, value))
    monkeypatch.setattr(torch.cuda, "Event", stand_in.event)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    return stand_in


def tell(monkeypatch: pytest.MonkeyPatch, output: str | None) -> list[list[str]]:
    """What a command of the driver prints; None: it is not there. Returns the commands, as they come."""
    asked: list[list[str]] = []

    def run(words: list[str], **_: object) -> Any:
        asked.append(words)
        if output is None:
            raise FileNotFoundError(words[0])
        return SimpleNamespace(stdout=output)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_without_the_drivers_command_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, None)
    assert detect.local_gpus() is None
    assert device_bytes([1]) is None


def test_the_driver_lists_devices_and_what_processes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tell(monkeypatch, "0, GPU-a, H100, 81559\n1, GPU-b, H100, 81559\n2, GPU-c, other, 10\n")
    found = detect.local_gpus()
    assert found is not None
    assert (found.name, found.count, found.memory_bytes) == ("H100", 2, 81559 * 2**20)
    tell(monkeypatch, "11, 3\n12, 4\n13, 5\n")
    assert device_bytes([11, 13]) == 8 * 2**20


@pytest.mark.parametrize("newer", [True, False])
def test_segments_change_when_nothing_is_reserved(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    monkeypatch.setattr(devices, "_set_allocator", cuda.calls.append if newer else None)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", cuda.calls.append)
    set_expandable_segments(CUDA, True)
    assert cuda.calls == ["empty_cache", "expandable_segments:True"]


def test_steps_and_samples_are_timed_by_the_devices_clock(cuda: Cuda) -> None:
    events = DeviceEvents(CUDA)
    for _ in range(3):
        events.start()
        cuda.work()
        events.stop()
        cuda.work()
    assert events.mean() == 0.25
    cuda.calls.clear()
    assert Stopwatch(CONTEXT)._sample(cuda.work, 2, on_host=False) == 0.5
    assert cuda.calls == ["synchronize", "record", "work", "work", "record", "synchronize"]
    cuda.calls.clear()
    assert Stopwatch(CONTEXT)._sample(cuda.work, 1, on_host=True) < 0.2
    assert cuda.calls == ["synchronize", "work", "synchronize"]
    timing = Stopwatch(CONTEXT).measure(cuda.work, 2.0)
    assert timing.median == 0.25


def test_places_are_timed_by_the_devices_clock(cuda: Cuda) -> None:
    clock = ModuleClock(CUDA)
    clock.start()
    place: Any = ("block", "forward")
    clock.move(place)
    cuda.work()
    assert clock.stop()[place] == 0.25
    assert cuda.calls[-1] == "synchronize"


def test_a_profiled_step_ends_when_the_device_has_ended(cuda: Cuda) -> None:
    session: Any = SimpleNamespace(prepare=lambda step: None, train_step=cuda.work)
    profile._ProfiledSteps(session, CUDA).run()
    assert cuda.calls == ["work", "synchronize"]


def test_an_environment_names_device_and_libraries(cuda: Cuda) -> None:
    found = environment(CUDA)
    assert (found["device"], found["nccl"], found["compute_capability"]) == ("H", "2.27.5", "9.0")


def test_a_measurement_asks_the_device_what_it_has(cuda: Cuda) -> None:
    assert _free_bytes(CONTEXT) == 600.0
    assert _left_over(CUDA) == 7
    assert cuda.calls[-2:] == ["empty_cache", "memory_allocated"]
    cases = list(compute_cases(CUDA, ("fp32", "bf16")))
    assert {case.precision for case in cases} == {"fp32"}, "bf16 is not supported"
    assert {Operation.TO_HOST, Operation.TO_DEVICE, Operation.HOST_UPDATE} <= {case.operation for case in cases}
    case: Any = SimpleNamespace(precision="bf16", operation=Operation.COPY)
    on_cpu = SimpleNamespace(_context=SimpleNamespace(device=torch.device("cpu")))
    assert _Bench._weight(SimpleNamespace(_context=CONTEXT), case) == 1.0 != _Bench._weight(on_cpu, case)  # type: ignore[arg-type]


@pytest.mark.parametrize("down", [True, False])
def test_copies_that_are_timed_are_of_pinned_memory(monkeypatch: pytest.MonkeyPatch, down: bool) -> None:
    zeros, made = torch.zeros, []

    def on_cpu(elements: int, *, device: object = None, pin_memory: bool = False) -> Tensor:
        made.append((device, pin_memory))
        return zeros(elements)

    monkeypatch.setattr(torch, "zeros", on_cpu)
    assert host_copy(4, CUDA, down=down)().equal(zeros(4))
    assert made == [(CUDA, False), (None, True)]


def test_a_device_has_an_address_on_its_bus(cuda: Cuda) -> None:
    assert process._pci_address(CUDA) == "0000:3b:01.0"


def test_a_rank_joins_nccl_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: asked.update(index=device))
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: SimpleNamespace(port=1))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: asked.update(given, backend=backend))
    monkeypatch.setattr(rank_loop, "_set_environment", lambda *_: None)
    monkeypatch.setattr(rank_loop, "group_options", lambda backend: None)  # builds for CPUs lack NCCL's
    message = {"rank": 0, "world_size": 1, "device": "cuda:1", "address": "a", "port": None, "backend": "nccl"}
    message |= {"local_world_size": 1, "shares_device": False}
    context = rank_loop.join(message, lambda _: None)
    assert asked["index"] == asked["device_id"] == context.device == torch.device("cuda:1")
    rank_loop.join({**message, "backend": "gloo"}, lambda _: None)
    assert asked["device_id"] is None


def test_a_rank_tells_its_devices_and_gives_memory_back(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"device_count": 2, "current_accelerator": CUDA}
    for name, value in answers.items():
        monkeypatch.setattr(torch.accelerator, name, cuda.answer(name, value))
    ready = rank_loop._ready()
    assert (ready["accelerator"], ready["device_count"]) == ("cuda", 2)
    given: list[str] = []
    loop: Any = SimpleNamespace(_frozen=True, _malloc_trim=None, _counters=SimpleNamespace(release=lambda: given.append("all")))
    rank_loop.RankLoop._release_memory(loop, failed=False)
    assert given == ["all"]


def test_deepspeed_is_told_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "LOCAL_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "7")
    package._set_environment(RankContext(rank=3, world_size=4, device=torch.device("cuda", 1)))
    assert [package.os.environ[name] for name in ("DS_ACCELERATOR", "LOCAL_RANK")] == ["cuda", "1"]


def test_streams_are_asked_for_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", lambda device: ("stream", device))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: ("current", device))
    assert copies.make_stream(CUDA) == ("stream", CUDA)
    assert copies.current_stream(CUDA) == ("current", CUDA)
    assert copies.make_stream(torch.device("cpu")) is None
    assert not copies.is_on_host(torch.empty(0, device="meta"))


class Driver:
    """Records the memory that is registered."""

    def __init__(self, error: int) -> None:
        self.registered: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_pinned_memory_takes_no_more_than_its_size_and_is_registered_as_long_as_a_tensor_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    for device in (torch.device("cpu"), CUDA):
        pool = HostPool(device)
        pinned, pages = pool.zeros(1100, torch.float32, pinned=True), pool.pages(8192)
        pool.zeros(4, torch.float32)
        assert not pinned.any()
        assert pool.bytes == 4400 + 8192 + 16
        expected = {pinned.data_ptr(): 4400, pages.data_ptr(): 8192} if device == CUDA else {}
        assert driver.registered == expected
    part = pinned[:8]
    del pool, pinned, pages
    assert [*driver.registered] == [part.data_ptr()]
    del part
    assert not driver.registered


def test_memory_that_the_driver_does_not_pin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    with pytest.raises(RuntimeError, match="cannot be pinned: CUDA error 2"):
        HostPool(CUDA).zeros(4, torch.float32, pinned=True)


def test_the_host_does_not_wait_where_streams_do() -> None:
    def told(device: torch.device) -> float | None:
        session: Any = SimpleNamespace(
            context=SimpleNamespace(device=device),
            replicas=[SimpleNamespace(reports_waits=True)],
            groups=SimpleNamespace(clock=SimpleNamespace(seconds=1.5)),
        )
        return ParallelSession.waited_seconds(session)

    assert told(CUDA) is None
    assert told(torch.device("cpu")) == 1.5


def test_blocks_are_captured_in_one_pool_whose_segments_are_counted(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def make(calls: tuple[nn.Module, ...], samples: tuple[Any, ...], pool: object) -> tuple[nn.Module, ...]:
        asked.update(calls=calls, samples=samples, pool=pool)
        return calls

    sizes = ({"segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 60},)
    others = ({"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 1000},)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [*sizes, *others])
    blocks, samples = [nn.Linear(2, 2), nn.Linear(2, 2)], [torch.zeros(1, 2), torch.zeros(1, 2)]
    capture = CudaCapture()
    graphed = capture.graph(blocks, samples)
    assert [call.__self__ for call in graphed] == blocks  # type: ignore[attr-defined]
    assert asked == {"calls": tuple(blocks), "samples": ((samples[0],), (samples[1],)), "pool": (0, 1)}
    beside = 2 * 2 * 8  # of two samples of two numbers, and of the gradients that come in
    assert capture.held() == (100 + beside, 60 + beside)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_add_to_sums_in_fp32(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_add(CUDA, kind, torch.float32)
    assert not can_add(CUDA, torch.float32, kind)
    assert not can_add(torch.device("cpu"), kind, torch.float32)
    calls: list[dict[str, Any]] = []

    def addmm(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, beta: int, out: Tensor) -> Tensor:
        """As the device's kernel checks its arguments [torch, aten/src/ATen/native/cuda/Blas.cpp]."""
        assert out is total and out_dtype == out.dtype == torch.float32 and left.dtype == right.dtype == kind
        calls.append({"beta": beta, "shape": (left.shape[0], right.shape[1])})
        return out.mul_(beta).add_(left.float() @ right.float()) if beta else out.copy_(left.float() @ right.float())

    gradient, x, total = torch.randn(5, 3).to(kind), torch.randn(5, 2).to(kind), torch.full((3, 2), torch.nan)
    monkeypatch.setattr(torch, "addmm", addmm)
    for first in (True, False):
        add_product(total, gradient, x, first)
    assert calls == [{"beta": 0, "shape": (3, 2)}, {"beta": 1, "shape": (3, 2)}]
    torch.testing.assert_close(total, 2 * (gradient.float().T @ x.float()))


def test_torch_has_a_product_that_adds_to_fp32() -> None:
    """Its shape on tensors without data, in every supported torch."""
    gradient, x = (torch.empty(5, width, dtype=torch.bfloat16, device="meta") for width in (3, 2))
    add_product(torch.empty(3, 2, device="meta"), gradient, x, False)
