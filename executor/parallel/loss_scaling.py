"""Dynamic loss scaling, so that gradients keep within the range of fp16."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from executor.errors import WrongResultError
from search_spaces.training.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE_POWER, LEAST_SCALE


class LossScaler:
    """What a step's losses are multiplied by before backward, and its gradients divided by before the update.

    A step [Micikevicius et al. 2018, Mixed Precision Training, 3.2; as `torch.amp.GradScaler` does it]:

    1. Losses are multiplied by `scale`, a power of two, so that nothing is rounded by it.
    2. The norm of the gradients over all shares, slices and stages is not finite where one gradient of one rank is not: the
       sums that clipping waits for anyway tell every rank at once.
    3. A finite norm: the update is made on gradients divided by `scale`; after GROWTH_INTERVAL such steps in a row the scale is
       doubled. Else no rank updates, and the scale is halved.

    Raises, from `accepts`:
        WrongResultError: gradients overflow at the least scale, on every rank alike.
    """

    def __init__(self) -> None:
        self.scale = 2.0**INITIAL_SCALE_POWER
        self._accepted = 0
        """Updates since the scale changed."""

    def accepts(self, norm: Tensor) -> bool:
        """Whether the step whose scaled gradients have this norm is to be made; sets the scale of the next step."""
        # A dry run has no numbers, and so none that overflow.
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
