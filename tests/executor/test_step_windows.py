"""Timed steps on a device with a clock of its own: the host waits once for many of them."""

import itertools
from typing import Any

import pytest
import torch

from executor.engine import RankContext
from executor.measurement import device as device_module
from executor.trial import run as trial_module
from executor.trial.run import WINDOW_STEPS, run_trial
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

SPEC = ModelSpec(
    name="windows", family="llama", num_layers=1, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=32, vocab_size=64, sequence_length=16,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=2, sequence_length=16)
ALONE = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
STEPS = 20
STEP_SECONDS = 0.01


class Clock:
    """A device that takes `STEP_SECONDS` from one event to the next, and cannot be read before the host has waited."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._now = itertools.count()
        self._passed = -1

    def event(self) -> int:
        self.log.append("event")
        return next(self._now)

    def seconds(self, begin: int, end: int) -> float:
        assert end <= self._passed, "read before the device has come to it"
        return STEP_SECONDS * (end - begin)

    def wait(self) -> None:
        self.log.append("wait")
        self._passed = next(self._now)


def timed(monkeypatch: pytest.MonkeyPatch, **knobs: Any) -> tuple[TrialResult, list[str]]:
    """A trial, and what it asked of the clock while steps were timed."""
    clock, measured = Clock(), trial_module._time_full

    def measure(*arguments: Any) -> Any:
        del clock.log[:]
        return measured(*arguments)

    monkeypatch.setattr(device_module, "device_clock", lambda _: clock)
    monkeypatch.setattr(trial_module, "_time_full", measure)
    # What the host itself takes for a step of warm-up depends on the machine.
    monkeypatch.setattr(trial_module, "WINDOW_SECONDS", 1e6)
    fidelity = Fidelity(min_steps=STEPS, max_steps=STEPS, max_warmup_steps=2, measure_memory=False)
    config = TrialConfig(micro_batch_size=2).replace(knobs)
    request = TrialRequest(attempt="1", model=SPEC, config=config, workload=WORKLOAD, world_size=1, fidelity=fidelity)
    result = run_trial(ALONE, request, lambda _: None)
    assert result.outcome is Outcome.OK
    return result, clock.log


def test_the_host_waits_once_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    result, log = timed(monkeypatch)
    windows = -(-STEPS // WINDOW_STEPS)
    assert (log.count("event"), log.count("wait")) == (2 * STEPS, windows)
    assert [key for key, _ in itertools.groupby(log)] == windows * ["event", "wait"], "a window has no wait inside"
    assert len(result.step_seconds) == STEPS
    assert result.step_seconds == pytest.approx(STEPS * [STEP_SECONDS])
    assert result.ranks[0].device_seconds_per_step == pytest.approx(STEP_SECONDS)


def test_a_step_whose_norm_decides_about_the_next_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = timed(monkeypatch, precision="fp16")
    assert log.count("wait") == STEPS


def test_losses_are_those_of_steps_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[bool, list[float]] = {True: [], False: []}
    check = trial_module._check_loss
    for windows in seen:
        with monkeypatch.context() as patch:
            patch.setattr(
                trial_module,
                "_check_loss",
                lambda trial, loss, norm, whole, windows=windows: (seen[windows].append(loss), check(trial, loss, norm, whole)),
            )
            if windows:
                timed(patch)
            else:
                patch.setattr(trial_module, "_has_windows", lambda *_: False)
                timed(patch)
    assert len(seen[True]) >= STEPS
    shared = min(map(len, seen.values()))
    assert seen[True][:shared] == seen[False][:shared]
