"""A device's counters: memory by its driver and by torch's allocators, clock, throttling; a rank's versions and hardware.

`CudaCounters` contains all queries of CUDA memory and clocks. Tests substitute it through `counters_of`.
"""

import contextlib
import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from statistics import fmean
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from search_spaces.environment import VARIABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """One reading of a device."""

    sm_mhz: float
    """Clock of the streaming multiprocessors."""
    reasons: int
    """NVML's bits for the reasons that keep the clock from rising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """The state of the device while steps were timed. None: the device does not report it."""

    sm_clock_mhz: float | None = None
    """Mean of the readings."""
    throttled: bool | None = None
    """Whether the device was throttled for heat or by its power supply in any reading."""
    reasons: tuple[str, ...] = ()
    """Names of the reasons that kept the clock from rising in any reading."""

    def variables(self) -> dict[str, str]:
        """What a result's environment says of them: rank 0's reasons."""
        return {"clock_reasons": ", ".join(self.reasons)} if self.reasons else {}


CLOCK_REASONS = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x10: "sync boost", 0x20: "heat", 0x40: "heat, by hardware",
    0x80: "power brake",
}  # fmt: skip
"""NVML's clock event reasons (nvmlClocksEventReason*) -> their names; idle and clocks that applications set are left out."""
THROTTLED = 0xE8
"""Those that mean heat or power supply. Large products reach the power cap of a healthy device."""


class Nvml:
    """NVIDIA's management library, for one device. Not thread-safe."""

    def __init__(self, library: Any, uuid: str) -> None:
        """
        Raises:
            OSError: the library does not know the device.
        """
        self._library, self._device = library, ctypes.c_void_p()
        initialised = library.nvmlInit_v2() == 0
        if not initialised or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)) != 0:
            raise OSError(f"NVML does not know the device {uuid}")

    def read(self) -> ClockReading | None:
        """Read the current clock; None: this device does not report it."""
        clock, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(clock)) != 0:  # 1: NVML_CLOCK_SM
            return None
        if self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._device, ctypes.byref(reasons)) != 0:
            return None
        return ClockReading(sm_mhz=float(clock.value), reasons=reasons.value)


def open_nvml(uuid: str) -> Nvml | None:
    """Open the library for the device with this UUID ("GPU-…"); None: not installed, or it does not know the device."""
    with contextlib.suppress(OSError, AttributeError):
        return Nvml(ctypes.CDLL("libnvidia-ml.so.1"), uuid)
    return None


