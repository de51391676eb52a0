"""A training script as people have them, which also reports its own rate and the peak of its own allocator.

    python benchmarks/gpu/own_script.py --batch 64 --seconds 4

With `--seconds` it runs alone, and prints its figures as JSON; without, a trial starts and ends it.
"""

import argparse
import json
import time

import torch
from torch import nn

import autotune

WARM_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.0, help="alone for so long")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    width = 2048 if device.type == "cuda" else 64
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU()))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = torch.randn(arguments.batch, width, device=device)
    step, began = 0, time.perf_counter()
    while not arguments.seconds or step <= WARM_STEPS or time.perf_counter() - began < arguments.seconds:
        if step == WARM_STEPS:
            began = time.perf_counter()
        loss = model(samples).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()  # waits for the device
        step += 1
        if not arguments.seconds:
            autotune.report(samples=arguments.batch, loss=value)
    rate = arguments.batch * (step - WARM_STEPS) / (time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    print(json.dumps({"rate": rate, "peak": peak}))


if __name__ == "__main__":
    main()
