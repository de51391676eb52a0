"""What the equations cannot tell apart is one row, the fastest first; the simplest of it is named."""

import dataclasses

import pytest

from autotune.prediction.planning.buckets import Tuned
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from autotune.prediction.planning.reasons import ALIKE
from autotune.prediction.planning.scan_results import Leader
from autotune.prediction.planning.ties import DIMENSIONS, PLAIN, effort, grouped, plain_parts, resolution, unusual
from search_spaces.knob_values import KNOBS
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

SPREAD = 0.2


def asked(model: str = "llama-3-8b", cluster: str = "dgx-h100:1", **pins: object) -> Question:
    return question_of(
        model_of(model, None, None, None),
        cluster_of(cluster, None, None),
        global_batch_size=512,
        sequence_length=8192,
        pins=pins,
    )


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return space_of(asked())


def found(seconds: float, **knobs: object) -> Tuned:
    config = TrialConfig().replace({"precision": "bf16", **knobs})
    leader = Leader(config=config, seconds=seconds, memory=1.0)
    return Tuned(leader=leader, config=config, seconds=seconds, memory=1.0, settings={})


def test_of_ties_the_one_with_the_fewest_dimensions_is_the_simplest(space: SearchSpace) -> None:
    three = found(1.0, tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2, context_parallel_size=2)
    two = found(1.01, tensor_parallel_size=4, pipeline_parallel_size=2)
    few, many = found(1.03, tensor_parallel_size=2), found(1.02, tensor_parallel_size=4)
    slower = found(1.2, zero_stage=1)
    groups = grouped([three, two, many, few, slower], space, SPREAD, 10)
    assert [group.first for group in groups] == [three, slower]
    assert groups[0].ties == (two, many, few)
    assert [group.simplest for group in groups] == [few, None]


