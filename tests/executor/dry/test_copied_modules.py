"""Modules that a factory copies with `copy.deepcopy` are described without data, as those that it makes are."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.dry.module_profile import profile_module
from search_spaces.trial import Workload

WORKLOAD = Workload(global_batch_size=4, sequence_length=1)
Batch = Callable[[int, torch.Generator], Mapping[str, Any]]


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[:, None].expand(-1, 4, -1)).square().mean()  # type: ignore[no-any-return]


def batch(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 32, generator=generator)}


def made() -> tuple[nn.Module, Batch]:
    return Stack([nn.Linear(32, 32) for _ in range(3)]), batch


def copied() -> tuple[nn.Module, Batch]:
    layer = nn.Linear(32, 32)
    return Stack([copy.deepcopy(layer) for _ in range(3)]), batch


def encoder() -> tuple[nn.Module, Batch]:
    return Encoder(), batch


@pytest.mark.prove
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copied_layers_are_described_as_those_that_were_made(precision: str) -> None:
    own, other = (profile_module(f"{__name__}:{name}", WORKLOAD, (precision,)) for name in ("made", "copied"))
    assert own.profile is not None and other.profile is not None
    assert other.profile.trained == own.profile.trained
    assert other.flops_per_sample == own.flops_per_sample
    one, two = own.profile.traces[precision], other.profile.traces[precision]
    assert (two.outer, two.blocks, two.again) == (one.outer, one.blocks, one.again)
    assert other.parameter_count == own.parameter_count == 3 * (32 * 32 + 32)


@pytest.mark.prove
def test_the_encoder_of_torch_which_copies_its_layer_is_described() -> None:
    described = profile_module(f"{__name__}:encoder", WORKLOAD, ("fp32",))
    assert described.parameter_count == sum(parameter.numel() for parameter in Encoder().parameters())
    assert described.flops_per_sample
