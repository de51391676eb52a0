"""What a device tells beside time: memory by its driver and by torch's allocators, its clock, and what it can give back.

Everything that asks CUDA for memory or clocks is in `CudaCounters`: `counters_of` is where tests put a substitute.
"""

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


class DeviceEvents:
    """Device time of the timed steps, by CUDA events; nothing elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._pairs: list[tuple[torch.cuda.Event, ...]] = []

    def start(self) -> None:
        if self._on:
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            pair[0].record()
            self._pairs.append(pair)

    def stop(self) -> None:
        if self._on:
            self._pairs[-1][1].record()

    def keep(self, last: int) -> None:
        """Forget all steps but the last so many."""
        del self._pairs[: max(len(self._pairs) - last, 0)]

    def mean(self) -> float | None:
        """Seconds per step; the device must be idle."""
        if not self._pairs:
            return None
        return float(sum(begin.elapsed_time(end) for begin, end in self._pairs)) / len(self._pairs) / 1e3
