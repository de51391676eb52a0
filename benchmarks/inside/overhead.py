"""What the loop of a tuner that tunes nothing any more costs in each step.

Steps do next to nothing, so that what the loop adds is seen. Plain and tuned turns alternate, so that both of a pair run at the
same speed of the machine; processor time does not contain other work.
"""

import math
import time
from collections.abc import Callable

import torch

from autotune.inside.tuner import InRunTuner

TURNS, STEPS = 800, 256
"""Pairs of turns, and steps of a turn: as many as the schedule gets at once."""


def overhead() -> tuple[float, float, float]:
    """Processor seconds that a tuned step takes longer: the median over pairs of turns, with its 95 % interval."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    batches = [torch.zeros(2, 4)] * STEPS
    tuner = InRunTuner(model, optimizer, knobs=(), steps=10**9)

    def plain() -> None:
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def tuned() -> None:
        for batch in tuner.batches(batches):
            with tuner:
                tuner.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()

    for _ in range(10):
        tuned()
    assert tuner.schedule is not None
    assert tuner.schedule.is_over
    differences = []
    for _ in range(TURNS):
        tuner._steps.close()
        before = seconds_of(plain)
        tuner._steps.open()
        differences.append((seconds_of(tuned) - before) / STEPS)
    differences.sort()
    # Order statistics around the median [Hahn and Meeker, Statistical Intervals, 1991, section 5.2].
    half = math.ceil(0.98 * math.sqrt(TURNS))
    return differences[TURNS // 2], differences[TURNS // 2 - half], differences[TURNS // 2 + half]


def seconds_of(turn: Callable[[], None]) -> float:
    """Processor seconds."""
    began = time.process_time()
    turn()
    return time.process_time() - began


if __name__ == "__main__":
    middle, low, high = overhead()
    print(f"{1e6 * middle:.1f} us [{1e6 * low:.1f}, {1e6 * high:.1f}] longer: {middle / 0.01:.3%} of 10 ms")
