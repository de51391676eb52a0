"""The configuration that DeepSpeed is given."""

from typing import Any

import pytest

from autotune.frameworks.deepspeed_checks import findings
from search_spaces.deepspeed import KEEP_ALL, deepspeed_config, torch_optimizer
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WORK = Workload(global_batch_size=16, sequence_length=128)
PARAMETERS = 1_000_000


def made(**knobs: Any) -> dict[str, Any]:
    return deepspeed_config(TrialConfig(**knobs), WORK, 4, PARAMETERS)


def test_a_bucket_is_not_larger_than_the_model() -> None:
    assert made(zero_stage=2)["zero_optimization"]["reduce_bucket_size"] == PARAMETERS
    assert made(zero_stage=2, reduce_bucket_size=1_000)["zero_optimization"]["reduce_bucket_size"] == 1_000
    unknown = deepspeed_config(TrialConfig(zero_stage=2), WORK, 4, 0)
    assert unknown["zero_optimization"]["reduce_bucket_size"] == TrialConfig().reduce_bucket_size


def test_the_product_of_the_batch_is_left_out_where_deepspeed_would_count_every_rank() -> None:
    assert made(micro_batch_size=2)["train_batch_size"] == 16
    divided = made(micro_batch_size=2, tensor_parallel_size=2)
    assert "train_batch_size" not in divided
    assert (divided["train_micro_batch_size_per_gpu"], divided["gradient_accumulation_steps"]) == (2, 4)


def test_releasing_after_forward_is_a_reuse_distance_of_nothing() -> None:
    assert made(zero_stage=3)["zero_optimization"]["stage3_max_reuse_distance"] == 0
    # Not left to DeepSpeed's default, which lets go of the first layers of a model with more than half a billion parameters.
    assert made(zero_stage=3, reshard_after_forward=False)["zero_optimization"]["stage3_max_reuse_distance"] == KEEP_ALL


def test_torchs_optimizer_is_fused_or_not() -> None:
    told = [torch_optimizer(TrialConfig(fused_optimizer=fused), WORK)["params"] for fused in (True, False)]
    assert [(one["torch_adam"], one["fused"]) for one in told] == [(True, True), (True, False)]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_does_all_that_is_made(stage: int, fused: bool) -> None:
    for offload, ratio in (("none", 1.0), ("cpu", 1.0), ("cpu", 0.5)) if stage else (("none", 1.0),):
        config = made(
            zero_stage=stage, offload_optimizer=offload, offload_ratio=ratio, precision="bf16", fused_optimizer=fused,
            overlap_comm=False, allgather_bucket_size=1_001,
        )  # fmt: skip
        assert findings(config, "0.19.8", 4) == []
