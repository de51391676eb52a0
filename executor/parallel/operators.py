"""What our modules compute with beside matrix products, attention and collectives: torch's own operators."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from search_spaces.models.model import ModelSpec, Norm

LinearLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Summed cross-entropy of rows [n, hidden] times a weight [vocabulary, hidden] against targets [n], in at least fp32."""


class Operators:
    """Norms, rotations, gates and the loss, each by torch's own operators; a package of fused kernels overrides some.

    What overrides takes and gives plain tensors of these shapes and types, also where they are a rank's slices, and has a
    backward that autograd can call once for every forward.
    """

    linear_loss: LinearLoss | None = None
    """What takes the place of the output projection and its loss, where a rank has the whole vocabulary; None: nothing."""

    def make_norm(self, spec: ModelSpec) -> nn.Module:
        """A norm over the hidden width, with `weight` and, where the model's norm has one, `bias`."""
        kind = nn.RMSNorm if spec.norm is Norm.RMSNORM else nn.LayerNorm
        return kind(spec.hidden_size, eps=spec.norm_epsilon)

    def rotate(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [batch, heads, tokens, head_dim] turned by the angles of their places [tokens, rotated]."""
        return rotate(query, cosines, sines), rotate(key, cosines, sines)

    def gate(self, gate: Tensor, hidden: Tensor, kind: str) -> Tensor:
        """The gate [..., width], through its activation, times what it gates."""
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


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first dimensions of x [batch, heads, tokens, head_dim], halves paired as in Llama and GPT-NeoX."""
    rotated = cosines.shape[-1]
    turned, kept = x[..., :rotated], x[..., rotated:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned
