"""What CUDA is asked for memory and clocks, and what becomes of the answers. The driver and the allocators are substitutes."""

import ctypes
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.engine import RankContext
from executor.measurement import device, memory
from executor.measurement.device import (
    COUNTERS,
    ClockReading,
    ClockState,
    ClockWatch,
    CudaCounters,
    DeviceCounters,
    Nvml,
    counters_of,
)
from executor.measurement.memory import SLACK_BYTES, account_step, host_bound

CUDA = torch.device("cuda", 0)


def test_the_answers_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answers = {
        "memory_allocated": 10, "max_memory_allocated": 25, "max_memory_reserved": 40, "memory_reserved": 30,
        "mem_get_info": (20, 100),
        "memory_stats": {"num_alloc_retries": 3}, "synchronize": None, "reset_peak_memory_stats": None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda where, name=name, answer=answer: asked.append((name, where)) or answer)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.current": 7})
    counters = counters_of(CUDA)
    assert (counters.allocated_bytes(), counters.peak_reserved_bytes(), counters.reserved_bytes()) == (10, 40, 30)
    assert (counters.memory_in_use(), counters.outside_bytes(), counters.pinned_bytes()) == ((80, 20), 50, 7)
    assert (counters.peak_allocated_bytes(), counters.allocation_retries()) == (25, 3)
    counters.reset_peaks()
    counters.synchronize()
    assert asked[-2:] == [("reset_peak_memory_stats", CUDA), ("synchronize", CUDA)]
    assert {where for _, where in asked} == {CUDA}


def test_a_device_that_answers_nothing_any_more_is_no_further_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert (counters_of(CUDA).memory_in_use(), counters_of(CUDA).outside_bytes()) == (None, None)


def test_pinned_memory_is_given_back_with_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: given.append("device"))
    monkeypatch.setattr(device, "_empty_host_cache", lambda: given.append("pinned"))
    counters_of(CUDA).release()
    assert given == ["device", "pinned"]


class Substitute(DeviceCounters):
    """A device that tells of its memory."""

    def allocated_bytes(self) -> int:
        return 1000

    def outside_bytes(self) -> int:
        return 300


def test_the_memory_step_asks_for_no_activity_of_cuda_and_counts_what_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPTI, once started, would slow down graphs that were captured before it."""
    asked: list[Any] = []
    real = memory.profile
    monkeypatch.setitem(COUNTERS, "cuda", Substitute)
    monkeypatch.setattr(memory, "profile", lambda **what: asked.append(what) or real(**what))
    account = account_step(lambda: torch.ones(10), list, CUDA)
    assert [what["activities"] for what in asked] == [[torch.profiler.ProfilerActivity.CPU]]
    assert (account.peak, account.outside, account.needed) == (1000, 300, 1300)
    assert account_step(lambda: None, list, torch.device("cpu")).outside is None


class Peaks(Substitute):
    """Its allocator reports the peak, too."""

    peak = 0

    def allocated_bytes(self) -> int:
        return 0

    def peak_allocated_bytes(self) -> int:
        return self.peak


@pytest.mark.parametrize(("peak", "activations", "buffers"), [(300, 300, 0), (450, 400, 50)])
def test_the_allocators_peak_is_the_peak(monkeypatch: pytest.MonkeyPatch, peak: int, activations: int, buffers: int) -> None:
    """A release that no thread reports, and rounding that none does."""
    monkeypatch.setattr(Peaks, "peak", peak)
    monkeypatch.setitem(COUNTERS, "cpu", Peaks)
    kept: list[torch.Tensor] = []
    account = account_step(lambda: kept.append(torch.ones(100)), list, torch.device("cpu"))
    assert (account.peak, account.by_tag["activations"], account.by_tag["buffers"]) == (peak, activations, buffers)
    assert sum(account.by_tag.values()) == peak
    assert account.tag_peaks["activations"] == activations


def test_what_bounds_the_hosts_memory_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of an accelerator says nothing of what offloading may fill."""
    monkeypatch.setattr(memory, "host_memory_bytes", lambda: 2**40)
    place = {"rank": 0, "world_size": 8, "ranks_on_host": 8}
    assert host_bound(RankContext(device=CUDA, **place), 2**30, 2**33) == 2**37 + SLACK_BYTES
    assert host_bound(RankContext(device=torch.device("cpu"), **place), 2**30, 2**33) == 2**31 + 2**33 + SLACK_BYTES
    assert host_bound(RankContext(device=CUDA, **place), None, 2**33) is None


class Library:
    """Stands in for libnvidia-ml: an H100 at 1,755 MHz that is too hot."""

    fails = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 42
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetClockInfo(self, handle: ctypes.c_void_p, kind: int, clock: Any) -> int:
        assert (handle.value, kind) == (42, 1)
        clock._obj.value = 1755
        return self.fails

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: ctypes.c_void_p, reasons: Any) -> int:
        reasons._obj.value = 0x40
        return 0


def test_the_drivers_library_tells_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: SimpleNamespace(uuid="1"))
    assert CudaCounters(CUDA).clock() == ClockReading(sm_mhz=1755.0, reasons=0x40)
    assert device.open_nvml("GPU-2") is None, "another device"
    failing = Library()
    failing.fails = 3
    assert Nvml(failing, "GPU-1").read() is None


def test_the_clock_is_that_of_the_timed_steps() -> None:
    """Before them the device warms up, and after them it is idle: neither counts."""
    now = ClockReading(sm_mhz=300.0, reasons=0x08)  # slowed down, but before
    more, seen = threading.Condition(), []

    def look() -> ClockReading:
        with more:
            seen.append(now)
            more.notify_all()
            return now

    def await_two_more() -> None:
        """When the second one begins, the first is recorded."""
        with more:
            count = len(seen)
            more.wait_for(lambda: len(seen) >= count + 2)

    with ClockWatch(look, interval_seconds=0.0) as clock:
        with more:
            now = ClockReading(sm_mhz=1980.0, reasons=0)
        await_two_more()
        began = time.monotonic()
        await_two_more()
    count = len(seen)
    assert clock.since(began) == ClockState(sm_clock_mhz=1980.0, throttled=False)
    assert clock.since(0.0).throttled
    now = ClockReading(sm_mhz=210.0, reasons=0)
    assert (len(seen), clock.since(0.0).throttled) == (count, True), "nothing is read when they are over"


def test_the_power_cap_is_a_reason_but_no_throttling() -> None:
    with ClockWatch(lambda: ClockReading(sm_mhz=1500.0, reasons=0x4 | 0x1)) as clock:
        pass
    state = clock.since(0.0)
    assert (state.throttled, state.reasons, state.variables()) == (False, ("power cap",), {"clock_reasons": "power cap"})


def test_a_device_without_a_clock_is_not_watched() -> None:
    with ClockWatch(counters_of(torch.device("cpu")).clock) as clock:
        assert "clock" not in {thread.name for thread in threading.enumerate()}
    assert clock.since(0.0) == ClockState()
