"""The end of the model: final norm, output projection and loss."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from executor.parallel.chunked_loss import chunked_loss
from executor.parallel.operators import Operators
from executor.parallel.scores import soft_cap
from executor.parallel.tensor import ColumnLinear, TensorParallel, vocabulary_cross_entropy
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

    def forward(self, x: Tensor, labels: Tensor, further: Sequence[Tensor] = (), ahead: Tensor | None = None) -> Tensor:
        """`further`: normed hidden states of the modules for multi-token prediction, with `ahead` [batch, tokens, modules] as
        their labels; then `x` is normed, too."""
        if ahead is None:
            return self._loss(x if self.norm is None else self.norm(x), labels, self.targets > 0)
        loss = self._loss(x, labels, self.targets > 0)
        losses = [self._loss(own, own_labels, True) for own, own_labels in zip(further, ahead.unbind(-1), strict=True)]
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
