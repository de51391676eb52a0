"""The output projection and its loss for so many tokens at a time, with gradients that forward makes."""

from typing import Any

import torch
from torch import Tensor

from executor.engines.native.tensor import TensorParallel, vocabulary_probabilities


def chunked_loss(
    rows: Tensor, weight: Tensor, targets: Tensor, chunk: int, tensor: TensorParallel, scale: float, padded: bool
) -> Tensor:
    """`scale` times the summed cross-entropy of `rows` [n, hidden] times the transpose of `weight` [vocabulary / ranks, hidden]
    against `targets` [n], in at least fp32; where tokens are `padded`, negative targets count nothing.

    1. Of `chunk` tokens the logits are made, then in their place the gradient of the loss to them.
    2. While they are there, that is multiplied on: to the gradient of the chunk's rows, and into that of the weight. So no
       logits are made a second time, and tensor ranks exchange largest and sums of logits once: three products a chunk.
    3. Backward multiplies both by the gradient of the loss, in place. It can be called once.

    The recipe of Liger's FusedLinearCrossEntropy [Hsu et al. 2024, 3.2], in torch's own operators. Held from forward to
    backward are the gradients, of the size of rows and weight, in their types.
    """
    result: Tensor = _ChunkedLoss.apply(rows, weight, targets, chunk, tensor, scale, padded)  # type: ignore[no-untyped-call]
    return result


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, chunk: int, tensor: TensorParallel, scale: float, padded: bool
    ) -> Tensor:
        of_rows, of_weight, *_ = ctx.needs_input_grad
        to_rows = torch.empty_like(rows) if of_rows else None
        to_weight: Tensor | None = None
        sums = []
        for first in range(0, len(rows), chunk):
            part = rows[first : first + chunk]
            loss, gradient = _loss_and_gradient(part @ weight.T, targets[first : first + chunk], tensor, scale, padded)
            sums.append(loss)
            if to_rows is not None:
                torch.mm(gradient, weight, out=to_rows[first : first + chunk])
            if to_weight is not None:
                torch.addmm(to_weight, gradient.T, part, out=to_weight)
            elif of_weight:
                to_weight = gradient.T @ part
            del gradient
        # Not by `save_for_backward`, which would share them: a weight's gradient could not become the parameter's own.
        ctx.gradients = to_rows, to_weight
        return torch.stack(sums).sum() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (to_rows, to_weight), ctx.gradients = ctx.gradients, None
        made = (None if made is None else made.mul_(gradients[0]) for made in (to_rows, to_weight))
        del to_rows, to_weight
        return *made, None, None, None, None, None


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, tensor: TensorParallel, scale: float, padded: bool
) -> tuple[Tensor, Tensor]:
    """The summed loss, and `scale` times its gradient to the logits, in their type. `logits` may be overwritten."""
    dtype = logits.dtype
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    losses, probabilities, own, elsewhere = vocabulary_probabilities(logits, targets, tensor, overwrite=True)
    ones = torch.ones_like(losses)
    if padded:
        losses, nothing = losses.masked_fill(targets < 0, 0), targets < 0
        ones = ones.masked_fill_(nothing, 0)
        probabilities.mul_(ones[:, None])
    probabilities.scatter_add_(-1, own[:, None], -ones.masked_fill(elsewhere, 0)[:, None])
    return losses.sum(), probabilities.mul_(scale).to(dtype)
