"""Applies data schedules to a step: shorter samples (curriculum), and fewer tokens in middle layers (random-LTD)."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from search_spaces.models.model import ModelSpec
from search_spaces.training.data_schedule import job_step, kept_at
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


def shortened(batch: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """The first `length` tokens of every sample [samples, tokens]; later, longer lengths extend the same samples."""
    return {name: value[:, :length] for name, value in batch.items()}


def kept_tokens(config: TrialConfig, workload: Workload, spec: ModelSpec, step: int, device: torch.device) -> dict[str, Tensor]:
    """Layer -> sorted positions of the tokens that it processes in a step, int64; layers that process all are omitted.

    Every middle layer draws its own tokens in every step [Yao et al. 2022, Random-LTD, 3.1], the same for all samples of the
    step. They depend only on the seed, the step and the layer's number, so that they are the same in every layout and when a
    checkpointed layer is recomputed.
    """
    token_count = kept_at(config, workload, job_step(workload, step))
    if not config.random_ltd_start_tokens or token_count >= workload.sequence_length:
        return {}
    chosen = {}
    for layer in range(1, spec.num_layers - 1):
        digest = hashlib.sha256(f"random-ltd:{workload.seed}:{step}:{layer}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        drawn = torch.randperm(workload.sequence_length, generator=generator)[:token_count]
        chosen[str(layer)] = drawn.sort().values.to(device)
    return chosen


def through_kept(block: nn.Module, x: Tensor, rotary: tuple[Tensor, ...] | None, positions: Tensor) -> Tensor:
    """Apply a block to the `positions` tokens of x [batch, tokens, hidden]; the others bypass it.

    Kept tokens stay in order, so that causality among them is that of the whole sequence, and rotations are those of their
    positions.
    """
    rows = None if rotary is None else tuple(table[positions] for table in rotary)
    return x.index_copy(1, positions, block(x.index_select(1, positions), rows))
