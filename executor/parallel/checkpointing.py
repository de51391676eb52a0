"""Activation checkpointing of whole blocks."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from executor.parallel.selective import selective_contexts
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.models.stage_layout import recomputed_layers
from search_spaces.trial_config import TrialConfig


def checkpoint_blocks(blocks: Sequence[nn.Module], config: TrialConfig, stage: int = 0, draws: bool = True) -> None:
    """Recompute blocks of a stage in backward instead of keeping their activations, according to `activation_checkpointing` or
    the stage's mark in `pipeline_layout`.

    `full` keeps only a block's input; `selective` also keeps the results of expensive operators and of collectives (`KEPT`,
    `keep_collective`), and recomputes norms, activations, rotations and other cheap ones. Of every `checkpoint_every_k`
    consecutive blocks the first is checkpointed: backward reaches the last one first, when everything is still stored, so
    recomputing it would not reduce the peak. For the same reason the first blocks of a stage marked by the layout are chosen.

    A block's `forward` is replaced, instead of wrapping the block, so that hooks on the block (stage-3 gathers) stay outside
    the recomputed region: gathers inside it would be recorded and replayed as part of the block.

    `draws`: whether blocks may draw random numbers (dropout). If so, the generators' states are read from the device before
    each block and restored in backward, so that the same numbers are drawn.
    """
    kind, chosen = recomputed_layers(config, stage, len(blocks))
    contexts: dict[str, Any] = {}
    if kind == "selective":
        # Zero-bubble schedules call backward separately for a block's input and its weights: each recomputes the block.
        parts = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
        contexts = {"context_fn": functools.partial(selective_contexts, runs_again=parts)}
    for block in (blocks[index] for index in chosen):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=draws, **contexts)
