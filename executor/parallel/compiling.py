"""Blocks compiled by torch.compile, one graph for all that are alike."""

from collections.abc import Iterable

import torch
from torch import nn
from torch._dynamo.utils import calculate_time_spent


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block's forward by itself, as torchtitan does: blocks that are alike share what was made for the first.

    A block's `forward` is replaced, not the block wrapped, so that hooks on the block (stage-3 gathers) stay outside.
    """
    # In this process: the ranks of a machine compile the same at the same time, and workers would outlive the trial.
    torch._inductor.config.compile_threads = 1
    for block in blocks:
        block.forward = torch.compile(block.forward)


def compile_seconds() -> float:
    """Seconds that went into compiling since `forget_compiled`."""
    return float(calculate_time_spent().get("total_wall_time", 0.0))


def forget_compiled() -> None:
    """Forget what was compiled for a model that is gone: past a number of variants torch runs a function uncompiled instead."""
    torch._dynamo.reset()
