"""The operators of our modules other than matrix products, attention and collectives; rotary positions."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from search_spaces.models.config_keys import RopeKind, RopeScaling
from search_spaces.models.model import CLAMPED, ModelSpec, Norm


class Operators:
    """Norms, rotations, gates and the loss, implemented by torch operators; fused-kernel packages override some.

    Overrides take and return plain tensors of these shapes and dtypes, including a rank's slices. Autograd calls their backward
    once for every forward.
    """

    linear_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
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
            limit = 7.0
            gate = gate.clamp(max=limit)
            return (hidden.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(1.702 * gate))
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
    rotated, unrotated = x[..., :width], x[..., width:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((rotated, unrotated), dim=-1) if unrotated.shape[-1] else rotated


Rotary = tuple[Tensor, ...] | None
"""Cosines and sines of tokens; in layers that are not rotated, factors of their queries; None: there are none."""


def rotary_table(spec: ModelSpec, length: int, windowed: bool = False) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape [length, rotated dimensions], fp32. [Su et al. 2021, RoFormer, eq. 34]

    `windowed`: of layers with the window, which may have other frequencies.
    """
    uses_window_theta = windowed and spec.window_rope_theta > 0
    theta, scaling = (spec.window_rope_theta, None) if uses_window_theta else (spec.rope_theta, spec.rope_scaling)
    rotated = spec.rotated_size
    frequencies = 1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling, theta, rotated, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    both_halves = torch.cat((angles, angles), dim=-1)
    factor = 1.0 if scaling is None else scaling.attention_factor
    return both_halves.cos() * factor, both_halves.sin() * factor


def query_factors(spec: ModelSpec, length: int) -> Tensor:
    """Factors [length, 1] of queries by their positions, in fp64 (`ModelSpec.query_temperature`)."""
    spans = (torch.arange(length, dtype=torch.float64) + 1).div(spec.temperature_span).floor()
    return (1 + spec.query_temperature * spans.log1p())[:, None]


def _scaled(frequencies: Tensor, scaling: RopeScaling, theta: float, rotated: int, length: int) -> Tensor:
    """The frequencies [rotated / 2] of a model whose sequences are longer than those that it was first trained on."""
    match scaling.kind:
        case RopeKind.LINEAR:
            return frequencies / scaling.factor
        case RopeKind.LLAMA3:
            return _blended_by_wavelength(frequencies, scaling)
        case RopeKind.YARN:
            return _blended_by_dimension(frequencies, scaling, theta, rotated)
        case RopeKind.LONGROPE:
            factors = scaling.long_factors if length > scaling.original_length else scaling.short_factors
            return frequencies / torch.tensor(factors, dtype=torch.float32)


def _blended_by_wavelength(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: tokens of the first length in a wavelength say how much of a frequency is kept."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_length / (2 * math.pi / frequencies)
    unscaled_fraction = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - unscaled_fraction) * frequencies / scaling.factor + unscaled_fraction * frequencies


def _blended_by_dimension(frequencies: Tensor, scaling: RopeScaling, theta: float, rotated: int) -> Tensor:
    """YaRN: a ramp between the dimensions that turn `beta_fast` and `beta_slow` times in the first length."""

    def dimension(turns: float) -> float:
        return rotated * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    divided = ramp.clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)
