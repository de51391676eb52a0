"""Products in 8 bits: rounded once, within what 8 bits resolve, of any shape, sliced or not, and nothing more is kept."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.engines.capabilities import release
from executor.parallel import quantised
from executor.parallel.collectives import ProcessGroup
from executor.parallel.model import build_transformer
from executor.parallel.quantised import E4M3, E5M2, MX_BLOCK, Scaled, float8_linear, scaled
from executor.parallel.tensor import ColumnLinear, RowLinear, TensorParallel
from search_spaces.knobs.computation import FP8_RECIPES, MXFP8, ROWWISE, ROWWISE_WITH_GW_HP, TENSORWISE
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec

HALF = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative error of rounding: half of the last bit of 3 and of 2."""
SMALL = {E4M3: 2.0**-10 / 448, E5M2: 2.0**-17 / 57344}
"""The same of what is too small for all bits, as a share of the largest magnitude."""
BF16 = 2.0**-8
LLAMA = resolve_model("llama-tiny")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed)).bfloat16()


def passed(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    """The result, and the gradients of both operands."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    result = product(x, weight)
    result.backward(gradient)
    assert x.grad is not None and weight.grad is not None
    return [result.detach(), x.grad, weight.grad]


def worth(matrix: Scaled) -> Tensor:
    return matrix.values.double() * matrix.unit.double()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_matrix_is_rounded_within_half_of_its_last_bit_and_its_largest_is_kept(dtype: torch.dtype, size: float) -> None:
    matrix = drawn(32, 48) * size
    found, exact = worth(scaled(matrix, dtype)), matrix.double()
    largest = exact.abs().max()
    assert bool(((found - exact).abs() <= HALF[dtype] * exact.abs() + SMALL[dtype] * largest).all())
    assert float(found.abs().max()) == pytest.approx(float(largest), rel=1e-6)


def test_zeros_stay_zeros_and_what_is_not_finite_is_told() -> None:
    assert not worth(scaled(torch.zeros(16, 16).bfloat16(), E4M3)).any()
    for value in (float("inf"), float("nan")):
        matrix = drawn(16, 16)
        matrix[3, 5] = value
        assert bool(float8_linear(drawn(16, 16), matrix).isnan().any())


@pytest.mark.parametrize("shape", [(32, 48), (2, 9, 16), (1, 32), (5, 3, 2, 80)])
def test_products_and_gradients_are_as_near_to_fp64_as_8_bits_are(shape: tuple[int, ...]) -> None:
    """Also where the rows are no multiple of what a device sums over."""
    x, weight, gradient = drawn(*shape), drawn(64, shape[-1], seed=1), drawn(*shape[:-1], 64, seed=2) * 1e-4
    found = passed(float8_linear, x, weight, gradient)
    exact = passed(functional.linear, x.double(), weight.double(), gradient.double())
    # Of both operands' errors, and of the sum's rounding.
    most = passed(functional.linear, x.double().abs(), weight.double().abs(), gradient.double().abs())
    for one, other, sizes, kinds in zip(found, exact, most, ((E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3)), strict=True):
        assert one.dtype == torch.bfloat16
        share = (1 + HALF[kinds[0]]) * (1 + HALF[kinds[1]]) * (1 + BF16) - 1
        assert bool(((one.double() - other).abs() <= share * sizes + 1e-2 * share * sizes.mean()).all())


def test_products_are_those_of_the_rounded_operands() -> None:
    x, weight, gradient = drawn(32, 48), drawn(64, 48, seed=1), drawn(32, 64, seed=2)
    inputs, matrix, outputs = worth(scaled(x, E4M3)), worth(scaled(weight, E4M3)), worth(scaled(gradient, E5M2))
    wanted = [inputs @ matrix.T, outputs @ matrix, outputs.T @ inputs]
    for found, exact in zip(passed(float8_linear, x, weight, gradient), wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=BF16, atol=1e-3)


def test_no_rows_have_a_product_and_gradients_too() -> None:
    result, of_input, of_weight = passed(float8_linear, drawn(0, 16), drawn(32, 16), drawn(0, 32))
    assert (result.shape, of_input.shape) == ((0, 32), (0, 16))
    assert not of_weight.any()


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_kept_is_what_a_linear_layer_keeps(trained: bool) -> None:
    def kept(product: Callable[[Tensor, Tensor], Tensor]) -> set[int]:
        found: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda value: found.append(value) or value, lambda value: value):
            product(x, weight)
        return {value.data_ptr() for value in found}

    x, weight = drawn(32, 16).requires_grad_(), drawn(32, 16, seed=1).requires_grad_(trained)
    assert kept(float8_linear) == kept(functional.linear)


@pytest.mark.parametrize(("dimension", "layer"), [(0, ColumnLinear), (1, RowLinear)])
def test_slices_have_scales_of_their_own_and_together_are_the_product(dimension: int, layer: type[nn.Linear]) -> None:
    """Of tensor ranks each descales its own result: none needs another's scale, and none is coarser than the whole's."""
    x, weight = drawn(32, 64), drawn(96, 64, seed=1)
    slices, alone = weight.chunk(2, dim=dimension), TensorParallel(ProcessGroup(None, 1, 0), sequence_parallel=False)
    whole = scaled(weight, E4M3)
    assert all(float(scaled(part, E4M3).unit) <= float(whole.unit) for part in slices)
    results = []
    for part, own in zip(slices, x.chunk(2, dim=1) if layer is RowLinear else (x, x), strict=True):
        matrix = layer(part.shape[1], part.shape[0], alone, bias=False).bfloat16()
        matrix.weight, matrix.float8 = nn.Parameter(part.clone()), TENSORWISE
        results.append(matrix(own))
    together = torch.cat(results, dim=1) if layer is ColumnLinear else results[0] + results[1]
    most = x.double().abs() @ weight.double().abs().T
    share = (1 + HALF[E4M3]) ** 2 * (1 + BF16) ** 2 - 1
    assert bool(((together.double() - x.double() @ weight.double().T).abs() <= share * most).all())


def test_biases_are_added_in_the_precision() -> None:
    x, alone = drawn(16, 32), TensorParallel(ProcessGroup(None, 1, 0), sequence_parallel=False)
    for layer in (ColumnLinear, RowLinear):
        matrix = layer(32, 16, alone, bias=True).bfloat16()
        matrix.float8 = TENSORWISE
        torch.testing.assert_close(matrix(x), float8_linear(x, matrix.weight) + matrix.bias, atol=0, rtol=0)


def test_the_matrices_of_layers_are_multiplied_so_and_nothing_else_is_kept() -> None:
    assert isinstance(LLAMA, ModelSpec)

    def held(float8: bool) -> tuple[int, float]:
        module = build_transformer(LLAMA, 32, 0, torch.bfloat16)
        if float8:
            module.multiply_in_float8(TENSORWISE)
            found = [name for name, inner in module.named_modules() if getattr(inner, "float8", "")]
            assert len(found) == 7 * LLAMA.num_layers
            assert all(name.startswith("blocks.") for name in found)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
            tokens = torch.arange(64).view(2, 32) % LLAMA.vocab_size
            loss = module(tokens, tokens)
        storages = [value.untyped_storage() for value in kept]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()), float(loss.detach())

    (plain, loss), (narrow, other) = held(float8=False), held(float8=True)
    assert narrow == plain
    assert other == pytest.approx(loss, rel=1e-2)
    assert other != loss


@pytest.mark.prove
@pytest.mark.filterwarnings("default")  # of what the compiler does inside it warns itself
def test_compiled_products_are_the_same_and_one_graph() -> None:
    compiled = torch.compile(float8_linear, backend="aot_eager", fullgraph=True)
    operands = drawn(2, 9, 32), drawn(64, 32, seed=1), drawn(2, 9, 64, seed=2)
    for one, other in zip(passed(compiled, *operands), passed(float8_linear, *operands), strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have no products of blocks: those of the numbers that the operands represent."""

    def multiply(left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
        return (represented(left) @ represented(right).T).to(dtype)

    monkeypatch.setattr(quantised, "_multiply", multiply)


def represented(matrix: Scaled) -> Tensor:
    unit = matrix.unit.double()
    unit = unit.repeat_interleave(MX_BLOCK, dim=1) if matrix.unit.dtype == torch.float8_e8m0fnu else unit
    return matrix.values.double() * unit


@pytest.mark.usefixtures("blocks")
def test_blocks_have_scales_of_their_own_and_every_shape_a_product() -> None:
    exact_operands = drawn(2, 9, 32), drawn(64, 32, seed=1), drawn(2, 9, 64, seed=2)
    found = passed(lambda x, weight: float8_linear(x, weight, MXFP8), *exact_operands)
    exact = passed(functional.linear, *(value.double() for value in exact_operands))
    most = passed(functional.linear, *(value.double().abs() for value in exact_operands))
    for one, other, sizes in zip(found, exact, most, strict=True):
        share = (1 + HALF[E4M3]) ** 2 * (1 + BF16) - 1
        assert bool(((one.double() - other).abs() <= share * sizes + 1e-2 * share * sizes.mean()).all())
    matrix = drawn(8, 96)
    matrix[3, 40] = 1e10
    coarse, fine = (represented(scaled(matrix, E4M3, recipe)) for recipe in (ROWWISE, MXFP8))
    assert not coarse[3, :32].any()
    torch.testing.assert_close(fine[3, :32], matrix[3, :32].double(), rtol=HALF[E4M3], atol=1e-2)
    assert not represented(scaled(torch.zeros(2, 64).bfloat16(), E4M3, MXFP8)).any()
    matrix[5, 1] = float("nan")
    assert represented(scaled(matrix, E4M3, MXFP8))[5].isnan().sum() == MX_BLOCK


def test_units_of_blocks_are_in_tiles_of_128_rows_and_4_blocks() -> None:
    """[cuBLAS, "1D Block Scaling Factors Layout"]: offset(row, block) in a tile is (row % 32) * 16 + row // 32 * 4 + block."""
    codes = torch.arange(200 * 6, dtype=torch.int64).remainder(251).to(torch.uint8).view(200, 6)
    found = quantised._swizzled(codes.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert found.shape == (2 * 2 * 512,)
    for row, block in ((0, 0), (31, 3), (32, 0), (127, 5), (128, 1), (199, 5)):
        tile = row // 128 * 2 + block // 4
        assert found[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] == codes[row, block]


@pytest.mark.skipif(
    release(torch.__version__) < (2, 13), reason="torch 2.11 multiplies with scales of rows on CUDA devices alone"
)
@pytest.mark.parametrize("recipe", [ROWWISE, ROWWISE_WITH_GW_HP])
def test_rows_have_scales_of_their_own(recipe: str) -> None:
    x, weight, gradient = drawn(32, 48), drawn(64, 48, seed=1), drawn(32, 64, seed=2) * 1e-4
    x[3] *= 1e6
    found = passed(lambda left, right: float8_linear(left, right, recipe), x, weight, gradient)
    exact = passed(functional.linear, x.double(), weight.double(), gradient.double())
    most = passed(functional.linear, x.double().abs(), weight.double().abs(), gradient.double().abs())
    share = (1 + HALF[E4M3]) ** 2 * (1 + BF16) - 1
    for one, other, sizes in zip(found, exact, most, strict=True):
        # The column sums of the third product have the large row; its numbers are relative to its scale.
        assert bool(((one.double() - other).abs() <= share * sizes + 1e-2 * share * sizes.mean(dim=-1, keepdim=True)).all())
    if recipe == ROWWISE_WITH_GW_HP:
        torch.testing.assert_close(found[2], gradient.T @ x, rtol=0, atol=0)


@pytest.mark.filterwarnings("default")  # torchao warns of what it does itself
@pytest.mark.parametrize("recipe", [name for name in FP8_RECIPES if name != MXFP8])
def test_the_numbers_are_torchaos(recipe: str) -> None:
    pytest.importorskip("torchao", reason="needs torchao, of which the recipe is")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    x, weight, gradient = drawn(4, 16, 48), drawn(128, 48, seed=1), drawn(4, 16, 128, seed=2) * 1e-4

    matrix = nn.Linear(48, 128, bias=False)
    matrix.weight = nn.Parameter(weight)
    layer, entered = (
        Float8Linear.from_float(matrix, Float8LinearConfig.from_recipe_name(recipe)),
        x.detach().clone().requires_grad_(),
    )
    result = layer(entered)
    result.backward(gradient)
    theirs = (result, entered.grad, layer.weight.grad)

    def ours(left: Tensor, right: Tensor) -> Tensor:
        return float8_linear(left, right, recipe)

    for one, other in zip(passed(ours, x, weight, gradient), theirs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("default")  # torchao warns of what it does itself
def test_blocks_are_torchaos() -> None:
    pytest.importorskip("torchao", reason="needs torchao, of which the recipe is")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.utils import to_blocked

    matrix = drawn(160, 96)
    matrix[3, :32], matrix[5, 7], matrix[6] = 0, 1e20, matrix[6] * 1e-30
    units, values = to_mx(matrix, E4M3, MX_BLOCK, ScaleCalculationMode.RCEIL)
    found = scaled(matrix, E4M3, MXFP8)
    assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(found.unit.view(torch.uint8).flatten(), units.view(torch.uint8).flatten())
    swizzled = quantised._swizzled(found.unit).view(torch.uint8)
    assert torch.equal(swizzled, to_blocked(units.view(torch.uint8).view(160, 3)))
