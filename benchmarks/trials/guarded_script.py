"""A training script for `benchmarks.trials.guard`. `--slowdown` names a file with a part, and seconds that a step loses."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WIDTH = 512


class Rows(Dataset[Tensor]):
    """Rows that cost next to nothing."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), index % 7 / 7)


def multiplied_for(seconds: float, matrix: Tensor) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        matrix @ matrix


def collectives_for(seconds: float) -> Callable[[], None]:
    """A call that keeps every rank in collectives for about this long."""
    values = torch.zeros(50_000)
    began = time.perf_counter()
    for _ in range(50):
        dist.all_reduce(values)
    count = torch.tensor([seconds / (time.perf_counter() - began) * 50])
    dist.broadcast(count, 0)

    def exchange() -> None:
        for _ in range(round(float(count))):
            dist.all_reduce(values)

    return exchange


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slowdown", type=Path)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--accumulation", type=int)
    arguments = parser.parse_args()
    slow = json.loads(arguments.slowdown.read_text(encoding="utf-8"))
    loss = {part: slow["seconds"] if part == slow["part"] else 0.0 for part in ("compute", "communication", "data", "host")}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    exchange = collectives_for(loss["communication"])
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(10))))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    matrix = torch.randn(128, 128)
    parts = arguments.accumulation

    def collate(rows: list[Tensor]) -> Tensor:
        time.sleep(loss["data"] / parts)
        return torch.stack(rows)

    data = Rows()
    loader = DataLoader(data, arguments.micro_batch, sampler=DistributedSampler(data), collate_fn=collate)
    for number, rows in enumerate(loader, start=1):
        multiplied_for(loss["compute"] / parts, matrix)
        time.sleep(loss["host"] / parts)
        (model(rows).square().mean() / parts).backward()
        if number % parts == 0:
            exchange()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
