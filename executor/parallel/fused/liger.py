"""Operators implemented by kernels of liger_kernel (0.8), on plain tensors."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.parallel.operators import Operators
from search_spaces.kernels import GATE, LOSS, NORM, ROTATION
from search_spaces.models.model import ModelSpec

Function = Any
"""The class of an autograd function; torch.compile traces `apply` only if it is called on the class."""
NO_TARGET = -100
"""The ignored label, as in torch's cross-entropy."""


@dataclass(frozen=True, slots=True)
class LigerFunctions:
    """The autograd functions of liger_kernel.ops."""

    norm: Function
    rotate: Function
    gate: Function
    linear_loss: Function


class LigerOperators(Operators):
    """Operators by Liger's kernels. According to their source, they do the following to their tensors:

    | kernel | forward | backward |
    |---|---|---|
    | norm | saves the input and a number per row | allocates a new gradient: `in_place` is off, as others may read the old |
    | rotation | **overwrites** queries and keys | overwrites their gradients |
    | gate | saves only gate and hidden | **overwrites** both with their gradients |
    | loss | computes logits some rows at a time, saves the gradients of rows and weight | multiplies these in place |

    So a forward cannot run again on the inputs of an earlier run (selective checkpointing reuses saved products), and a
    backward cannot run twice (zero-bubble schedules): rules refuse both (`executor.engines.native.capability`).
    """

    def __init__(self, functions: LigerFunctions, replaces: Collection[str]) -> None:
        self._functions, self._replaces = functions, replaces
        if LOSS in replaces:
            self.linear_loss = self._summed_loss

    def make_norm(self, spec: ModelSpec, width: int = 0) -> nn.Module:
        if NORM not in self._replaces or width:
            return super().make_norm(spec, width)
        return _Norm(spec.hidden_size, spec.norm_epsilon, self._functions.norm)

    def rotate(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        if ROTATION not in self._replaces:
            return super().rotate(query, key, cosines, sines)
        # One row for all samples, or for packed samples one row each: [samples, tokens, head_dim].
        tables = (table[None] if table.dim() == 2 else table[:, 0] for table in (cosines, sines))
        rotated: tuple[Tensor, Tensor] = self._functions.rotate.apply(query, key, *tables)
        return rotated

    def gate(self, gate: Tensor, hidden: Tensor, kind: str) -> Tensor:
        if GATE not in self._replaces:
            return super().gate(gate, hidden, kind)
        gated: Tensor = self._functions.gate.apply(gate.contiguous(), hidden.contiguous())
        return gated

    def _summed_loss(self, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Summed loss. Weight gradients are accumulated over chunks of rows in fp32, as in a single product."""
        narrow = weight.dtype.itemsize < torch.float32.itemsize
        loss: Tensor = self._functions.linear_loss.apply(
            rows.contiguous(), weight, targets.contiguous(), None, None, NO_TARGET, 0.0, 0.0, "sum", None, False,
            torch.float32 if narrow else None,
        )[0]  # fmt: skip
        return loss


class _Norm(nn.RMSNorm):
    def __init__(self, width: int, epsilon: float, function: Function) -> None:
        super().__init__(width, eps=epsilon)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        # "gemma": the casting mode that computes in fp32 up to and including the weight, as torch's norm does.
        normed: Tensor = self._function.apply(x.contiguous(), self.weight, self.eps, 0.0, "gemma", False)
        return normed
