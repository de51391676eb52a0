"""Frozen matrices in few bits: what their codes stand for, how many bytes they take, and what is computed with them."""

import pytest
import torch
from torch import Tensor

from executor.parallel.model import build_transformer
from executor.parallel.quantised import NF4, QuantisedMatrix, dequantise, quantise
from executor.parallel.tensor import ColumnLinear, RowLinear
from search_spaces.models.huggingface import resolve_model
from search_spaces.training.adapters import FROZEN_BLOCK, adapted
from search_spaces.trial_config import TrialConfig

LEVELS = {4: torch.tensor(NF4, dtype=torch.float64), 8: torch.arange(-127, 128, dtype=torch.float64) / 127}


def drawn(rows: int, length: int) -> Tensor:
    return torch.empty(rows, length).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(rows))


def whole(matrix: QuantisedMatrix, dtype: torch.dtype = torch.float64) -> Tensor:
    """[outputs, inputs]"""
    stored = dequantise(matrix.packed, matrix.values, matrix.rows, matrix.length, dtype)
    return stored.T if matrix.transposed else stored


@pytest.mark.parametrize("bits", [4, 8])
def test_each_value_is_the_nearest_level_of_its_block(bits: int) -> None:
    weight = drawn(3, 2 * FROZEN_BLOCK)
    found = whole(QuantisedMatrix(weight.double(), bits, transposed=False))
    for row, told in zip(weight.double(), found, strict=True):
        for block, values in zip(row.split(FROZEN_BLOCK), told.split(FROZEN_BLOCK), strict=True):
            largest = block.abs().max()
            distances = (block[:, None] / largest - LEVELS[bits]).abs()
            torch.testing.assert_close((values / largest - block / largest).abs(), distances.amin(dim=1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_levels_and_zeros_stay_what_they_are(bits: int) -> None:
    levels = LEVELS[bits].float()
    row = torch.cat((levels, torch.zeros(-len(levels) % FROZEN_BLOCK), torch.zeros(FROZEN_BLOCK)))[None]
    if bits == 8:
        row[0, 0::FROZEN_BLOCK] = torch.where(row[0, 0::FROZEN_BLOCK] == 0, 0.0, 1.0)  # each block has its largest
    torch.testing.assert_close(whole(QuantisedMatrix(row, bits, transposed=False), torch.float32), row, atol=1e-7, rtol=0)


@pytest.mark.parametrize(("bits", "bytes_of_a_block"), [(4, 32 + 4), (8, 64 + 4)])
@pytest.mark.parametrize(("length", "blocks"), [(64, 1), (65, 2), (128, 2)])
def test_bytes(bits: int, bytes_of_a_block: int, length: int, blocks: int) -> None:
    packed = quantise(drawn(5, length), bits)
    assert (packed.dtype, packed.numel()) == (torch.uint8, 5 * blocks * bytes_of_a_block)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_and_its_gradient_are_those_of_the_whole_matrix(bits: int, transposed: bool) -> None:
    matrix = QuantisedMatrix(drawn(10, 96).double(), bits, transposed)
    x = drawn(6, 96).double().view(2, 3, 96).requires_grad_()
    result = matrix(x)
    result.square().sum().backward()
    expected = x.detach().requires_grad_()
    (expected @ whole(matrix).T).square().sum().backward()
    torch.testing.assert_close(result, expected @ whole(matrix).T)
    torch.testing.assert_close(x.grad, expected.grad)


def test_backward_keeps_the_bytes_alone() -> None:
    matrix, kept = QuantisedMatrix(drawn(64, 64), 4, transposed=False), []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        matrix(torch.ones(1, 64, requires_grad=True))
    assert [value.data_ptr() for value in kept] == [matrix.packed.data_ptr(), matrix.values.data_ptr()]


@pytest.mark.parametrize("slices", [2, 4])
def test_no_degree_of_tensor_parallelism_cuts_a_block(slices: int) -> None:
    """Quantised in slices, as ranks do it, a matrix is what it is quantised whole."""
    weight = drawn(64, 64).double()
    for transposed, dimension in ((False, 0), (True, 1)):
        parts = [QuantisedMatrix(part.clone(), 4, transposed) for part in weight.chunk(slices, dim=dimension)]
        together = torch.cat([whole(part) for part in parts], dim=dimension)
        assert torch.equal(together, whole(QuantisedMatrix(weight, 4, transposed)))


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("nf4", 4)])
def test_matrices_of_layers_are_quantised_and_nothing_else(dtype: str, bits: int) -> None:
    model = adapted(resolve_model("llama-tiny"), TrialConfig(lora_rank=4, frozen_dtype=dtype))
    module = build_transformer(model, 32, 0, torch.bfloat16)
    held = [parameter for parameter in module.parameters() if parameter.dtype == torch.uint8]
    matrices = [each for each in module.blocks.modules() if isinstance(each, ColumnLinear | RowLinear)]
    assert len(held) == len(matrices) == 7 * model.num_layers
    elements = model.num_layers * (model.layer_parameters - 2 * model.hidden_size)
    assert sum(parameter.numel() for parameter in held) == elements * (bits / 8 + 4 / FROZEN_BLOCK)
    others = {parameter.dtype for parameter in module.parameters()} - {torch.uint8}
    assert others == {torch.bfloat16}
