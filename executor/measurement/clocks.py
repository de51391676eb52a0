"""Reads a device's clock and the reasons for its throttling while steps are timed: an idle device has other clocks."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any

BAD_REASONS = 0x0000_0000_0000_00E8
"""Bits of NVML's clock event reasons that mean heat or power: HW slowdown, SW and HW thermal slowdown, HW power brake."""
INTERVAL_SECONDS = 0.2
"""Seconds between two readings. A reading takes well below a millisecond and blocks neither Python nor the device."""
_SM_CLOCK = 1
"""NVML_CLOCK_SM."""


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
    """Whether the device was throttled for heat or power in any reading."""


class Nvml:
    """NVIDIA's management library, for one device. Not thread-safe."""

    def __init__(self, library: Any, uuid: str) -> None:
        """
        Raises:
            OSError: the library does not know the device.
        """
        self._library, self._device = library, ctypes.c_void_p()
        known = library.nvmlInit_v2() == 0
        if not known or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)) != 0:
            raise OSError(f"NVML does not know the device {uuid}")

    def read(self) -> ClockReading | None:
        """Read the current clock; None: this device does not report it."""
        clock, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetClockInfo(self._device, _SM_CLOCK, ctypes.byref(clock)) != 0:
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

    def __init__(self, read: Callable[[], ClockReading | None], interval_seconds: float = INTERVAL_SECONDS) -> None:
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
        slowed = any(reading.reasons & BAD_REASONS for reading in within)
        return ClockState(sm_clock_mhz=fmean(reading.sm_mhz for reading in within), throttled=slowed)

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            self._sample()

    def _sample(self) -> bool:
        """Take a reading. Return whether there was one."""
        if (reading := self._read()) is None:
            return False
        self._readings.append((time.monotonic(), reading))
        return True
