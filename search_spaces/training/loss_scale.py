"""Dynamic loss scaling: what multiplies the loss where gradients pass through fp16, so that small ones do not vanish there.

The constants of `torch.amp.GradScaler`, which DeepSpeed shares but for its window (1000) and hysteresis (2). No knobs: after a
few steps the scale is what the gradients allow, wherever it began.
"""

from search_spaces.trial_config import TrialConfig

INITIAL_SCALE_POWER = 16
"""The first scale is 2 to this power."""
GROWTH_INTERVAL = 2000
"""Updates in a row without overflow after which the scale doubles. An overflow halves it at once."""
LEAST_SCALE = 1.0
"""Where gradients overflow at this scale, no scale helps."""


def scales_losses(config: TrialConfig) -> bool:
    """Whether gradients are made, summed or sent in fp16."""
    return "fp16" in (config.precision, config.reduce_dtype, config.accumulation_dtype)
