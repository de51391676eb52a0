"""Operators by kernels of liger_kernel (0.8), on plain tensors."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.parallel.operators import Operators
from search_spaces.fused_kernels import GATE, LOSS, NORM, ROTATION
from search_spaces.models.model import ModelSpec

Function = Any
"""An autograd function's class: what torch.compile follows is its `apply`, called on the class."""
CASTS_ALL = "gemma"
"""Liger's name for a norm that computes in fp32 from the input to the weight, as torch's does."""
NO_TARGET = -100
"""As in torch's cross-entropy."""


@dataclass(frozen=True, slots=True)
class LigerFunctions:
    """The autograd functions of liger_kernel.ops."""

    norm: Function
    rotate: Function
    gate: Function
    linear_loss: Function


class LigerOperators(Operators):
    """What Liger's kernels do to the tensors that they are given, as its source says:

    | kernel | forward | backward |
    |---|---|---|
    | norm | keeps the input and a number a row | makes a new gradient: `in_place` is off, as others may read what came |
    | rotation | **overwrites** queries and keys | overwrites their gradients |
    | gate | keeps gate and hidden alone | **overwrites** both with their gradients |
    | loss | makes logits some rows at a time, keeps the gradients of rows and weight | multiplies these in place |

    So no forward may be run again on what an earlier run was given (selective checkpointing recalls products), and no backward
    twice (zero-bubble schedules): rules refuse both (`fused_rules`).
    """

    def __init__(self, functions: LigerFunctions, replaces: Collection[str]) -> None:
        self._functions, self._replaces = functions, replaces
        if LOSS in replaces:
            self.linear_loss = self._summed_loss

    def make_norm(self, spec: ModelSpec) -> nn.Module:
        if NORM not in self._replaces:
            return super().make_norm(spec)
        return _Norm(spec.hidden_size, spec.norm_epsilon, self._functions.norm)

    def rotate(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        if ROTATION not in self._replaces:
            return super().rotate(query, key, cosines, sines)
        # One row for all samples, or of packed ones a row each: [samples, tokens, head_dim].
        tables = (table[None] if table.dim() == 2 else table[:, 0] for table in (cosines, sines))
        turned: tuple[Tensor, Tensor] = self._functions.rotate.apply(query, key, *tables)
        return turned

    def gate(self, gate: Tensor, hidden: Tensor, kind: str) -> Tensor:
        if GATE not in self._replaces:
            return super().gate(gate, hidden, kind)
        gated: Tensor = self._functions.gate.apply(gate.contiguous(), hidden.contiguous())
        return gated

    def _summed_loss(self, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the weight are summed over pieces of the rows: in fp32, as one product would."""
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
        normed: Tensor = self._function.apply(x.contiguous(), self.weight, self.eps, 0.0, CASTS_ALL, False)
        return normed
