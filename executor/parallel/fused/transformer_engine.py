"""Norms implemented by kernels of Transformer Engine (2), on plain tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from executor.parallel.operators import Operators
from search_spaces.models.model import ModelSpec, Norm


class TransformerEngineOperators(Operators):
    """Transformer Engine's norm modules, whose `weight` and `bias` have the same names as torch's.

    They save the input and some numbers per row, compute in fp32, and overwrite nothing; a second backward fails. Its matrix
    products and attention are not used, because they come with their own tensor parallelism and gradients.
    """

    def __init__(self, rms_norm: Callable[..., Any], layer_norm: Callable[..., Any], dtype: torch.dtype) -> None:
        """`dtype`: of the model. In the first releases a norm keeps the dtype that it was created with."""
        self._kinds, self._dtype = {Norm.RMSNORM: rms_norm, Norm.LAYERNORM: layer_norm}, dtype

    def make_norm(self, spec: ModelSpec, width: int = 0) -> nn.Module:
        if width or spec.zero_centered_norms:
            return super().make_norm(spec, width)
        kind = self._kinds[spec.norm]
        norm: nn.Module = kind(spec.hidden_size, eps=spec.norm_epsilon, device=torch.get_default_device(), dtype=self._dtype)
        return norm
