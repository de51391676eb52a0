"""Rotary positions: frequencies of a model, scaled for long sequences, and their cosines and sines."""

import math

import torch
from torch import Tensor

from search_spaces.models.model import ModelSpec
from search_spaces.models.rope import RopeKind, RopeScaling

Rotary = tuple[Tensor, ...] | None
"""Cosines and sines of tokens; in layers that are not rotated, factors of their queries; None: there are none."""


def rotary_table(spec: ModelSpec, length: int, windowed: bool = False) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape [length, rotated dimensions], fp32. [Su et al. 2021, RoFormer, eq. 34]

    `windowed`: of layers with the window, which may have other frequencies.
    """
    own = windowed and spec.window_rope_theta > 0
    theta, scaling = (spec.window_rope_theta, None) if own else (spec.rope_theta, spec.rope_scaling)
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
            own = scaling.long_factors if length > scaling.original_length else scaling.short_factors
            return frequencies / torch.tensor(own, dtype=torch.float32)


def _blended_by_wavelength(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: tokens of the first length in a wavelength say how much of a frequency is kept."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_length / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


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