@pytest.mark.parametrize(
    "knobs",
    [
        {"zero_stage": 1, "offload_optimizer": "cpu"},
        {"zero_stage": 3, "offload_param": "cpu"},
        {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_zero_bubble"},
        {"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "zbv"},
    ],
    ids=str,
)
def test_a_tie_without_unusual_values_is_the_simplest(space: SearchSpace, knobs: dict) -> None:
    plain = found(1.0, tensor_parallel_size=2, pipeline_parallel_size=2)
    faster = found(0.98 / (1 + resolution(SPREAD)), **knobs)
    assert [(group.first, group.simplest) for group in grouped([faster, plain], space, SPREAD, 10)] == [
        (faster, None), (plain, None),
    ]  # fmt: skip
    tied = found(0.99, **knobs)
    (group,) = grouped([tied, plain], space, SPREAD, 10)
    assert (group.first, group.ties, group.simplest) == (tied, (plain,), plain)


def test_what_a_user_asked_for_is_not_unusual() -> None:
    pinned = space_of(asked(offload_optimizer="cpu", zero_stage=1))
    assert unusual(TrialConfig(zero_stage=1, offload_optimizer="cpu"), pinned) == []


def test_the_better_the_predictions_the_fewer_ties() -> None:
    assert resolution(0.02) < 0.01 < 0.05 < resolution(0.22) < 0.08


@pytest.mark.prove
def test_the_plain_parts_hold_the_plain_part_of_a_space_once() -> None:
    buckets = {"reduce_bucket_size": 5e8, "prefetch_bucket_size": 5e7, "allgather_bucket_size": 5e8}
    rest = {"param_persistence_threshold": 1e5, "max_live_parameters": 1e9, "contiguous_gradients": True, "overlap_comm": True}
    few = {"micro_batch_size": 1, "checkpoint_every_k": 1, "zero_stage": 1, "offload_param": "none"}
    space = space_of(asked(**buckets, **rest, **few))
    plain = [config for config in space.enumerate() if not unusual(config, space)]
    every, parts = list(space.enumerate()), list(plain_parts(space))
    assert len(parts) > 1
    within = [
        [config for config in every if all(getattr(config, knob) in allowed for knob, allowed in part.items())]
        for part in parts
    ]
    found = [config for own in within for config in own]
    assert len(found) == len(set(found)) > 100
    assert set(found) == set(plain)


def test_the_default_of_a_knob_with_plain_values_is_plain() -> None:
    """So that a knob without effect, which has its default, is in the plain part."""
    assert all(KNOBS[name].default in plain for name, plain in PLAIN.items())


@pytest.mark.prove
@pytest.mark.parametrize(("model", "cluster"), [("llama-3-8b", "dgx-h100:1"), ("llama-3-70b", "dgx-h100:4")])
def test_the_first_row_of_a_plan_is_the_fastest_and_no_tie_is_slower_than_stated(model: str, cluster: str) -> None:
    question = asked(model, cluster)
    plans = plan(question, PlanOptions(top=5))
    first, space = plans.plans[0], space_of(question)
    seconds = first.estimate.step_seconds.mean
    slowest = seconds * (1 + plans.resolution) * (1 + 1e-9)
    assert all(seconds * (1 - 1e-9) <= tie.seconds <= slowest for tie in first.ties)
    assert all(other.estimate.step_seconds.mean >= slowest for other in plans.plans[1:])
    # No other value of any knob is faster by more than what is reported as equal.
    changes = [item.change for reason in first.reasons for item in reason.alternatives if item.change is not None]
    assert min(changes) > -ALIKE
    if first.simplest is not None:
        assert all(effort(first.simplest.config, space) <= effort(tie.config, space) for tie in first.ties)
        assert seconds < first.simplest.seconds <= slowest


@pytest.mark.prove
def test_rows_show_every_knob_that_is_not_at_the_devices_defaults() -> None:
    for row in plan(asked(), PlanOptions(top=5)).document()["plans"]:
        config = TrialConfig().replace(row["config"])
        assert set(row["differences"]) >= {
            name for name in (*DIMENSIONS, "activation_checkpointing") if getattr(config, name) != getattr(TrialConfig(), name)
        }


@pytest.mark.parametrize(("tokens", "is_large"), [(16, False), (8192, True)])
def test_a_plan_stays_in_bf16_where_products_are_small_and_says_so(tokens: int, is_large: bool) -> None:
    pins = {
        "precision": "bf16,fp8", "compile_blocks": "true", "micro_batch_size": 1, "zero_stage": 3, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "context_parallel_size": 1, "activation_checkpointing": "none", "offload_param": "none",
        "offload_optimizer": "none", "checkpoint_every_k": 1,
    }  # fmt: skip
    question = dataclasses.replace(asked("llama-2-7b", **pins), global_batch_size=8, sequence_length=tokens)
    best = plan(question, PlanOptions(top=1)).plans[0]
    (text,) = [reason.text(best.goal) for reason in best.reasons if reason.knob == "precision"]
    assert best.estimate.config.precision == ("fp8" if is_large else "bf16")
    assert ("whose products do not save the" in text) == (not is_large)
    assert text.startswith("precision=fp8: saves " if is_large else "precision=bf16: saves ")


@pytest.mark.prove
def test_reasons_are_causes() -> None:
    """Each value against another in its place alone: what that one adds to the step, or does not fit."""
    question = dataclasses.replace(asked(), global_batch_size=8, sequence_length=4096)
    best = plan(question, PlanOptions(top=1)).plans[0]
    causes = {reason.knob: reason.cause for reason in best.reasons}
    texts = {reason.knob: reason.text(best.goal) for reason in best.reasons}
    hiding = [causes[knob] for knob, text in texts.items() if "behind compute" in text]
    assert hiding and all(cause is not None and max(cause.parts.values()) > 0 for cause in hiding)
    config = best.estimate.config
    for reason in best.reasons:
        if reason.cause is None or not reason.cause.fits:
            continue
        pins = {**config.values(), reason.knob: reason.cause.value}
        other = plan(dataclasses.replace(question, pins=pins), PlanOptions(top=1, fit_probability=0.01)).plans[0].estimate
        assert other.config.replace({reason.knob: getattr(config, reason.knob)}) == config
        beyond = other.step_seconds.mean - best.estimate.step_seconds.mean
        assert sum(reason.cause.parts.values()) == pytest.approx(beyond, rel=1e-6, abs=1e-6)
