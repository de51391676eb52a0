"""The end of the model: final norm, output projection and loss, also in chunks of tokens; and multi-token prediction."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor.parallel.attention import Documents, soft_cap
from executor.parallel.operators import Operators, Rotary
from executor.parallel.tensor import ColumnLinear, TensorParallel, vocabulary_cross_entropy, vocabulary_probabilities
from search_spaces.models.model import ModelSpec


class OutputProjection(ColumnLinear):
    """A slice of the vocabulary: weight [vocabulary / ranks, width]."""

    def forward(self, x: Tensor, use: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The logits of `x`, or `use(weight)`. It runs within this module's call, so that hooks on the module apply."""
        return super().forward(x) if use is None else use(self.weight)


class Head(nn.Module):
    """Final norm, output projection and mean cross-entropy in at least fp32. Tensor ranks divide the vocabulary.

    With `chunk` > 0 the logits exist for that many tokens at a time, and forward computes their gradients (`chunked_loss`).
    Instead, logits are recomputed in backward if losses of many micro-batches wait for their backward, since each would store a
    gradient of the weight, and in fp16, which cannot represent unscaled gradients. If samples contain padding (`targets`), the
    loss is not a mean over its own targets, but weights them as those of the whole step.

    With modules for multi-token prediction, the loss is that of the model, but its gradient is also that of `mtp_loss_weight` x
    the mean of theirs. Each of theirs is a sum over its targets divided by the number of the model's [DeepSeek-AI 2024,
    DeepSeek-V3, 2.2].
    """

    def __init__(self, spec: ModelSpec, tensor: TensorParallel, operators: Operators, losses_wait: bool, chunk: int) -> None:
        super().__init__()
        self.chunk, self.tensor, self.virtual = chunk, tensor, spec.prompt_length
        self.losses_wait, self.scale, self.softcap = losses_wait, spec.output_scale, spec.output_softcap
        self.targets = 0.0
        """Mean number of targets per micro-batch of the step; 0: the number of labels, since there is no padding."""
        self.further_weight = spec.mtp_loss_weight
        self.linear_loss = operators.linear_loss
        self.norm = operators.make_norm(spec) if spec.final_norm else None
        width = spec.embedding_size or spec.hidden_size
        self.project = nn.Linear(spec.hidden_size, width, bias=False) if spec.embedding_size else None
        self.output = OutputProjection(width, spec.vocab_size, tensor, bias=False)
        self.output.once = not chunk and not spec.mtp_layers

    def forward(self, x: Tensor, labels: Tensor, further: Sequence[Tensor] = (), ahead: Tensor | None = None) -> Tensor:
        """`further`: normed hidden states of the modules for multi-token prediction, with `ahead` [batch, tokens, modules] as
        their labels; then `x` is normed, too."""
        if ahead is None:
            return self._loss(x if self.norm is None else self.norm(x), labels, self.targets > 0)
        loss = self._loss(x, labels, self.targets > 0)
        losses = [self._loss(hidden, own_labels, True) for hidden, own_labels in zip(further, ahead.unbind(-1), strict=True)]
        extra = torch.stack(losses).sum() * (self.further_weight / len(losses))
        return loss + (extra - extra.detach())

    def _loss(self, x: Tensor, labels: Tensor, padded: bool) -> Tensor:
        """The loss of normed hidden states; `padded`: some labels are negative, and do not count."""
        if self.project is not None:
            x = self.project(x)
        if self.scale != 1:
            x = x * self.scale
        x = self.tensor.enter(x)[:, self.virtual :]
        rows, targets = x.flatten(0, 1), labels.flatten()
        if self.linear_loss is not None:
            return self.linear_loss(rows, self.output.weight, targets) / (self.targets or targets.numel())
        # Even for a single chunk: the gradient overwrites the logits, so that fewer tokens never take more memory.
        if self.chunk and torch.is_grad_enabled() and not self.losses_wait and rows.dtype != torch.float16:
            scale = 1 / (self.targets or targets.numel())
            use = functools.partial(
                chunked_loss, rows, targets=targets, chunk=self.chunk, tensor=self.tensor, scale=scale, padded=padded,
                softcap=self.softcap,
            )  # fmt: skip
            loss: Tensor = self.output(rows, use)
            return loss
        if not self.chunk or self.chunk >= rows.shape[0]:
            return self._summed_loss(rows, targets, padded) / (self.targets or targets.numel())
        parts = zip(torch.split(rows, self.chunk), torch.split(targets, self.chunk), strict=True)
        recomputed_loss = functools.partial(checkpoint, self._summed_loss, use_reentrant=False, preserve_rng_state=False)
        sums = [recomputed_loss(part, target, padded) for part, target in parts]
        return torch.stack(sums).sum() / (self.targets or targets.numel())

    def _summed_loss(self, rows: Tensor, targets: Tensor, padded: bool) -> Tensor:
        logits = self.output(rows)
        precise = torch.promote_types(logits.dtype, torch.float32)
        if self.softcap:
            logits = soft_cap(logits, self.softcap)
        return vocabulary_cross_entropy(logits.to(precise), targets, self.tensor, padded=padded)


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
                chunk_gradient = to_rows[first : first + chunk]
                torch.addmm(chunk_gradient, gradient, weight, beta=0, alpha=scale, out=chunk_gradient)
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
        local_targets = targets.masked_fill(elsewhere, 0)
        # From the logits' dtype in one kernel, as cross-entropy does it.
        likelihoods = functional.log_softmax(logits, dim=-1, dtype=precise)
        del logits
        losses = -likelihoods.gather(-1, local_targets[:, None]).squeeze(-1)
        gradient = likelihoods.exp_()
    else:
        losses, gradient, local_targets, elsewhere = vocabulary_probabilities(
            logits.to(precise), targets, tensor, overwrite=True
        )
    if padded:
        ignored = targets < 0
        losses = losses.masked_fill(ignored, 0)
        gradient.masked_fill_(ignored[:, None], 0)
    target_mask = torch.ones_like(losses).masked_fill_(elsewhere, 0)
    gradient.scatter_add_(-1, local_targets[:, None], -target_mask[:, None])
    return losses.sum(), gradient.to(dtype)


class PredictionModule(nn.Module):
    """Predicts one token further than the module before it, or than the model [DeepSeek-AI 2024, DeepSeek-V3, 2.2].

    It joins a token's last hidden state with the embedding of the token that was predicted from it, each normed, projects both
    to the hidden width, and applies a layer and a norm. As in Megatron-LM and SGLang, the hidden state is that after the final
    norm, and the embedding comes first, as in the published weights. Embedding and output projection are the model's.

    Tensor ranks hold all but the layer whole, and apply it to all tokens, or with sequence parallelism to their share.
    """

    def __init__(self, spec: ModelSpec, operators: Operators, block: nn.Module) -> None:
        super().__init__()
        self.hidden_norm = operators.make_norm(spec)
        self.embedding_norm = operators.make_norm(spec)
        self.project = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        self.block = block
        self.norm = operators.make_norm(spec)

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Rotary, documents: Documents | None) -> Tensor:
        """Hidden states and embeddings [batch, tokens, hidden] to normed hidden states of the same shape."""
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        result: Tensor = self.norm(self.block(self.project(joined), rotary, documents))
        return result
