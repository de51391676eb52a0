"""Modules that are recomputed in backward: the same numbers to the bit, and the bytes that are not kept in closed form."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from executor.measurement.memory import account_step
from executor.parallel.latent import LatentAttention
from executor.parallel.model import Block, whole
from executor.parallel.operators import rotary_table
from executor.parallel.recomputed_modules import RecomputedBlock, recompute_modules
from search_spaces.errors import KnobValueError
from search_spaces.knobs.computation import MODULES, modules_in
from search_spaces.models.model import Latent, ModelSpec

BATCH, TOKENS, WIDTH, HIDDEN, LAYERS = 16, 16, 32, 48, 8
LLAMA = ModelSpec(
    name="llama", family="llama", num_layers=1, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=HIDDEN, vocab_size=32, sequence_length=TOKENS,
)  # fmt: skip
LATENT = dataclasses.replace(
    LLAMA, name="latent", num_key_value_heads=4, latent=Latent(key_value_rank=5, rotated=4, value_size=6, query_rank=7),
    num_experts=4, experts_per_token=2, shared_expert_size=16,
)  # fmt: skip
EVERYTHING = "+".join(MODULES)


def block_of(spec: ModelSpec, modules: str) -> Block:
    torch.manual_seed(0)
    block = Block(spec, whole(spec), 0).double()
    for value in block.parameters():
        nn.init.normal_(value, std=0.1)
    recompute_modules([block], modules)
    return block


def call(block: Block) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return x, block(x, rotations(LATENT if isinstance(block.attention, LatentAttention) else LLAMA))


def rotations(spec: ModelSpec) -> tuple[Tensor, ...]:
    return tuple(table.double() for table in rotary_table(spec, TOKENS))


def outcome(spec: ModelSpec, modules: str, backwards: int = 1) -> list[Tensor]:
    block = block_of(spec, modules)
    x, result = call(block)
    for turn in range(backwards):
        result.square().sum().backward(retain_graph=turn < backwards - 1)
    return [result.detach(), *(value.grad for value in (x, *block.parameters()) if value.grad is not None)]


def forward_peak(spec: ModelSpec, modules: str) -> int:
    """Bytes at the peak of a forward through `LAYERS` blocks."""
    blocks, x = [block_of(spec, modules) for _ in range(LAYERS)], torch.zeros(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    tables, results = rotations(spec), []

    def forward() -> None:
        hidden = x.requires_grad_()
        for block in blocks:
            hidden = block(hidden, tables)
        results.append(hidden)

    forward()
    results.clear()
    return account_step(forward, list, torch.device("cpu")).peak


@pytest.mark.parametrize("modules", [*MODULES, EVERYTHING])
@pytest.mark.parametrize("spec", [LLAMA, LATENT], ids=lambda spec: spec.name)
def test_values_are_the_same_to_the_bit(spec: ModelSpec, modules: str) -> None:
    for backwards in (1, 2):
        expected, actual = outcome(spec, "", backwards), outcome(spec, modules, backwards)
        assert len(actual) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("spec", "modules", "kept_elements"),
    [
        (LLAMA, "norms", 4 * WIDTH),
        (LLAMA, "activations", 2 * HIDDEN),
        (LLAMA, "norms+activations", 4 * WIDTH + 2 * HIDDEN),
        (LATENT, "expert_activations", 2 * 2 * HIDDEN),
        (LATENT, "activations", 2 * 16),
    ],
)
def test_a_block_does_not_keep_results_of_its_modules(spec: ModelSpec, modules: str, kept_elements: int) -> None:
    """A norm by separate operators keeps its scaled input, too. The last block's tensors are there while it runs."""
    dropped = BATCH * TOKENS * kept_elements * 8
    saved = forward_peak(spec, "") - forward_peak(spec, modules)
    assert (LAYERS - 2) * dropped < saved <= LAYERS * dropped


class Flipping(nn.Module):
    """Saves another number of tensors each time."""

    recomputable: ClassVar[dict[str, str]] = {"part": "norms"}

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x * 2).sin()

    def part(self, x: Tensor) -> Tensor:
        self.turns += 1
        return x.exp() if self.turns % 2 else x.exp().sin().cos()


def test_a_module_that_runs_otherwise_in_backward_is_an_error() -> None:
    block = Flipping()
    recompute_modules([block], "norms")
    with pytest.raises(RuntimeError, match="runs differently"):
        block(torch.ones(3, requires_grad=True)).sum().backward()


class Overwriting(Flipping):
    """Overwrites the result of a module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x * 2).mul_(3).sin()

    def part(self, x: Tensor) -> Tensor:
        return x * x


def test_a_result_that_the_block_overwrites_is_kept() -> None:
    gradients = []
    for modules in ("", "norms"):
        block, x = Overwriting(), torch.full((3,), 0.5, requires_grad=True)
        recompute_modules([block], modules)
        block(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_without_gradients_nothing_is_recorded() -> None:
    block = block_of(LLAMA, EVERYTHING)
    assert isinstance(block.forward, RecomputedBlock)
    with torch.no_grad():
        assert call(block)[1].grad_fn is None


def test_names_have_one_order_and_unknown_ones_are_refused() -> None:
    assert modules_in("attention+norms") == ("norms", "attention")
    with pytest.raises(KnobValueError, match="'norm' in 'norm' is none of norms"):
        modules_in("norm")
