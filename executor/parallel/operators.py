"""The operators of our modules other than matrix products, attention and collectives, implemented by torch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from search_spaces.models.model import CLAMPED, ModelSpec, Norm

LinearLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Summed cross-entropy of rows [n, hidden] times a weight [vocabulary, hidden] against targets [n], in at least fp32."""


class Operators:
    """Norms, rotations, gates and the loss, implemented by torch operators; fused-kernel packages override some.

    Overrides take and return plain tensors of these shapes and dtypes, including a rank's slices. Autograd calls their backward
    once for every forward.
    """

    linear_loss: LinearLoss | None = None
    """Replaces the output projection and its loss if a rank has the whole vocabulary; None: not replaced."""

    def make_norm(self, spec: ModelSpec, width: int = 0) -> nn.Module:
        """A norm over `width`, or over the hidden width, with `weight` and, if the model's norm has one, `bias`."""
        if spec.zero_centered_norms:
            return ZeroCenteredNorm(width or spec.hidden_size, spec.norm_epsilon)
        kind = nn.RMSNorm if width or spec.norm is Norm.RMSNORM else nn.LayerNorm
        return kind(width or spec.hidden_size, eps=spec.norm_epsilon)

    def rotate(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys [batch, heads, tokens, head_dim] by the angles of their positions [tokens, rotated]."""
        return rotate(query, cosines, sines), rotate(key, cosines, sines)

    def gate(self, gate: Tensor, hidden: Tensor, kind: str) -> Tensor:
        """The activated gate [..., width] times `hidden`."""
        if kind == CLAMPED:
            return _clamped(gate, hidden)
        return self.activate(gate, kind) * hidden

    def activate(self, x: Tensor, kind: str) -> Tensor:
        match kind:
            case "silu":
                return functional.silu(x)
            case "gelu":
                return functional.gelu(x)
            case "gelu_tanh":
                return functional.gelu(x, approximate="tanh")
            case _:
                return functional.relu(x)


ALPHA, LIMIT = 1.702, 7.0


def _clamped(gate: Tensor, hidden: Tensor) -> Tensor:
    """`CLAMPED` of a gate and `hidden` [..., width]."""
    gate = gate.clamp(max=LIMIT)
    return (hidden.clamp(-LIMIT, LIMIT) + 1) * (gate * torch.sigmoid(ALPHA * gate))


class ZeroCenteredNorm(nn.Module):
    """RMSNorm that multiplies by 1 + `weight`, in at least fp32 as Gemma does."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.zeros(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(precise)
        return functional.rms_norm(x.to(precise), weight.shape, weight, self.epsilon).to(x.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first dimensions of x [batch, heads, tokens, head_dim], halves paired as in Llama and GPT-NeoX."""
    width = cosines.shape[-1]
    rotated, kept = x[..., :width], x[..., width:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((rotated, kept), dim=-1) if kept.shape[-1] else rotated
