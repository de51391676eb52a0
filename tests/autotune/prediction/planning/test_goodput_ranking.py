"""Plans for goodput: the order, the copies that a layout has, and the bytes that it saves."""

from typing import Any

import pytest

from autotune.errors import RequestError
from autotune.goodput.terms import parse_terms
from autotune.prediction.planning.goodput_ranking import layout_of
from autotune.prediction.planning.plan import PlanObjective, PlanOptions, RankedPlans, plan
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from search_spaces.trial_config import TrialConfig

PINS = {
    "hsdp_shard_size": "0,8,64", "zero_stage": "1,3", "micro_batch_size": "1,2", "context_parallel_size": "1",
    "pipeline_parallel_size": "1,8", "pipeline_schedule": "1f1b", "virtual_stages": "1", "checkpoint_every_k": "1",
    "offload_param": "none", "offload_optimizer": "none", "tensor_parallel_size": "1", "activation_checkpointing": "selective",
}  # fmt: skip
OFTEN = ("failures=rsc1-jobs-1024", "checkpoint=synchronous", "write_bandwidth=2e9", "restart_seconds=7200")


def asked(**fields: Any) -> Question:
    given = {"global_batch_size": 1024, "sequence_length": 8192, "pins": PINS} | fields
    return question_of(model_of("llama-3-8b", None, None, None), cluster_of("dgx-h100:64", None, None), **given)


def planned(*settings: str, top: int = 3, **fields: Any) -> RankedPlans:
    terms = parse_terms(settings)
    return plan(asked(**fields), PlanOptions(objective=PlanObjective.GOODPUT, goodput=terms, top=top))


@pytest.mark.prove
def test_the_fastest_layout_is_not_always_the_best() -> None:
    fastest = plan(asked(), PlanOptions(top=1)).plans[0].estimate
    often, rarely = planned(*OFTEN).plans[0], planned("failures=rsc2").plans[0]
    assert often.goodput[0].run.recovery == "migrate"
    assert often.estimate.config.hsdp_shard_size > 0
    assert often.estimate.step_seconds.mean > rarely.estimate.step_seconds.mean
    assert rarely.estimate.step_seconds.mean <= fastest.step_seconds.mean


@pytest.mark.prove
def test_the_order_is_that_of_all_configurations() -> None:
    """The search stops early: a longer list starts with the same plans."""
    few, many = planned(*OFTEN, top=2), planned(*OFTEN, top=50)
    assert [item.estimate.config for item in few.plans] == [item.estimate.config for item in many.plans[:2]]
    kept = [item.goodput[0].tokens_kept_per_device_hour for item in many.plans]
    assert kept == sorted(kept, reverse=True)


def test_terms_belong_to_the_objective() -> None:
    with pytest.raises(RequestError, match="goodput: belongs to the objective goodput; leave it out"):
        PlanOptions(goodput=parse_terms(()))


@pytest.mark.parametrize(
    ("changes", "copies", "replicas"),
    [
        ({"zero_stage": 0}, 64, 64),
        ({"zero_stage": 1}, 1, 64),
        ({"zero_stage": 3, "hsdp_shard_size": 8}, 64, 64),
        ({"zero_stage": 3, "hsdp_shard_size": 64}, 8, 64),
        ({"zero_stage": 0, "tensor_parallel_size": 8}, 64, 64),
        ({"zero_stage": 0, "tensor_parallel_size": 8, "pipeline_parallel_size": 4}, 16, 16),
        ({"zero_stage": 1, "tensor_parallel_size": 8, "pipeline_parallel_size": 64}, 1, 1),
    ],
)
def test_copies_on_other_nodes(changes: dict[str, Any], copies: int, replicas: int) -> None:
    found = layout_of(asked(), TrialConfig(precision="bf16").replace(changes), 1.0, (2e9, 12e9))
    assert (found.copies, found.replicas) == (copies, replicas)


def test_copies_are_saved_once() -> None:
    """512 ranks that all hold 2 GB of parameters, and each a 512th of the optimizer state."""
    found = layout_of(asked(), TrialConfig(precision="bf16", zero_stage=1), 1.0, (2e9, 12e9 / 512))
    assert found.state.total_bytes == pytest.approx(2e9 + 12e9)
    assert found.state.loaded_bytes_per_device == pytest.approx(2e9 + 12e9 / 512)
