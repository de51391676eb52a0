"""Integers of 8 bits and signs: what their bytes stand for, how many they are, and that an overflow stays one."""

import math

import pytest
import torch
from torch import Tensor

from executor.engines.native.optimizers import onebit_adam
from executor.engines.native.quantised_communication import QuantisedAllReduce, QuantisedReduceScatter
from executor.parallel import quantised
from executor.parallel.collectives import ProcessGroup
from search_spaces.communication import SIGN_BLOCK, integer_bytes, sign_bytes, sign_share
from search_spaces.optimizers import QUANTISED_BLOCK


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.empty(rows, columns, dtype=dtype).normal_(generator=torch.Generator().manual_seed(columns))
    return values * torch.logspace(-3, 3, columns, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 255, 256, 257, 1000])
def test_integers_are_off_by_half_a_step_of_their_own_block(columns: int, dtype: torch.dtype) -> None:
    rows = drawn(3, columns, dtype)
    packed = quantised.pack(rows)
    assert (packed.dtype, packed.shape) == (torch.uint8, (3, integer_bytes(columns)))
    found = quantised.unpack(packed, columns, dtype)
    assert found.dtype == dtype
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    for values, told in zip(rows.double(), found.double(), strict=True):
        for block, numbers in zip(values.split(QUANTISED_BLOCK), told.split(QUANTISED_BLOCK), strict=True):
            assert float((block - numbers).abs().max()) <= float(block.abs().max()) * (0.5 / 127 + rounding)


def test_a_row_is_packed_as_it_is_alone() -> None:
    rows = drawn(4, 700)
    assert torch.equal(quantised.pack(rows), torch.cat([quantised.pack(row[None]) for row in rows]))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_block_so_and_no_other(value: float) -> None:
    rows = drawn(1, 2 * QUANTISED_BLOCK)
    rows[0, 5] = value
    found = quantised.unpack(quantised.pack(rows), rows.shape[1], torch.float32)
    assert not found[0, :QUANTISED_BLOCK].isfinite().any()
    assert found[0, QUANTISED_BLOCK:].isfinite().all()


def test_a_parameter_is_rounded_alike_whatever_lies_beside_it() -> None:
    """A norm that two tensor ranks hold beside slices of which each has another."""
    norm, alone = drawn(1, 300), ProcessGroup(None, 1, 0)
    besides = (drawn(1, 500), 50 * drawn(1, 500))
    sums = [QuantisedReduceScatter(alone, (norm, other), [300, 500], norm.dtype).wait() for other in besides]
    assert torch.equal(sums[0][:300], sums[1][:300])
    assert not torch.equal(sums[0][300:], sums[1][300:])
    value = sums[0].clone()
    QuantisedAllReduce(alone, value, [300, 500]).wait()
    torch.testing.assert_close(value, sums[0])


def test_zeros_stay_zeros() -> None:
    rows = torch.zeros(2, 300)
    assert torch.equal(quantised.unpack(quantised.pack(rows), 300, torch.float32), rows)


def test_signs_stand_for_the_mean_magnitude_of_their_block() -> None:
    rows = drawn(2, 3 * SIGN_BLOCK)
    packed = onebit_adam.pack(rows)
    assert (packed.dtype, packed.shape) == (torch.uint8, (2, sign_bytes(3 * SIGN_BLOCK)))
    assert packed.shape[1] == 3 * (SIGN_BLOCK // 8 + 4)
    found = onebit_adam.unpack(packed, 3 * SIGN_BLOCK, torch.float32)
    for values, told in zip(rows.split(SIGN_BLOCK, dim=1), found.split(SIGN_BLOCK, dim=1), strict=True):
        wanted = values.abs().mean(dim=1, keepdim=True) * torch.where(values >= 0, 1.0, -1.0)
        torch.testing.assert_close(told, wanted)


@pytest.mark.parametrize(("elements", "ranks", "share"), [(1, 1, 1024), (4096, 4, 1024), (4097, 4, 2048), (10**6, 8, 125_952)])
def test_shares_of_a_momentum_are_whole_blocks(elements: int, ranks: int, share: int) -> None:
    assert sign_share(elements, ranks) == share
