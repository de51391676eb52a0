"""Settings that async tensor parallelism cannot be combined with. Does not import torch, since the search reads it."""

from search_spaces.capability import Combination
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.trial_config import TrialConfig


def _runs_backward_in_parts(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return config.async_tensor_parallel and config.tensor_parallel_size > 1 and split


def _multiplies_integers(config: TrialConfig, _: int) -> bool:
    return config.async_tensor_parallel and config.tensor_parallel_size > 1 and config.frozen_dtype != "same"


OVERLAPPED = (
    Combination(
        rule="async-tensor-zero-bubble",
        reads=("async_tensor_parallel", "tensor_parallel_size", "pipeline_parallel_size", "pipeline_schedule"),
        problem="zero-bubble schedules compute gradients of inputs and of weights separately, and the overlapped backward, "
        "which computes both, would send the input gradients twice",
        remedy="set async_tensor_parallel=false, or use another schedule",
        holds=_runs_backward_in_parts,
    ),
    Combination(
        rule="async-tensor-quantised",
        reads=("async_tensor_parallel", "tensor_parallel_size", "frozen_dtype"),
        problem="quantised frozen matrices are dequantised inside each product, which is therefore not split",
        remedy="set async_tensor_parallel=false or frozen_dtype=same",
        holds=_multiplies_integers,
    ),
)
