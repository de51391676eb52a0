"""What timed steps cost, and which of them are kept."""

import pytest
import torch

from executor.measurement import meter as meter_module
from executor.measurement.meter import Meter, Sent


class Counted:
    """A step that sends two messages, and takes as long and as much work as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worked = 0.0
        self.sent: dict[tuple[str, str], tuple[int, int]] = {}
        monkeypatch.setattr(meter_module.time, "process_time", lambda: self.worked)
        self.meter = Meter(torch.device("cpu"), self.told)

    def told(self) -> Sent:
        return dict(self.sent)

    def run(self, seconds: float, work: float) -> None:
        def step(_: object) -> float:
            self.worked += work
            count, size = self.sent.get(("all_reduce", "data"), (0, 0))
            self.sent["all_reduce", "data"] = (count + 2, size + 64)
            return seconds

        self.meter.run(step)


def test_what_is_not_kept_is_in_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    for seconds, work in ((5.0, 9.0), (1.0, 0.5), (2.0, 1.5)):
        counted.run(seconds, work)
    counted.meter.keep(2)
    assert counted.meter.seconds == [1.0, 2.0]
    assert counted.meter.costs().cpu_seconds_per_step == pytest.approx(1.0)
    counted.meter.keep(0)
    assert counted.meter.seconds == []


def test_the_collectives_are_those_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    for _ in range(3):
        counted.run(1.0, 1.0)
    (found,) = counted.meter.costs().collectives
    assert (found.count, found.bytes) == (2, 64)
    assert counted.meter.costs().device_seconds_per_step is None
    assert counted.meter.costs().allocation_retries is None
