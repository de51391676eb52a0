"""Activation checkpointing of whole blocks."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from executor.parallel.selective import selective_contexts
from search_spaces.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.stage_layout import recomputed_layers
from search_spaces.trial_config import TrialConfig


def checkpoint_blocks(blocks: Sequence[nn.Module], config: TrialConfig, stage: int = 0, draws: bool = True) -> None:
    """Run blocks of a stage again in backward instead of keeping their activations, as `activation_checkpointing` says, or
    `pipeline_layout` of this stage.

    `full` keeps a block's input alone; `selective` keeps the results of dear operators and of collectives too (`KEPT`,
    `keep_collective`), and computes norms, activations, rotations and other cheap ones again. Of every `checkpoint_every_k`
    neighbouring blocks the first is checkpointed: the last one's turn in backward comes first, when everything is still held,
    and running it again then would save nothing of the peak. Of a stage that the layout marks the first ones, for the same
    reason.

    A block's `forward` is replaced, not the block wrapped, so that hooks on the block (stage-3 gathers) stay outside the
    region that runs again: gathering inside it would be recorded and replayed as part of the block.

    `draws`: whether blocks may draw random numbers (dropout). Then the generators' states are read before each block, from the
    device, and set again in backward, so that the same numbers are drawn.
    """
    kind, chosen = recomputed_layers(config, stage, len(blocks))
    contexts: dict[str, Any] = {}
    if kind == "selective":
        # Zero-bubble schedules call backward for a block's input and for its weights apart: each runs the block again.
        parts = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
        contexts = {"context_fn": functools.partial(selective_contexts, runs_again=parts)}
    for block in (blocks[place] for place in chosen):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=draws, **contexts)
