"""Measures time by place: every moment of a step belongs to exactly one place."""

import itertools
import time
from collections import defaultdict

import torch

from executor.measurement.module_tracker import OUTSIDE, Place


class ModuleClock:
    """Records the time at each change of place; on CUDA by stream events, which measure the device's time, not the host's.

    If the device waits for the host, the wait belongs to the place in which the host was late.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Place, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Start a step, outside the model."""
        self._marks.clear()
        self.move(OUTSIDE)

    def move(self, place: Place) -> None:
        """Record that the step continues at `place`."""
        self._marks.append((place, self._now()))

    def stop(self) -> dict[Place, float]:
        """End the step. Return the seconds of each place; their sum is the step's."""
        self.move(OUTSIDE)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: defaultdict[Place, float] = defaultdict(float)
        for (place, began), (_, ended) in itertools.pairwise(self._marks):
            seconds[place] += _between(began, ended)
        return dict(seconds)

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(began: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    """Return the seconds between two marks of the same device."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert not isinstance(ended, float)
    return float(began.elapsed_time(ended)) / 1e3
