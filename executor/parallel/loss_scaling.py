"""Dynamic loss scaling, which keeps gradients within the range of fp16."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from executor.errors import WrongResultError
from search_spaces.training.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE_POWER, LEAST_SCALE


class LossScaler:
    """The factor of a step's losses before backward, by which gradients are divided before the update.

    A step [Micikevicius et al. 2018, Mixed Precision Training, 3.2; as in `torch.amp.GradScaler`]:

    1. Losses are multiplied by `scale`, a power of two, which causes no rounding.
    2. The norm of the gradients over all shares, slices and stages is not finite if any gradient of any rank is not. So the
       sums that clipping needs in any case inform every rank.
    3. If the norm is finite, the update uses gradients divided by `scale`; after GROWTH_INTERVAL such steps in a row the scale
       is doubled. Otherwise no rank updates, and the scale is halved.

    Raises, from `accepts`:
        WrongResultError: gradients overflow at the smallest scale; raised on every rank.
    """

    def __init__(self) -> None:
        self.scale = 2.0**INITIAL_SCALE_POWER
        self._accepted = 0
        """Updates since the last change of the scale."""

    def accepts(self, norm: Tensor) -> bool:
        """Whether to update with scaled gradients of this norm; sets the scale of the next step."""
        # A dry run has no values, so none overflow.
        if is_fake(norm) or bool(torch.isfinite(norm)):
            self._accepted += 1
            if self._accepted == GROWTH_INTERVAL:
                self.scale, self._accepted = self.scale * 2, 0
            return True
        self.scale, self._accepted = self.scale / 2, 0
        if self.scale < LEAST_SCALE:
            raise WrongResultError(
                f"gradients overflow fp16 at a loss scale of {self.scale * 2:g}, below which no scale helps; use precision=bf16"
            )
        return False
