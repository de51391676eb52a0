"""1-bit Adam: after a warm-up in which it is AdamW, ranks send the signs of their momenta instead of their gradients."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import DeviceOptimizer, Shares
from executor.engines.native.signs import pack, unpack
from executor.parallel.collectives import mark
from search_spaces.compression import sign_share
from search_spaces.optimizers import BETAS, EPSILON, LEAST_ROOT


class OneBitAdam(DeviceOptimizer):
    """A step [Tang et al. 2021, 1-bit Adam, algorithm 1], with AdamW's decay and correction for bias:

    1. In the first `warmup_steps` gradients are summed over the ranks, and the update is AdamW's.
    2. Then the second moment stays as it is. Its root, at least LEAST_ROOT of the root of its parameter's mean, divides from
       then on: without that bound the sign of an element that had no gradient yet would move it beyond all measure.
    3. Each rank adds its own gradient (R times its summand of the mean, of R ranks) to the common momentum, divides it by the
       root, and adds what it has left unsaid so far. Of that it sends every rank the signs of the part that is that rank's,
       with the mean magnitude of each block, and keeps the difference for the next step (the worker's error).
    4. Every rank averages its part, adds what it has left unsaid of that itself, and sends all the signs of it (the server's
       error). What all then have is the common momentum, divided: the step, and times the root the momentum to go on from.

    The paper sends the momentum itself. Over the root, which all ranks know, numbers of a block are of one size, as one
    magnitude for all of them needs; sums and errors are the same but for that factor, which never changes.
    """

    def __init__(self, master: Tensor, shares: Shares, hyperparameters: Hyperparameters, warmup_steps: int) -> None:
        super().__init__(master, shares.layout)
        self._group, self._hyperparameters, self._warmup_steps = shares.group, hyperparameters, warmup_steps
        self._first, self._second = torch.zeros_like(master), torch.zeros_like(master)
        """Of the second moment, after warm-up its root."""
        self._part = sign_share(master.numel(), self._group.size)
        self._own_error = master.new_zeros(self._group.size * self._part)
        self._part_error = master.new_zeros(self._part)
        self._steps = 0

    @property
    def sums_itself(self) -> bool:
        """Whether the next update takes this rank's own gradient."""
        return self._steps >= self._warmup_steps

    def settled(self) -> bool:
        """Whether steps are what they will be from now on."""
        return self.sums_itself

    def _update(self, gradient: Sequence[Tensor]) -> None:
        compressed = self.sums_itself
        self._steps += 1
        if compressed:
            self._add_momentum(gradient)
            self._step(self._common())
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
        """The second moment becomes what steps are divided by from now on."""
        _, second_decay = BETAS
        for slot in self.layout.slots:
            second = self._second[slot.offset : slot.offset + slot.shard_elements].div_(1 - second_decay**self._steps)
            least = second.mean().sqrt() * LEAST_ROOT
            second.sqrt_().clamp_(min=least).add_(EPSILON)

    def _add_momentum(self, gradient: Sequence[Tensor]) -> None:
        """Add this rank's own momentum, divided by the root, to what it has left unsaid."""
        first_decay, _ = BETAS
        for bucket, piece in enumerate(gradient):
            start = self.layout.start(bucket)
            part = slice(start, start + piece.numel())
            own = piece.mul_(self._group.size * (1 - first_decay)).add_(self._first[part], alpha=first_decay)
            self._own_error[part].add_(own.div_(self._second[part]))

    def _common(self) -> Tensor:
        """The bytes of all parts of the common momentum [ranks, …], from this rank's own in `_own_error`."""
        rows = self._own_error.view(self._group.size, self._part)
        sent = pack(rows)
        received = torch.empty_like(sent)
        for buffer in (sent, received):
            mark("buffers", buffer)
        each = [1] * self._group.size
        work = self._group.all_to_all(received, sent, each, each)
        for row, said in zip(rows, torch.split(sent, 1), strict=True):
            row.sub_(self._told(said))
        self._forget_padding(self._own_error, 0)
        work.wait()
        for row in torch.split(received, 1):
            self._part_error.add_(self._told(row), alpha=1 / self._group.size)
        own = pack(self._part_error[None])
        self._part_error.sub_(self._told(own))
        self._forget_padding(self._part_error, self._group.rank * self._part)
        rows_of_all = torch.empty_like(received)
        mark("buffers", rows_of_all)
        self._group.all_gather(rows_of_all, own.view(-1)).wait()
        return rows_of_all

    def _told(self, packed: Tensor) -> Tensor:
        return unpack(packed, self._part, self.master.dtype).view(-1)

    def _forget_padding(self, errors: Tensor, start: int) -> None:
        """Behind the last number there is nothing to make good. `start`: of `errors` in the vector."""
        errors[max(self.master.numel() - start, 0) :].zero_()

    def _step(self, parts: Tensor) -> None:
        rate = self._rate()
        for start, packed in zip(range(0, self.master.numel(), self._part), torch.split(parts, 1), strict=False):
            weights = self.master[start : start + self._part]
            place = slice(start, start + weights.numel())
            divided = self._told(packed)[: weights.numel()]
            self._decay(weights).sub_(divided, alpha=rate)
            torch.mul(divided, self._second[place], out=self._first[place])

    def _rate(self) -> float:
        """Of the learning, corrected for the first moment's bias."""
        return self._hyperparameters.learning_rate / (1 - BETAS[0] ** self._steps)

    def _decay(self, weights: Tensor) -> Tensor:
        return weights.mul_(1 - self._hyperparameters.learning_rate * self._hyperparameters.weight_decay)

    def _states(self) -> Iterable[Tensor]:
        return self._first, self._second, self._own_error, self._part_error
