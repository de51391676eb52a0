"""What a device tells beside time: memory by its driver and by torch's allocators, its clock, and what it can give back.

Everything that asks CUDA for memory or clocks is in `CudaCounters`: `counters_of` is where tests put a substitute.
"""

from statistics import fmean
from typing import Any

import torch

from executor.measurement.clocks import ClockReading, Nvml, open_nvml

_set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
"""Changes the caching allocator of a running process, as PYTORCH_ALLOC_CONF does of a new one; None before torch 2.12."""
_empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
"""Gives back pinned memory that no tensor holds. The first name since torch 2.13; the second is in builds for accelerators."""


class DeviceCounters:
    """Of a device that tells nothing, as the CPU: an answer is None where it is not known, 0 where nothing is held. Bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def reset_peaks(self) -> None:
        """Count the allocator's peaks anew, from what it holds now."""

    def allocated_bytes(self) -> int | None:
        """Held by tensors now."""
        return None

    def peak_reserved_bytes(self) -> int | None:
        """Most that the caching allocator reserved since `reset_peaks`."""
        return None

    def reserved_bytes(self) -> int:
        """Reserved by the caching allocator of this process now."""
        return 0

    def pinned_bytes(self) -> int:
        """Pinned host memory of this process, in use or cached. The resident set does not hold it."""
        return 0

    def memory_in_use(self) -> tuple[int, int] | None:
        """In use, by whatever process, and free, as the driver tells. None after an error that the device does not get over."""
        return None

    def outside_bytes(self) -> int | None:
        """In use outside of torch's allocator: NCCL's buffers, libraries' workspaces, the context, other processes."""
        return None

    def allocation_retries(self) -> int | None:
        """Times that the caching allocator had to flush its cache, since the process started."""
        return None

    def clock(self) -> ClockReading | None:
        """The clock now, and what slows it down."""
        return None

    def release(self) -> None:
        """Give back what torch's caches hold and no tensor uses: on the accelerator, and pinned on the host."""
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
            if _empty_host_cache is not None:
                _empty_host_cache()


class CudaCounters(DeviceCounters):
    """Of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._nvml: Nvml | None = None
        self._asked = False

    def synchronize(self) -> None:
        """See `DeviceCounters`."""
        torch.cuda.synchronize(self.device)

    def reset_peaks(self) -> None:
        """See `DeviceCounters`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def allocated_bytes(self) -> int | None:
        """See `DeviceCounters`."""
        return int(torch.cuda.memory_allocated(self.device))

    def peak_reserved_bytes(self) -> int | None:
        """See `DeviceCounters`."""
        return int(torch.cuda.max_memory_reserved(self.device))

    def reserved_bytes(self) -> int:
        """See `DeviceCounters`."""
        return int(torch.cuda.memory_reserved(self.device))

    def pinned_bytes(self) -> int:
        """See `DeviceCounters`."""
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))

    def memory_in_use(self) -> tuple[int, int] | None:
        """See `DeviceCounters`."""
        try:
            free, total = torch.cuda.mem_get_info(self.device)
        except RuntimeError:
            return None
        return total - free, free

    def outside_bytes(self) -> int | None:
        """See `DeviceCounters`."""
        known = self.memory_in_use()
        return None if known is None else max(known[0] - self.reserved_bytes(), 0)

    def allocation_retries(self) -> int | None:
        """See `DeviceCounters`."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def clock(self) -> ClockReading | None:
        """See `DeviceCounters`."""
        if not self._asked:
            self._asked = True
            self._nvml = open_nvml(f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
        return None if self._nvml is None else self._nvml.read()


COUNTERS: dict[str, type[DeviceCounters]] = {"cuda": CudaCounters}
"""Type of device -> its counters; of types that are not here nothing is known."""


def counters_of(device: torch.device) -> DeviceCounters:
    """The counters of this device."""
    return COUNTERS.get(device.type, DeviceCounters)(device)


def set_expandable_segments(device: torch.device, expandable: bool) -> None:
    """Have the CUDA allocator grow its segments from now on, or not. What it has reserved is given back first."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    apply = _set_allocator or torch.cuda.memory._set_allocator_settings
    apply(f"expandable_segments:{expandable}")


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
