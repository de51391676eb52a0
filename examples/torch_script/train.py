"""A plain torch training script, as people have them. Two lines are autotune's: they are marked.

    autotune sweep --ranks 2 --global-batch-size 64 -- python examples/torch_script/train.py --batch {micro_batch_size} \
        --accumulate {gradient_accumulation_steps}
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import autotune  # (1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    model = DistributedDataParallel(module.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    samples = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    loader = DataLoader(samples, arguments.batch, num_workers=arguments.workers, drop_last=True)
    step = count = 0
    while step < arguments.steps:
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features.to(device)), labels.to(device))
            (loss / arguments.accumulate).backward()
            count += 1
            if count % arguments.accumulate:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            autotune.report(samples=arguments.batch * arguments.accumulate * ranks, loss=loss)  # (2)
            if step == arguments.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
