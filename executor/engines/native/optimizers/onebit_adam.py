"""1-bit Adam: AdamW during a warm-up; afterwards ranks send the signs of their momenta instead of their gradients."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, Shares
from executor.parallel.collectives import mark
from search_spaces.communication import SIGN_BLOCK, sign_share
from search_spaces.optimizers import BETAS, EPSILON, LEAST_ROOT


class OneBitAdam(DeviceOptimizer):
    """A step [Tang et al. 2021, 1-bit Adam, algorithm 1], with AdamW's weight decay and bias correction:

    1. In the first `warmup_steps` gradients are summed over the ranks, and the update is AdamW's.
    2. Then the second moment is frozen, and its root becomes the divisor. The root is clamped to at least LEAST_ROOT times the
       root of the mean over its parameter: otherwise the sign of an element without a gradient so far would move it too far.
    3. Each rank adds its own gradient (R times its summand of the mean, for R ranks) to the common momentum, divides it by the
       root, and adds its residual error (the worker's error). It sends each rank the signs of that rank's part, with the mean
       magnitude of each block, and keeps the difference as the error for the next step.
    4. Every rank averages its part, adds its own residual of that part (the server's error), and sends the signs to all. All
       ranks then have the divided common momentum: it is the step, and times the root it is the new momentum.

    The paper sends the momentum itself. Divided by the root, which all ranks know, the numbers of a block have similar
    magnitudes, as one magnitude per block requires; sums and errors differ only by that constant factor.
    """

    def __init__(self, master: Tensor, shares: Shares, hyperparameters: Hyperparameters, warmup_steps: int) -> None:
        super().__init__(master, shares.layout)
        self._group, self._hyperparameters, self._warmup_steps = shares.group, hyperparameters, warmup_steps
        self._first, self._second = torch.zeros_like(master), torch.zeros_like(master)
        """First moment; second moment, which after warm-up is replaced by its root."""
        self._part = sign_share(master.numel(), self._group.size)
        self._own_error = master.new_zeros(self._group.size * self._part)
        self._part_error = master.new_zeros(self._part)
        self._steps = 0

    @property
    def sums_itself(self) -> bool:
        """Whether the next update takes this rank's own gradient."""
        return self._steps >= self._warmup_steps

    def settled(self) -> bool:
        """Whether the warm-up is over, so that all further steps are alike."""
        return self.sums_itself

    def _update(self, gradient: Sequence[Tensor]) -> None:
        compressed = self.sums_itself
        self._steps += 1
        if compressed:
            self._add_momentum(gradient)
            self._step(self._exchange_momentum())
            return
        for bucket, piece in enumerate(gradient):
            self._adamw(self.layout.start(bucket), piece)
        if self.sums_itself:
            self._freeze()

    def _adamw(self, start: int, gradient: Tensor) -> None:
        first_decay, second_decay = BETAS
        part = slice(start, start + gradient.numel())
        first = self._first[part].lerp_(gradient, 1 - first_decay)
        second = self._second[part].mul_(second_decay).addcmul_(gradient, gradient, value=1 - second_decay)
        root = torch.div(second, 1 - second_decay**self._steps, out=gradient).sqrt_().add_(EPSILON)
        self._decay(self.master[part]).addcdiv_(first, root, value=-self._rate())

    def _freeze(self) -> None:
        """Replace the second moment by its root, the divisor of all further steps."""
        _, second_decay = BETAS
        for slot in self.layout.slots:
            second = self._second[slot.offset : slot.offset + slot.shard_elements].div_(1 - second_decay**self._steps)
            least = second.mean().sqrt() * LEAST_ROOT
            second.sqrt_().clamp_(min=least).add_(EPSILON)

    def _add_momentum(self, gradient: Sequence[Tensor]) -> None:
        """Add this rank's own momentum, divided by the root, to its residual error."""
        first_decay, _ = BETAS
        for bucket, piece in enumerate(gradient):
            start = self.layout.start(bucket)
            part = slice(start, start + piece.numel())
            momentum = piece.mul_(self._group.size * (1 - first_decay)).add_(self._first[part], alpha=first_decay)
            self._own_error[part].add_(momentum.div_(self._second[part]))

    def _exchange_momentum(self) -> Tensor:
        """The packed parts of the common momentum [ranks, …], from this rank's own momentum in `_own_error`."""
        rows = self._own_error.view(self._group.size, self._part)
        sent = pack(rows)
        received = torch.empty_like(sent)
        for buffer in (sent, received):
            mark("buffers", buffer)
        split_sizes = [1] * self._group.size
        work = self._group.all_to_all(received, sent, split_sizes, split_sizes)
        for row, packed in zip(rows, torch.split(sent, 1), strict=True):
            row.sub_(self._unpack(packed))
        self._clear_padding(self._own_error, 0)
        work.wait()
        for row in torch.split(received, 1):
            self._part_error.add_(self._unpack(row), alpha=1 / self._group.size)
        part = pack(self._part_error[None])
        self._part_error.sub_(self._unpack(part))
        self._clear_padding(self._part_error, self._group.rank * self._part)
        rows_of_all = torch.empty_like(received)
        mark("buffers", rows_of_all)
        self._group.all_gather(rows_of_all, part.view(-1)).wait()
        return rows_of_all

    def _unpack(self, packed: Tensor) -> Tensor:
        return unpack(packed, self._part, self.master.dtype).view(-1)

    def _clear_padding(self, errors: Tensor, start: int) -> None:
        """Set the errors of padding to zero. `start`: offset of `errors` in the vector."""
        errors[max(self.master.numel() - start, 0) :].zero_()

    def _step(self, parts: Tensor) -> None:
        rate = self._rate()
        for start, packed in zip(range(0, self.master.numel(), self._part), torch.split(parts, 1), strict=False):
            weights = self.master[start : start + self._part]
            part = slice(start, start + weights.numel())
            divided = self._unpack(packed)[: weights.numel()]
            self._decay(weights).sub_(divided, alpha=rate)
            torch.mul(divided, self._second[part], out=self._first[part])

    def _rate(self) -> float:
        """Learning rate, corrected for the first moment's bias."""
        return self._hyperparameters.learning_rate / (1 - BETAS[0] ** self._steps)

    def _decay(self, weights: Tensor) -> Tensor:
        return weights.mul_(1 - self._hyperparameters.learning_rate * self._hyperparameters.weight_decay)

    def _states(self) -> Iterable[Tensor]:
        return self._first, self._second, self._own_error, self._part_error


BITS = 8


def pack(rows: Tensor) -> Tensor:
    """The bytes of each row of [rows, n] (n: whole blocks): n / 8 bytes of signs, then each block's mean magnitude in fp32.

    The mean magnitude is the best approximation by signs times one number. Shape [rows, `sign_bytes(n)`].
    """
    return torch.cat([_pack(row) for row in torch.split(rows, 1)])


def unpack(packed: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
    """The rows [rows, elements] that the bytes represent. Equal bytes give equal numbers on every rank."""
    count = len(packed)
    codes = packed[:, : elements // BITS]
    # Copy, since the scales may not be aligned to four bytes.
    scales = packed[:, elements // BITS :].clone(memory_format=torch.contiguous_format).view(torch.float32).to(dtype)
    bits = (codes[:, :, None] >> _bit_positions(packed.device)) & 1
    signs = bits.to(dtype).mul_(2).sub_(1)
    return signs.view(count, -1, SIGN_BLOCK).mul_(scales[:, :, None]).view(count, elements)


def _pack(rows: Tensor) -> Tensor:
    count = len(rows)
    blocks = rows.reshape(count, -1, SIGN_BLOCK)
    scales = blocks.abs().mean(dim=2).float()
    bits = (blocks >= 0).view(count, -1, BITS).to(torch.uint8)
    packed = (bits << _bit_positions(rows.device)).sum(dim=2, dtype=torch.uint8)
    return torch.cat((packed, scales.view(torch.uint8)), dim=1)


def _bit_positions(device: torch.device) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=device)
