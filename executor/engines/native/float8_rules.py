"""Settings that float8 products cannot be combined with. Does not import torch, since the search reads it."""

from search_spaces.capability import Combination
from search_spaces.rules.float8 import FLOAT8
from search_spaces.trial_config import TrialConfig


def _multiplies_in_parts(config: TrialConfig, _: int) -> bool:
    return config.precision == FLOAT8 and config.async_tensor_parallel and config.tensor_parallel_size > 1


def _multiplies_integers(config: TrialConfig, _: int) -> bool:
    return config.precision == FLOAT8 and config.frozen_dtype != "same"


FLOAT8_COMBINATIONS = (
    Combination(
        rule="float8-async-tensor",
        reads=("precision", "async_tensor_parallel", "tensor_parallel_size"),
        problem="products that are split to overlap with communication are in bf16",
        remedy="set async_tensor_parallel=false, or use precision=bf16",
        holds=_multiplies_in_parts,
    ),
    Combination(
        rule="float8-quantised",
        reads=("precision", "frozen_dtype"),
        problem="quantised frozen matrices are dequantised to bf16 for each product, so the product is in bf16 too",
        remedy="use precision=bf16, or set frozen_dtype=same",
        holds=_multiplies_integers,
    ),
)
