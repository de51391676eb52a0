"""Muon: for each matrix of the blocks, the step is the momentum, orthogonalized by Newton-Schulz iterations."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, RestAdamW, Shares, share_of
from executor.engines.native.parameter_shard import Slot, as_rows, unpack
from executor.parallel.collectives import mark
from search_spaces.optimizers import MUON_MOMENTUM


class Muon(DeviceOptimizer):
    """`torch.optim.Muon` with the learning rate of AdamW (`match_rms_adamw`) for the blocks' matrices, AdamW for the rest.

    The update needs whole matrices, and ZeRO shards each of them. So each has one owner among the ranks that shard it. A step:

    1. Every rank computes the Nesterov momentum of its shares in bf16, the dtype in which matrices are orthogonalized, and
       sends each share to the matrix's owner: one all-to-all.
    2. The owner orthogonalizes its matrices. For a sliced matrix, the owner on each tensor rank gathers the other slices.
    3. Every share of the result is sent back to its rank: another all-to-all.

    So computation and traffic per rank shrink with the number of ranks, and each rank holds only its own matrices whole.
    """

    def __init__(self, master: Tensor, shares: Shares, hyperparameters: Hyperparameters) -> None:
        super().__init__(master, shares.layout)
        self._shares, self._hyperparameters = shares, hyperparameters
        matrices = [slot for slot in self.layout.slots if slot.name in shares.matrices]
        other_slots = [slot for slot in self.layout.slots if slot.name not in shares.matrices]
        owned = assign_owners(matrices, self.layout.ranks)
        self._own, self._matrices = owned[shares.own_row], [slot for slots in owned for slot in slots]
        self._sent = [sum(slot.shard_elements for slot in slots) for slots in owned]
        self._momentum = torch.zeros(sum(self._sent), dtype=master.dtype, device=master.device)
        self._rest = RestAdamW({slot: self._weights(slot) for slot in other_slots}, hyperparameters)

    def settled(self) -> bool:
        return self._rest.settled()

    def _update(self, gradient: Sequence[Tensor]) -> None:
        self._rest.step(gradient)
        ahead = torch.empty(self._momentum.shape, dtype=torch.bfloat16, device=self.master.device)
        mark("buffers", ahead)
        for slot, momentum, share in zip(self._matrices, self._parts(self._momentum), self._parts(ahead), strict=True):
            part = share_of(gradient, slot)
            momentum.lerp_(part, 1 - MUON_MOMENTUM)
            share.copy_(part.lerp_(momentum, MUON_MOMENTUM))
        rows = self._to_owners(ahead)
        column = 0
        for slot, flat in unpack(rows, self._own):
            target = rows[:, column : column + slot.shard_elements]
            target.copy_(as_rows(self._orthogonalized(slot, flat.view(slot.shape)), slot, self.layout.ranks))
            column += slot.shard_elements
        self._step(self._from_owners(rows, ahead))

    def _step(self, directions: Tensor) -> None:
        rate = self._hyperparameters.learning_rate
        for slot, direction in zip(self._matrices, self._parts(directions), strict=True):
            cut, ranks = self._shares.split.get(slot.name), self._shares.tensor.size
            longest = max(size * (ranks if axis == cut else 1) for axis, size in enumerate(slot.shape))
            # 0.2: root mean square of an element of AdamW's step, as a fraction of its learning rate. Scaled to it, one
            # learning rate and weight decay fit both [Liu et al. 2025, Muon is Scalable for LLM Training, 2.2].
            length = 0.2 * math.sqrt(longest)
            weights = self._weights(slot).mul_(1 - rate * self._hyperparameters.weight_decay)
            weights.add_(direction, alpha=-rate * length)

    def _parts(self, vector: Tensor) -> Sequence[Tensor]:
        """The shares in a vector that holds all of them in the order of the owners."""
        return torch.split(vector, [slot.shard_elements for slot in self._matrices])

    def _to_owners(self, shares: Tensor) -> Tensor:
        """[ranks, concatenated shares of this rank's own matrices], from this rank's shares of all matrices."""
        row_elements = self._sent[self._shares.own_row]
        if self.layout.ranks == 1:
            return shares.view(1, -1)
        rows = torch.empty(self.layout.ranks, row_elements, dtype=shares.dtype, device=shares.device)
        mark("buffers", rows)
        self._shares.group.all_to_all(rows.view(-1), shares, [row_elements] * self.layout.ranks, self._sent).wait()
        return rows

    def _from_owners(self, rows: Tensor, shares: Tensor) -> Tensor:
        """The inverse of `_to_owners`, into the memory of `shares`."""
        if self.layout.ranks > 1:
            row_elements = self._sent[self._shares.own_row]
            self._shares.group.all_to_all(shares, rows.view(-1), self._sent, [row_elements] * self.layout.ranks).wait()
        return shares

    def _orthogonalized(self, slot: Slot, matrix: Tensor) -> Tensor:
        """Orthogonalize a matrix, or this rank's slice of a matrix that is sliced over the tensor ranks."""
        tensor = self._shares.tensor
        if slot.name not in self._shares.split or tensor.size == 1:
            return orthogonalized(matrix)
        rows = torch.empty(tensor.size, matrix.numel(), dtype=matrix.dtype, device=matrix.device)
        mark("buffers", rows)
        tensor.all_gather(rows, matrix.reshape(-1)).wait()
        dimension = self._shares.split[slot.name]
        whole = torch.cat(rows.view(tensor.size, *matrix.shape).unbind(), dim=dimension)
        return orthogonalized(whole).chunk(tensor.size, dim=dimension)[tensor.rank]

    def _states(self) -> Iterator[Tensor]:
        yield self._momentum
        yield from self._rest.states()


def assign_owners(matrices: Sequence[Slot], ranks: int) -> list[list[Slot]]:
    """The matrices of each rank: the most expensive first, each to the least loaded rank. The same on all ranks."""
    owned: list[list[Slot]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for slot in sorted(matrices, key=lambda slot: (-flops(*slot.shape), slot.offset)):
        owner = load.index(min(load))
        owned[owner].append(slot)
        load[owner] += flops(*slot.shape)
    return owned


STEPS = 5


def orthogonalized(matrix: Tensor) -> Tensor:
    """Orthogonalize a bf16 matrix [rows, columns]: same singular vectors, singular values between 0.5 and 1.5, in bf16.

    Uses the same operations in the same order as `torch.optim.Muon` (2.13), so that the result is bitwise equal.
    """
    # Coefficients of x, x^3 and x^5, which bring singular values in [0, 1] close to 1 in few steps [Jordan et al. 2024, Muon].
    first, third, fifth = 3.4445, -4.7750, 2.0315
    transposed = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if transposed else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = x.addmm(gram.addmm(gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if transposed else x


def flops(rows: int, columns: int) -> int:
    """FLOPs of the matrix products of `orthogonalized`."""
    short, long = min(rows, columns), max(rows, columns)
    return STEPS * (4 * short * short * long + 2 * short**3)
