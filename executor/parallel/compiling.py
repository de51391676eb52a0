"""Compiles blocks by torch.compile, with one graph for identical blocks."""

from collections.abc import Iterable

import torch
from torch import nn
from torch._dynamo.utils import calculate_time_spent


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block's forward separately, as torchtitan does: identical blocks share the graph of the first.

    A block's `forward` is replaced, instead of wrapping the block, so that hooks on the block (stage-3 gathers) stay outside.
    """
    # In this process: the ranks of a host compile the same code concurrently, and compile workers would outlive the trial.
    torch._inductor.config.compile_threads = 1
    for block in blocks:
        block.forward = torch.compile(block.forward)


def compile_seconds() -> float:
    """Seconds spent compiling since `forget_compiled`."""
    return float(calculate_time_spent().get("total_wall_time", 0.0))


def forget_compiled() -> None:
    """Discard the compiled code of a closed model: beyond a number of variants, torch runs a function uncompiled."""
    torch._dynamo.reset()
