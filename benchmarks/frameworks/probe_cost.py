"""CPU time that the probe costs a training step: pairs of processes of the same small steps, with and without it.

    python -m benchmarks.frameworks.probe_cost [--pairs 12]

The two processes of a pair follow each other, in turn the probed one first. A cost is the difference of their CPU time a step
after the first ones, so that a busy machine widens the interval and moves no mean.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common.paired_statistics import estimate
from executor.engines.command.observed import install_probe

STEPS = """
import time, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(3000):
    if step == 1000:
        began = time.process_time()
    model(torch.ones(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print((time.process_time() - began) / 2000)
"""


def seconds_of_step(probed: bool) -> float:
    """CPU seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(install_probe(Path(folder), None, None) if probed else {})}
        return float(subprocess.run([sys.executable, "-c", STEPS], env=variables, capture_output=True, check=True).stdout)


def main() -> None:
    """Print the cost with its interval, and the load of the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(parser.parse_args().pairs):
        for probed in (pair % 2 == 0, pair % 2 == 1):
            seconds[probed].append(seconds_of_step(probed))
    plain = estimate([1e6 * value for value in seconds[False]])
    cost = estimate([1e6 * (probed - other) for probed, other in zip(seconds[True], seconds[False], strict=True)])
    print(
        f"the probe costs {cost.mean:.1f} µs of CPU time a step (95 % interval {cost.low:.1f} to "
        f"{cost.high:.1f}; a step without it {plain.mean:.1f} µs; load {os.getloadavg()[0]:.1f})"
    )


if __name__ == "__main__":
    main()
