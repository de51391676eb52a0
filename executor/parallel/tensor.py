"""Tensor and sequence parallelism: sliced matrices, and the collectives between their ranks.

Parameters are plain tensors that hold this rank's slice, not DTensors: ZeRO shards them like other parameters, and every
collective is counted where it is sent.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from executor.parallel.adapters import INWARD, OUTWARD, LowRank, Prompt, adapted_result, prepend
from executor.parallel.block_collectives import (
    gather_features,
    gather_tokens,
    scatter_tokens,
    sum_ranks,
    take_features,
    take_tokens,
    unchanged,
    with_adjoint,
)
from executor.parallel.collectives import ProcessGroup
from executor.parallel.overlapped import multiply_columns, multiply_rows
from executor.parallel.quantised import QuantisedMatrix, float8_linear
from executor.parallel.summed_products import multiply


class TensorParallel:
    """The communication between tensor-parallel ranks [Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022, 4.2].

    Outside `enter` … `leave`, activations are whole on every rank, or with `sequence_parallel` a rank's share of the sequence
    (dimension 1). Inside, every rank has the whole sequence and its slice of the matrices.

    | | forward | backward |
    |---|---|---|
    | enter | nothing; sequence: all-gather | all-reduce; sequence: reduce-scatter |
    | leave | all-reduce; sequence: reduce-scatter | nothing; sequence: all-gather |

    The gathered input of a matrix product is saved for its backward, as in torch's `parallelize_module`: one gather fewer than
    in Megatron, at the cost of more activation memory.
    """

    def __init__(self, group: ProcessGroup, sequence_parallel: bool, overlaps: bool = False) -> None:
        """`overlaps`: whether communication overlaps with the matrix products (`overlapped`)."""
        self.group, self.sequence_parallel = group, sequence_parallel and group.size > 1
        self.size, self.rank = group.size, group.rank
        self.overlaps = overlaps and group.size > 1

    def enter(self, x: Tensor) -> Tensor:
        """[batch, tokens or a share of them, …] to [batch, tokens, …]; only matrix products may use the result."""
        if self.sequence_parallel:
            return with_adjoint(x, self.group, gather_tokens, scatter_tokens)
        # In place: nothing else uses a matrix product's input gradient.
        return with_adjoint(x, self.group, unchanged, sum_ranks)

    def leave(self, x: Tensor) -> Tensor:
        """A rank's summand [batch, tokens, …] to the sum, or the rank's share of its tokens. May overwrite `x`."""
        if self.sequence_parallel:
            return with_adjoint(x, self.group, scatter_tokens, gather_tokens)
        # In place: no backward needs the summands.
        return with_adjoint(x, self.group, sum_ranks, unchanged)

    def multiply_columns(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The result of `enter`, and its products with each of `weights`; only if `overlaps`."""
        return multiply_columns(x, weights, self.group, self.sequence_parallel)

    def multiply_rows(self, x: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
        """The result of `leave` for `x` times `weight`, plus the optional `addend`; only if `overlaps`."""
        return multiply_rows(x, weight, addend, self.group, self.sequence_parallel)

    def gather_features(self, x: Tensor) -> Tensor:
        """Each rank's slice [..., features / ranks] to [..., features]; later operations must be the same on every rank."""
        return with_adjoint(x, self.group, gather_features, take_features)

    def take_tokens(self, x: Tensor) -> Tensor:
        """Activations outside `enter` … `leave` to this rank's share of their tokens (dimension 1)."""
        return x if self.sequence_parallel else with_adjoint(x, self.group, take_tokens, gather_tokens)

    def join_tokens(self, x: Tensor) -> Tensor:
        """The reverse of `take_tokens`: each rank's share to activations as they are outside `enter` … `leave`."""
        # Each rank has the whole gradient of all tokens.
        return x if self.sequence_parallel else with_adjoint(x, self.group, gather_tokens, take_tokens)

    def own_tokens(self, x: Tensor) -> Tensor:
        """The share of dimension 0 (tokens) that this rank has outside `enter` … `leave`."""
        return x.chunk(self.size)[self.rank] if self.sequence_parallel else x


class Matrix(nn.Linear):
    """This rank's part of a matrix of our own modules: weight [outputs, inputs], and perhaps an adapter."""

    split: ClassVar[dict[str, int]] = {}
    """Parameter -> the dimension that is sliced over tensor-parallel ranks."""
    adapter_split: ClassVar[dict[str, int]] = {}
    """The same of the factors of an adapter."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.adapter: LowRank | None = None
        self.quantised: QuantisedMatrix | None = None
        self.float8 = ""
        """The recipe (`fp8_recipe`) of its products in 8 bits; empty: they are not."""
        self.once = True
        """Whether a micro-batch multiplies by it once."""
        self.has_sum = False
        """Whether products add the weight's gradient to its sum (`summed_products`)."""

    def adapt(self, rank: int) -> None:
        """Add an adapter to the matrix."""
        self.adapter = LowRank(self, rank, self.adapter_split)

    def quantise(self, bits: int) -> None:
        """Quantise the frozen matrix to `bits`."""
        self.quantised = QuantisedMatrix(self.weight, bits, transposed=self.split["weight"] == 1)
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        return adapted_result(self._product(x, self.bias), self.adapter, x)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.quantised is None and not self.float8:
            return multiply(x, self.weight, bias) if self.has_sum else functional.linear(x, self.weight, bias)
        product: Tensor = float8_linear(x, self.weight, self.float8) if self.quantised is None else self.quantised(x)
        return product if bias is None else product + bias


class ColumnLinear(Matrix):
    """A slice of the output features: weight [out / ranks, in]."""

    split: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}
    adapter_split: ClassVar[dict[str, int]] = {OUTWARD: 0}

    def __init__(self, inputs: int, outputs: int, tensor: TensorParallel, bias: bool) -> None:
        super().__init__(inputs, outputs // tensor.size, bias)

    def completed(self, product: Tensor, x: Tensor) -> Tensor:
        """The result, from the `product` of `x` and the weight: adds bias and adapter."""
        return adapted_result(product if self.bias is None else product + self.bias, self.adapter, x)


class WholeLinear(Matrix):
    """A matrix that is whole on each rank, which computes all of its outputs."""


class RowLinear(Matrix):
    """A slice of the input features: weight [out, in / ranks]; the ranks' results are summed, and the bias is added once.

    With `leaves` off the caller sums the results, and each rank adds its part of the bias.
    """

    split: ClassVar[dict[str, int]] = {"weight": 1}
    adapter_split: ClassVar[dict[str, int]] = {INWARD: 1}

    def __init__(self, inputs: int, outputs: int, tensor: TensorParallel, bias: bool, leaves: bool = True) -> None:
        super().__init__(inputs // tensor.size, outputs, bias)
        self.tensor, self.leaves = tensor, leaves

    def forward(self, x: Tensor) -> Tensor:
        if self.tensor.size == 1 and self.quantised is None and not self.float8:
            return super().forward(x)
        if self.leaves and self.tensor.overlaps:
            return self._with_bias(self.tensor.multiply_rows(x, self.weight, None if self.adapter is None else self.adapter(x)))
        summand = adapted_result(self._product(x, None), self.adapter, x)
        if not self.leaves:
            return summand if self.bias is None else summand + self.bias / self.tensor.size
        return self._with_bias(self.tensor.leave(summand))

    def _with_bias(self, total: Tensor) -> Tensor:
        return total if self.bias is None else total + self.bias


def enter_through(x: Tensor, tensor: TensorParallel, matrices: Sequence[ColumnLinear]) -> list[Tensor]:
    """Enter `x` and apply each of the matrices to it."""
    if not tensor.overlaps:
        x = tensor.enter(x)
        return [matrix(x) for matrix in matrices]
    x, products = tensor.multiply_columns(x, [matrix.weight for matrix in matrices])
    return [matrix.completed(product, x) for matrix, product in zip(matrices, products, strict=True)]


class VocabularyEmbedding(nn.Embedding):
    """A slice of the table's rows: [vocabulary / ranks, width]. Ids of other ranks' rows give zeros; results are summed."""

    split: ClassVar[dict[str, int]] = {"weight": 0}

    def __init__(self, rows: int, width: int, tensor: TensorParallel) -> None:
        super().__init__(rows // tensor.size, width)
        self.tensor = tensor

    def forward(self, tokens: Tensor, prompt: Prompt | None = None) -> Tensor:
        """`prompt`: virtual tokens to put before the tokens."""
        if self.tensor.size == 1:
            return with_prompt(prompt, super().forward(tokens))
        local_tokens = tokens - self.tensor.rank * self.num_embeddings
        elsewhere = (local_tokens < 0) | (local_tokens >= self.num_embeddings)
        rows = super().forward(local_tokens.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        if prompt is None or not self.tensor.sequence_parallel:
            return with_prompt(prompt, self.tensor.leave(rows))
        # Before tokens are scattered: each rank adds its part of the prompt, and has a summand of its gradient.
        return self.tensor.leave(prepend(prompt.rows / self.tensor.size, rows))


def with_prompt(prompt: Prompt | None, x: Tensor) -> Tensor:
    """The rows of tokens, preceded by those of the prompt, if any."""
    if prompt is None:
        return x
    result: Tensor = prompt(x)
    return result


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, tensor: TensorParallel, padded: bool = False) -> Tensor:
    """Summed cross-entropy of `logits` [n, vocabulary / ranks] against `targets` [n], ids of the whole vocabulary; if tokens
    are `padded`, negative targets are ignored.

    No rank holds all logits of a token. The maximum is reduced first, then the sum of exponentials together with the target's
    logit: 3 n numbers in two all-reduces [Shoeybi et al. 2019, 3].
    """
    if tensor.size == 1:
        return functional.cross_entropy(logits, targets, reduction="sum")
    losses: Tensor = _VocabularyLoss.apply(logits, targets, tensor)  # type: ignore[no-untyped-call]
    return (losses.masked_fill(targets < 0, 0) if padded else losses).sum()


def vocabulary_probabilities(
    logits: Tensor, targets: Tensor, tensor: TensorParallel, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy of each token [n], this rank's share of its probabilities [n, vocabulary / ranks], the index of its target
    in the share, and whether the target is on another rank. With `overwrite` the probabilities overwrite the logits.
    """
    largest = logits.detach().amax(dim=-1)
    tensor.group.all_reduce(largest, dist.ReduceOp.MAX).wait()
    local_targets = targets - tensor.rank * logits.shape[-1]
    elsewhere = local_targets < 0
    if tensor.size > 1:
        elsewhere |= local_targets >= logits.shape[-1]
    local_targets = local_targets.masked_fill(elsewhere, 0)
    target = (logits.gather(-1, local_targets[:, None]).squeeze(-1) - largest).masked_fill(elsewhere, 0)
    exponentials = torch.sub(logits, largest[:, None], out=logits if overwrite else None).exp_()
    sums = torch.stack((exponentials.sum(dim=-1), target))
    tensor.group.all_reduce(sums).wait()
    return sums[0].log() - sums[1], exponentials.div_(sums[0][:, None]), local_targets, elsewhere


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tensor: TensorParallel) -> Tensor:
        losses, *saved_tensors = vocabulary_probabilities(logits, targets, tensor)
        ctx.save_for_backward(*saved_tensors)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local_targets, elsewhere = ctx.saved_tensors
        gradient = probabilities * gradients[0][:, None]
        gradient.scatter_add_(-1, local_targets[:, None], -gradients[0].masked_fill(elsewhere, 0)[:, None])
        return gradient, None, None
