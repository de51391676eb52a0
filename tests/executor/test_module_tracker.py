"""Who works when: every moment and every FLOP of a step belongs to the module that it should."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from executor.measurement.flop_counter import FlopCounter
from executor.profile import OUTSIDE, ModuleClock, ModulePhase, ModuleTracker, Phase


class Pair(nn.Module):
    """Two products inside and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.own = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).relu()) @ self.own
        return result


class Model(nn.Module):
    """Calls a pair, with or without a checkpoint around it, and returns a loss in a dict."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed, self.pair, self.head = checkpointed, Pair(), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = checkpoint(self.pair, x, use_reentrant=False) if self.checkpointed else self.pair(x)
        return {"loss": self.head(x).sum()}


ROWS = 4
FIRST, SECOND, OWN, HEAD = (2 * ROWS * size for size in (8 * 16, 16 * 8, 8 * 4, 4 * 2))
NAMES = ("", "pair", "pair.first", "pair.second", "head")


def flops(checkpointed: bool) -> tuple[ModuleTracker, dict[tuple[str, Phase], int], int]:
    model, x = Model(checkpointed), torch.ones(ROWS, 8, requires_grad=True)
    found: Counter[ModulePhase] = Counter()
    tracker = ModuleTracker(lambda _: None)
    with tracker, FlopCounter(lambda count: found.update({tracker.module_phase: count})) as counter:
        model(x)["loss"].backward()
    assert tracker.module_phase == OUTSIDE
    assert counter.total is not None
    names = [name for name, _ in tracker.modules]
    return tracker, {(names[at.module], at.phase): n for at, n in found.items() if at.module is not None}, counter.total


def test_each_product_belongs_to_the_module_that_makes_it() -> None:
    tracker, found, total = flops(checkpointed=False)
    assert tuple(name for name, _ in tracker.modules) == NAMES
    assert tracker.calls == [1] * 5
    forward = {"pair": OWN, "pair.first": FIRST, "pair.second": SECOND, "head": HEAD}
    assert found == {
        **{(name, Phase.FORWARD): count for name, count in forward.items()},
        **{(name, Phase.BACKWARD): 2 * count for name, count in forward.items()},
    }
    assert total == sum(found.values())


def test_what_runs_again_is_told_as_recompute() -> None:
    tracker, found, total = flops(checkpointed=True)
    assert tracker.calls == [1] * 5
    assert {name: count for (name, phase), count in found.items() if phase is Phase.RECOMPUTE} == {
        "pair.first": FIRST, "pair.second": SECOND,
    }  # fmt: skip
    # The pair's own product is not run again: its result is not needed, and the checkpoint stops before it.
    assert found["pair", Phase.BACKWARD] == 2 * OWN
    assert total == sum(found.values())


def test_the_phases_come_in_order_and_the_modules_backwards() -> None:
    model, seen = Model(checkpointed=False), list[ModulePhase]()
    with ModuleTracker(seen.append) as tracker:
        model(torch.ones(ROWS, 8))["loss"].backward()
    names = [name for name, _ in tracker.modules]
    walk = [(place.phase, names[place.module] if place.module is not None else None) for place in seen]
    forward = [name for phase, name in walk if phase is Phase.FORWARD]
    assert forward == ["", "pair", "pair.first", "pair", "pair.second", "pair", "", "head", ""]
    backward = list(dict.fromkeys(name for phase, name in walk if phase is Phase.BACKWARD))
    assert backward == ["", "head", "pair", "pair.second", "pair.first"]
    assert walk[-1] == (Phase.OUTSIDE, None)


def test_hooks_are_gone_afterwards_and_nothing_changes() -> None:
    torch.manual_seed(0)
    model, x = Model(checkpointed=True), torch.ones(ROWS, 8)
    model(x)["loss"].backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    seen: list[ModulePhase] = []
    with ModuleTracker(seen.append):
        model(x)["loss"].backward()
    for before, parameter in zip(plain, model.parameters(), strict=True):
        assert before is not None
        assert torch.equal(before, parameter.grad if parameter.grad is not None else torch.empty(0))
    count = len(seen)
    model(x)["loss"].backward()
    assert len(seen) == count


def test_the_seconds_of_all_places_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    clock = ModuleClock(torch.device("cpu"))
    model = Model(checkpointed=True)
    with ModuleTracker(clock.move) as tracker:
        clock.start()
        for _ in range(2):
            model(torch.ones(ROWS, 8))["loss"].backward()
        seconds = clock.stop()
    assert tracker.calls == [2] * 5
    assert sum(seconds.values()) == next(ticks) - 1
    assert {place.phase for place in seconds} == set(Phase)
