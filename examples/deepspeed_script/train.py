"""A DeepSpeed script, as people have them. Two lines are autotune's: they are marked.

    autotune sweep --ranks 2 --global-batch-size 16 --launcher deepspeed -- \
        python examples/deepspeed_script/train.py --deepspeed --deepspeed_config {config}
"""

import argparse

import deepspeed
import torch
from torch import nn

import autotune  # (1)


def blocks(width: int, count: int) -> nn.Module:
    layers = [nn.Linear(64, width), *(layer for _ in range(count) for layer in (nn.GELU(), nn.Linear(width, width)))]
    return nn.Sequential(*layers, nn.GELU(), nn.Linear(width, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = blocks(width=256, count=4)
    engine, _, _, _ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    dtype = next(engine.module.parameters()).dtype
    torch.manual_seed(engine.global_rank)
    size = engine.train_micro_batch_size_per_gpu()
    while engine.global_steps < arguments.steps:
        features = torch.randn(size, 64, dtype=dtype, device=engine.device)
        labels = torch.randint(10, (size,), device=engine.device)
        loss = nn.functional.cross_entropy(engine(features).float(), labels)
        last = engine.is_gradient_accumulation_boundary()
        engine.backward(loss)
        engine.step()
        if last:
            autotune.report(samples=engine.train_batch_size(), loss=loss)  # (2)


if __name__ == "__main__":
    main()
