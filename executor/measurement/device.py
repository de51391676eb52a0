"""What CUDA tells beside time and allocations. On other devices every answer is None."""

import contextlib
import subprocess
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

BAD_REASONS = 0x0000_0000_0000_00E8
"""Bits of NVML's clock event reasons that mean heat or power: hardware slow-down, software and hardware thermal, brake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """A look at the device after the timed steps."""

    reserved_bytes: int | None = None
    non_torch_bytes: int | None = None
    sm_clock_mhz: float | None = None
    throttled: bool | None = None


_set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
"""Changes the caching allocator of a running process, as PYTORCH_ALLOC_CONF does of a new one; None before torch 2.12."""


def set_expandable_segments(device: torch.device, expandable: bool) -> None:
    """Have the CUDA allocator grow its segments from now on, or not. What it has reserved is given back first."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    apply = _set_allocator or torch.cuda.memory._set_allocator_settings
    apply(f"expandable_segments:{expandable}")


def allocation_retries(device: torch.device) -> int | None:
    """Times that the caching allocator had to flush its cache, since the process started."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else None


def read_device(device: torch.device) -> DeviceState:
    """Reserved memory, memory outside torch, clock and throttling now."""
    if device.type != "cuda":
        return DeviceState()
    free, total = torch.cuda.mem_get_info(device)
    clock, reasons = _ask_driver(device)
    return DeviceState(
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        non_torch_bytes=max(total - free - torch.cuda.memory_reserved(device), 0),
        sm_clock_mhz=clock,
        throttled=None if reasons is None else bool(reasons & BAD_REASONS),
    )


def _ask_driver(device: torch.device) -> tuple[float | None, int | None]:
    """SM clock in MHz and the event reasons, from nvidia-smi; None where it is not there."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    query = [
        "nvidia-smi",
        f"--id=GPU-{uuid}",
        "--query-gpu=clocks.sm,clocks_event_reasons.active",
        "--format=csv,noheader,nounits",
    ]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        clock, reasons = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split(",")
        return float(clock), int(reasons.strip(), 16)
    return None, None


class DeviceClock:
    """The clock of a CUDA device: its events are read once the device has come to them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def event(self) -> Any:
        """A mark behind what the current stream has been given so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two events that the device has come to."""
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Hold the host up until the device has done everything."""
        torch.cuda.synchronize(self._device)


def device_clock(device: torch.device) -> DeviceClock | None:
    """None where the host itself does the work, so that its own clock tells everything."""
    return DeviceClock(device) if device.type == "cuda" else None


class DeviceEvents:
    """Device time of the timed steps, where the device has a clock; nothing elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._clock = device_clock(device)
        self._pairs: list[tuple[Any, Any]] = []
        self._began: Any = None

    @property
    def on(self) -> bool:
        """Whether the device has a clock, so that steps can be timed without the host's waiting for each."""
        return self._clock is not None

    def start(self) -> None:
        if self._clock is not None:
            self._began = self._clock.event()

    def stop(self) -> None:
        if self._clock is not None:
            self._pairs.append((self._began, self._clock.event()))

    def wait(self) -> None:
        """Return when the device has done everything; at once where it has no clock."""
        if self._clock is not None:
            self._clock.wait()

    def keep(self, last: int) -> None:
        """Forget all steps but the last so many."""
        del self._pairs[: max(len(self._pairs) - last, 0)]

    def last(self, steps: int) -> list[float]:
        """Seconds of each of the last so many steps; the device must be idle."""
        assert self._clock is not None
        return [self._clock.seconds(begin, end) for begin, end in self._pairs[-steps:]]

    def mean(self) -> float | None:
        """Seconds per step; the device must be idle."""
        return fmean(self.last(len(self._pairs))) if self._pairs else None
