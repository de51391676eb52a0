"""AdamW with its moments in 8 bits."""

import itertools
import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from executor.engines.native.layout import Layout, Slot
from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, RestAdamW, share_of
from executor.engines.native.optimizers.quantised import QuantisedVector
from executor.parallel import streams
from search_spaces.optimizers import BETAS, DEVICE_CHUNK_ELEMENTS, EPSILON, LEAST_QUANTISED, QUANTISED_BLOCK

CHUNK_ELEMENTS = 1 << 20
"""Elements whose moments are dequantised at once on the host: 8 MiB of fp32, for a CPU's cache; a multiple of a block."""


class AdamW8bit(DeviceOptimizer):
    """A step [Dettmers et al. 2022]: dequantise both moments, update as AdamW in the master's dtype, quantise them to 8 bits.

    Shares start at block boundaries (`share_block` of `make_layout`), so that the blocks, and with them every number, equal
    those of one rank with the whole parameter. Each tensor-parallel slice counts as a separate parameter. Parameters of fewer
    than LEAST_QUANTISED elements keep unquantised moments.
    """

    def __init__(self, master: Tensor, layout: Layout, hyperparameters: Hyperparameters) -> None:
        super().__init__(master, layout)
        self._hyperparameters, self._steps = hyperparameters, 0
        self._large = [slot for slot in layout.slots if slot.elements >= LEAST_QUANTISED]
        small = [slot for slot in layout.slots if slot.elements < LEAST_QUANTISED]
        # The next parameter starts after the padded last block.
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

    def _update_slot(self, offset: int, weights: Tensor, gradient: Tensor, slot: Slot) -> None:
        """`offset`: start of the slot's moments."""
        rate, decay = self._hyperparameters.learning_rate, self._hyperparameters.weight_decay
        first_decay, second_decay = BETAS
        first_scale, second_scale = 1 - first_decay**self._steps, 1 - second_decay**self._steps
        chunk = CHUNK_ELEMENTS if streams.is_on_host(weights) else DEVICE_CHUNK_ELEMENTS
        for start, end in itertools.pairwise([*range(0, slot.shard_elements, chunk), slot.shard_elements]):
            part = gradient[start:end]
            first = self._first.read(offset + start, offset + end, part.dtype).lerp_(part, 1 - first_decay)
            second = self._second.read(offset + start, offset + end, part.dtype).mul_(second_decay)
            second.addcmul_(part, part, value=1 - second_decay)
            self._first.write(offset + start, first)
            self._second.write(offset + start, second)
            root = second.sqrt_().div_(math.sqrt(second_scale)).add_(EPSILON)
            weights[start:end].mul_(1 - rate * decay).addcdiv_(first, root, value=-rate / first_scale)

    def _states(self) -> Iterator[Tensor]:
        yield from self._first.tensors()
        yield from self._second.tensors()
        yield from self._rest.states()


def share_block(elements: int) -> int:
    """The number that a rank's share of a parameter is a multiple of [elements]."""
    return QUANTISED_BLOCK if elements >= LEAST_QUANTISED else 1
