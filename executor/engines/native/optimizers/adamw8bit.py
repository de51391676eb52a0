"""AdamW with its moments in 8 bits."""

import itertools
import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from executor.engines.native.layout import Layout, Slot
from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, RestAdamW, share_of
from executor.engines.native.optimizers.quantised import QuantisedVector
from search_spaces.optimizers import BETAS, EPSILON, LEAST_QUANTISED, QUANTISED_BLOCK

CHUNK_ELEMENTS = 1 << 20
"""Elements whose moments are whole at once: 8 MiB of fp32; a multiple of a block."""


class AdamW8bit(DeviceOptimizer):
    """A step [Dettmers et al. 2022]: read both moments, update as AdamW in the master's type, write them back in 8 bits.

    Shares begin where blocks do (`make_layout` is told so), so that the blocks, and with them every number, are those of one
    rank that has the whole parameter; of tensor-parallel slices each is a parameter of its own. Parameters of fewer than
    LEAST_QUANTISED elements keep their moments as they are.
    """

    def __init__(self, master: Tensor, layout: Layout, hyperparameters: Hyperparameters) -> None:
        super().__init__(master, layout)
        self._hyperparameters, self._steps = hyperparameters, 0
        self._large = [slot for slot in layout.slots if slot.elements >= LEAST_QUANTISED]
        small = [slot for slot in layout.slots if slot.elements < LEAST_QUANTISED]
        # A last block that is a part of one is followed by the next parameter's first.
        lengths = [-(-slot.shard_elements // QUANTISED_BLOCK) * QUANTISED_BLOCK for slot in self._large]
        *self._starts, total = itertools.accumulate(lengths, initial=0)
        self._first = QuantisedVector(total, signed=True, device=master.device)
        self._second = QuantisedVector(total, signed=False, device=master.device)
        self._rest = RestAdamW({slot: self._weights(slot) for slot in small}, hyperparameters)

    def settled(self) -> bool:
        return self._rest.settled()

    def _update(self, gradient: Sequence[Tensor]) -> None:
        self._steps += 1
        self._rest.step(gradient)
        for slot, start in zip(self._large, self._starts, strict=True):
            self._update_slot(start, self._weights(slot), share_of(gradient, slot), slot)

    def _update_slot(self, at: int, weights: Tensor, gradient: Tensor, slot: Slot) -> None:
        """`at`: where its moments begin."""
        rate, decay = self._hyperparameters.learning_rate, self._hyperparameters.weight_decay
        first_decay, second_decay = BETAS
        first_scale, second_scale = 1 - first_decay**self._steps, 1 - second_decay**self._steps
        for start, end in itertools.pairwise([*range(0, slot.shard_elements, CHUNK_ELEMENTS), slot.shard_elements]):
            part = gradient[start:end]
            first = self._first.read(at + start, at + end, part.dtype).lerp_(part, 1 - first_decay)
            second = self._second.read(at + start, at + end, part.dtype).mul_(second_decay)
            second.addcmul_(part, part, value=1 - second_decay)
            self._first.write(at + start, first)
            self._second.write(at + start, second)
            root = second.sqrt_().div_(math.sqrt(second_scale)).add_(EPSILON)
            weights[start:end].mul_(1 - rate * decay).addcdiv_(first, root, value=-rate / first_scale)

    def _states(self) -> Iterator[Tensor]:
        yield from self._first.tensors()
        yield from self._second.tensors()
        yield from self._rest.states()


def share_block(elements: int) -> int:
    """Elements of which a rank's share of a parameter is a multiple."""
    return QUANTISED_BLOCK if elements >= LEAST_QUANTISED else 1
