"""Activation checkpointing of whole blocks."""

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint

from search_spaces.trial_config import TrialConfig


def checkpoint_blocks(blocks: Sequence[nn.Module], config: TrialConfig) -> None:
    """With `activation_checkpointing=full`, keep each block's input alone and run the block again in backward.

    The block's `forward` is replaced, not the block wrapped, so that hooks on the block (stage-3 gathers) stay outside the
    region that runs again: gathering inside it would be recorded and replayed as part of the block.
    """
    if config.activation_checkpointing != "full":
        return
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
