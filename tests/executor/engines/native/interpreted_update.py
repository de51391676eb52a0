"""Run by test_fused_update.py in a process of its own: Triton decides at its first import whether it interprets kernels."""

import torch

from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers import fused_update
from executor.engines.native.optimizers.device_optimizer import AdamW8bit
from executor.engines.native.parameter_shard import make_layout
from search_spaces.optimizers import LEAST_QUANTISED, QUANTISED_BLOCK

SIZES = (LEAST_QUANTISED + 100, 3 * QUANTISED_BLOCK, LEAST_QUANTISED)
"""Elements of parameters: with a part of a block at the end, too few for 8 bits, and whole blocks."""


def main() -> None:
    parameters = [(str(index), torch.nn.Parameter(torch.empty(size))) for index, size in enumerate(SIZES)]
    optimizers, elements = [], sum(SIZES)
    layout = make_layout(parameters, 1, elements)
    for fused in (False, True):
        master = torch.randn(elements, generator=torch.Generator().manual_seed(0))
        optimizers.append(AdamW8bit(master, layout, Hyperparameters(learning_rate=1e-2, weight_decay=0.1, fused=False)))
        optimizers[-1]._kernel = fused_update if fused else None
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        gradient = torch.randn(elements, generator=generator) * 10 ** torch.randn(elements, generator=generator)
        gradient[:QUANTISED_BLOCK] = 0  # a block of zeros has no scale
        for optimizer in optimizers:
            optimizer._update([gradient.clone()])
        plain, fused = optimizers
        for one, other in ((plain._first, fused._first), (plain._second, fused._second)):
            torch.testing.assert_close(other._scales, one._scales, rtol=1e-6, atol=0)
            different = (one._codes != other._codes).sum().item()
            # A number beside a boundary may get the neighbouring code, since the kernel rounds fewer times.
            assert different <= 1e-4 * one._codes.numel()
            assert (one._codes.int() - other._codes.int()).abs().max() <= 1
        torch.testing.assert_close(fused.master, plain.master, rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    main()
