"""What the loop of a tuner that tunes nothing any more costs in each step.

A step waits 10 ms, as for a device, so that all host time besides is the loop's. Plain and tuned stretches alternate.
"""

import time

import torch

from autotune.inside.tuner import InRunTuner


def overhead(rounds: int = 20, steps: int = 200, step_seconds: float = 0.0) -> tuple[float, float]:
    """Seconds of processor time of a step in the plain loop and in the tuned one: the least, as other work only adds."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    batches = [torch.zeros(2, 4)] * steps
    tuner = InRunTuner(model, optimizer, knobs=(), steps=10**9)
    for batch in tuner.batches(batches):
        with tuner:
            tuner.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert tuner.schedule is not None
    assert tuner.schedule.is_over
    plain, tuned = [], []
    for _ in range(rounds):
        tuner._steps.close()
        began = time.process_time()
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(step_seconds)
        plain.append((time.process_time() - began) / steps)
        tuner._steps.open()
        began = time.process_time()
        for batch in tuner.batches(batches):
            with tuner:
                tuner.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(step_seconds)
        tuned.append((time.process_time() - began) / steps)
    return min(plain), min(tuned)


if __name__ == "__main__":
    plain, tuned = overhead()
    print(f"plain {1e6 * plain:.1f} us, tuned {1e6 * tuned:.1f} us: {(tuned - plain) / 0.01:.3%} of 10 ms")