class ClockWatch:
    """Reads a clock from the start of a `with` block to its end, in its own thread."""

    def __init__(self, read: Callable[[], ClockReading | None], interval_seconds: float = 0.2) -> None:
        """A reading takes well below a millisecond and blocks neither Python nor the device."""
        self._read, self._interval = read, interval_seconds
        self._readings: list[tuple[float, ClockReading]] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "ClockWatch":
        if self._sample():
            self._thread = threading.Thread(target=self._watch, name="clock", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._sample()

    def since(self, began: float) -> ClockState:
        """Summarise the readings since that moment of `time.monotonic`, or the last reading if there are none."""
        within = [reading for at, reading in self._readings if at >= began] or [reading for _, reading in self._readings[-1:]]
        if not within:
            return ClockState()
        bits = reduce(or_, (reading.reasons for reading in within))
        names = tuple(name for bit, name in CLOCK_REASONS.items() if bits & bit)
        mean = fmean(reading.sm_mhz for reading in within)
        return ClockState(sm_clock_mhz=mean, throttled=bool(bits & THROTTLED), reasons=names)

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            self._sample()

    def _sample(self) -> bool:
        """Take a reading. Return whether there was one."""
        if (reading := self._read()) is None:
            return False
        self._readings.append((time.monotonic(), reading))
        return True


_set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
"""Configures the caching allocator of a running process, as PYTORCH_ALLOC_CONF does at start; None before torch 2.12."""
_empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
"""Releases pinned memory that no tensor holds. The first name exists since torch 2.13, the second in accelerator builds."""


class DeviceCounters:
    """Counters of a device without any, such as the CPU. None: unknown; 0: nothing is held. Bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def reset_peaks(self) -> None:
        """Reset the allocator's peaks to what it holds now."""

    def allocated_bytes(self) -> int | None:
        """Bytes that tensors hold now."""
        return None

    def peak_allocated_bytes(self) -> int | None:
        """Most bytes that tensors have held since `reset_peaks`."""
        return None

    def peak_reserved_bytes(self) -> int | None:
        """Most bytes that the caching allocator has reserved since `reset_peaks`."""
        return None

    def reserved_bytes(self) -> int:
        """Bytes that this process's caching allocator reserves now."""
        return 0

    def pinned_bytes(self) -> int:
        """Pinned host memory of this process, in use or cached. It is not part of the resident set."""
        return 0

    def memory_in_use(self) -> tuple[int, int] | None:
        """(in use by any process, free), as the driver reports. None after an unrecoverable device error."""
        return None

    def outside_bytes(self) -> int | None:
        """In use outside torch's allocator: NCCL's buffers, libraries' workspaces, the context, other processes."""
        return None

    def allocation_retries(self) -> int | None:
        """How often the caching allocator had to flush its cache since the process started."""
        return None

    def clock(self) -> ClockReading | None:
        """The current clock and the reasons for its throttling."""
        return None

    def release(self) -> None:
        """Release memory that torch caches and no tensor uses: on the accelerator, and pinned memory of the host."""
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
            if _empty_host_cache is not None:
                _empty_host_cache()


class CudaCounters(DeviceCounters):
    """Counters of a CUDA device."""

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

    def peak_allocated_bytes(self) -> int | None:
        """See `DeviceCounters`."""
        return int(torch.cuda.max_memory_allocated(self.device))

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
        memory = self.memory_in_use()
        return None if memory is None else max(memory[0] - self.reserved_bytes(), 0)

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
"""Device type -> its counters. For other types nothing is known."""


def counters_of(device: torch.device) -> DeviceCounters:
    """Return the counters of this device."""
    return COUNTERS.get(device.type, DeviceCounters)(device)


def set_expandable_segments(device: torch.device, expandable: bool) -> None:
    """Enable or disable expandable segments of the CUDA allocator. Its cached memory is released first."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    apply = _set_allocator or torch.cuda.memory._set_allocator_settings
    apply(f"expandable_segments:{expandable}")


class DeviceClock:
    """Times work on a CUDA device by events, which are read once the device has reached them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def event(self) -> Any:
        """Record an event behind the work queued on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events that the device has reached."""
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Block the host until the device is idle."""
        torch.cuda.synchronize(self._device)


def device_clock(device: torch.device) -> DeviceClock | None:
    """Return the device's clock; None if the host does the work itself, so that its own clock suffices."""
    return DeviceClock(device) if device.type == "cuda" else None


class DeviceEvents:
    """Records the device time of timed steps if the device has a clock; otherwise does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._clock = device_clock(device)
        self._pairs: list[tuple[Any, Any]] = []
        self._began: Any = None

    @property
    def on(self) -> bool:
        """Whether the device has a clock, so that the host need not wait for each timed step."""
        return self._clock is not None

    def start(self) -> None:
        if self._clock is not None:
            self._began = self._clock.event()

    def stop(self) -> None:
        if self._clock is not None:
            self._pairs.append((self._began, self._clock.event()))

    def wait(self) -> None:
        """Wait until the device is idle; return at once if it has no clock."""
        if self._clock is not None:
            self._clock.wait()

    def keep(self, last: int) -> None:
        """Discard all steps except the last `last`."""
        del self._pairs[: max(len(self._pairs) - last, 0)]

    def last(self, steps: int) -> list[float]:
        """Return the seconds of each of the last `steps` steps; the device must be idle."""
        assert self._clock is not None
        return [self._clock.seconds(begin, end) for begin, end in self._pairs[-steps:]]

    def mean(self) -> float | None:
        """Return the mean seconds per step; the device must be idle."""
        return fmean(self.last(len(self._pairs))) if self._pairs else None


def environment(device: torch.device) -> dict[str, str]:
    """Versions and hardware as this rank sees them."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "threads_per_rank": str(torch.get_num_threads()),
        "backend": str(dist.get_backend()) if dist.is_initialized() else "none",
    }
    # Variables of the trial and of the node itself.
    if variables := " ".join(f"{name}={os.environ[name]}" for name in sorted(VARIABLES) if name in os.environ):
        facts["variables"] = variables
    if device.type == "cuda":
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        facts["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return facts
