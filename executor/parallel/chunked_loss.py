"""The output projection and its loss for a chunk of tokens at a time, with gradients computed in forward."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from executor.parallel.tensor import TensorParallel, vocabulary_probabilities


def chunked_loss(
    rows: Tensor, weight: Tensor, targets: Tensor, chunk: int, tensor: TensorParallel, scale: float, padded: bool,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """`scale` times the summed cross-entropy of `rows` [n, hidden] times the transpose of `weight` [vocabulary / ranks, hidden]
    against `targets` [n], in at least fp32; if tokens are `padded`, negative targets are ignored. `softcap`: logits are
    limited to c tanh(logit / c); 0: not limited.

    1. Compute the logits of `chunk` tokens, then overwrite them with the gradient of the loss to them.
    2. Multiply this gradient into the gradients of the chunk's rows and of the weight. So logits are not recomputed, and tensor
       ranks exchange the maxima and sums of logits once: three products per chunk.
    3. Backward multiplies both by the gradient of the loss, in place. It can be called only once.

    This is the algorithm of Liger's FusedLinearCrossEntropy [Hsu et al. 2024, 3.2] in torch operators. From forward to backward
    it stores the gradients, which have the sizes and dtypes of rows and weight; under autocast, autocast's dtype.
    """
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):  # which converts the operands of products, but not of those with `out`
        rows, weight = (value.to(torch.get_autocast_dtype(kind)) for value in (rows, weight))
    result: Tensor = _ChunkedLoss.apply(rows, weight, targets, chunk, tensor, scale, padded, softcap)  # type: ignore[no-untyped-call]
    return result


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, chunk: int, tensor: TensorParallel, scale: float, padded: bool,
        softcap: float,
    ) -> Tensor:  # fmt: skip
        of_rows, of_weight, *_ = ctx.needs_input_grad
        to_rows = torch.empty_like(rows) if of_rows else None
        to_weight = torch.empty_like(weight) if of_weight else None
        sums = []
        for first in range(0, len(rows), chunk):
            part = rows[first : first + chunk]
            logits = part @ weight.T
            if softcap:
                logits = logits.div_(softcap).tanh_().mul_(softcap)
            slope = 1 - (logits / softcap).square() if softcap else None
            loss, gradient = _loss_and_gradient(logits, targets[first : first + chunk], tensor, padded)
            del logits
            if slope is not None:
                gradient = gradient.mul_(slope)
                del slope
            sums.append(loss)
            if to_rows is not None:
                own = to_rows[first : first + chunk]
                torch.addmm(own, gradient, weight, beta=0, alpha=scale, out=own)
            if to_weight is not None:
                torch.addmm(to_weight, gradient.T, part, beta=int(first > 0), alpha=scale, out=to_weight)
            del gradient
        # Not by `save_for_backward`, which would keep a reference: the weight's gradient could not become `parameter.grad`.
        ctx.gradients = to_rows, to_weight
        return torch.stack(sums).sum() * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (to_rows, to_weight), ctx.gradients = ctx.gradients, None
        scaled = (None if value is None else value.mul_(gradients[0]) for value in (to_rows, to_weight))
        del to_rows, to_weight
        return *scaled, None, None, None, None, None, None


def _loss_and_gradient(logits: Tensor, targets: Tensor, tensor: TensorParallel, padded: bool) -> tuple[Tensor, Tensor]:
    """The summed loss, and its gradient to the logits, in their dtype."""
    dtype, precise = logits.dtype, torch.promote_types(logits.dtype, torch.float32)
    if tensor.size == 1:
        elsewhere = targets < 0
        own = targets.masked_fill(elsewhere, 0)
        # From the logits' dtype in one kernel, as cross-entropy does it.
        likelihoods = functional.log_softmax(logits, dim=-1, dtype=precise)
        del logits
        losses = -likelihoods.gather(-1, own[:, None]).squeeze(-1)
        gradient = likelihoods.exp_()
    else:
        losses, gradient, own, elsewhere = vocabulary_probabilities(logits.to(precise), targets, tensor, overwrite=True)
    if padded:
        ignored = targets < 0
        losses = losses.masked_fill(ignored, 0)
        gradient.masked_fill_(ignored[:, None], 0)
    ones = torch.ones_like(losses).masked_fill_(elsewhere, 0)
    gradient.scatter_add_(-1, own[:, None], -ones[:, None])
    return losses.sum(), gradient.to(dtype)
