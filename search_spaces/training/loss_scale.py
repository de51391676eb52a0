"""Dynamic loss scaling: a factor on the loss that keeps small fp16 gradients from underflow.

The constants are those of `torch.amp.GradScaler`; DeepSpeed differs in its window (1000) and hysteresis (2). They are not
knobs: after a few steps the scale depends only on the gradients, not on its start.
"""

from search_spaces.trial_config import TrialConfig

INITIAL_SCALE_POWER = 16
"""The first scale is 2 to this power."""
GROWTH_INTERVAL = 2000
"""Consecutive updates without overflow after which the scale doubles. An overflow halves it at once."""
LEAST_SCALE = 1.0
"""If gradients overflow at this scale, no scale helps."""


def scales_losses(config: TrialConfig) -> bool:
    """Whether gradients are computed, accumulated or communicated in fp16."""
    return "fp16" in (config.precision, config.reduce_dtype, config.accumulation_dtype)
