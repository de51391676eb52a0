"""What a trial takes from its device: peaks of its own, the clock of its timed steps, and memory that is not torch's."""

import dataclasses

import pytest
import torch

from executor.engine import RankContext
from executor.errors import MemoryLimitError, RunnerError
from executor.measurement.device import COUNTERS, ClockReading, DeviceCounters
from executor.trial.run import run_trial
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, Progress, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

CONTEXT = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
REQUEST = TrialRequest(
    attempt="a",
    model=ModelSpec(
        name="m", family="llama", num_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        ffn_hidden_size=24, vocab_size=64, sequence_length=16,
    ),
    config=TrialConfig(micro_batch_size=1),
    workload=Workload(global_batch_size=1, sequence_length=16),
    world_size=1,
    fidelity=Fidelity(min_steps=3, max_steps=3, max_warmup_steps=3),
)  # fmt: skip


class Device:
    """What happens to a device from trial to trial."""

    def __init__(self) -> None:
        self.phase = ""
        self.highest = 10**12
        """What an earlier trial reserved."""
        self.reserved = 5000
        """What a step reserves."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    held = Device()

    class Substitute(DeviceCounters):
        def synchronize(self) -> None:
            held.highest = max(held.highest, held.reserved)

        def reset_peaks(self) -> None:
            held.highest = 0

        def peak_reserved_bytes(self) -> int:
            return held.highest

        def outside_bytes(self) -> int:
            return 300

        def clock(self) -> ClockReading:
            return (
                ClockReading(sm_mhz=1980.0, reasons=0) if held.phase == "measure" else ClockReading(sm_mhz=300.0, reasons=0x40)
            )

    monkeypatch.setitem(COUNTERS, "cpu", Substitute)
    return held


def run(device: Device, limit: int | None = None, context: RankContext = CONTEXT) -> TrialResult:
    def note(progress: Progress) -> None:
        device.phase = progress.phase

    return run_trial(context, dataclasses.replace(REQUEST, memory_limit_bytes=limit), note)


def test_figures_are_of_the_trial_and_of_its_timed_steps(device: Device) -> None:
    (rank,) = run(device).ranks
    assert rank.reserved_bytes == 5000
    assert (rank.sm_clock_mhz, rank.throttled) == (1980.0, False)


@pytest.mark.prove
def test_a_limit_counts_what_is_outside_of_the_allocator(device: Device) -> None:
    measured = run(device)
    peak = measured.ranks[0].peak_memory_bytes
    assert measured.needed_memory_bytes == peak + 300
    assert run(device, peak + 300).outcome is Outcome.OK
    with pytest.raises(MemoryLimitError, match=f"needs {peak + 300:,} bytes in a step, 300 of them outside of torch's alloc"):
        run(device, peak + 299)
    shared = run(device, peak, dataclasses.replace(CONTEXT, shares_device=True))
    assert shared.ranks[0].non_torch_bytes is None, "another rank's memory is no part of it"


def test_a_limit_is_compared_with_what_the_allocator_reserves(device: Device) -> None:
    peak = run(device).ranks[0].peak_memory_bytes
    device.reserved = peak + 1000
    assert run(device, peak + 1300).outcome is Outcome.OK
    with pytest.raises(MemoryLimitError, match=f"needs {peak + 1300:,} bytes in a step"):
        run(device, peak + 1299)


def test_a_trial_for_another_kind_of_device_is_an_error() -> None:
    with pytest.raises(RunnerError, match="device: this trial is for cuda, and rank 0 has cpu; start the ranks on such"):
        run_trial(CONTEXT, dataclasses.replace(REQUEST, device_kind="cuda"), lambda _: None)
