"""Plans against brute force: every configuration is predicted one by one, and the best is found without a grid."""

import dataclasses
import time
from functools import cache
from typing import Any

import numpy as np
import pytest

from autotune.errors import NothingFeasibleError, RequestError
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.step import predict
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.largest import largest, scaled
from autotune.prediction.planning.memory_fit import PROBABILITY, chance_to_fit, memory_limits_of
from autotune.prediction.planning.plan import PlanObjective, PlanOptions, RankedPlans, plan
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from autotune.prediction.planning.scan import Bounds, scan, without_buckets
from search_spaces.errors import IllegalConfigError, SpaceTooLargeError
from search_spaces.knob_values import KNOBS
from search_spaces.models.huggingface import resolve_model
from search_spaces.rules.table import check_config
from search_spaces.trial_config import TrialConfig

SMALL = {
    "checkpoint_every_k": "1,2", "offload_param": "none", "virtual_stages": "1,2", "micro_batch_size": "1,2",
    "context_parallel_size": "1,2", "pipeline_schedule": "1f1b,zbv",
}  # fmt: skip


def asked(model: str = "llama-3-8b", cluster: str = "dgx-h100", **fields: Any) -> Question:
    given = {"global_batch_size": 32, "sequence_length": 8192, "pins": SMALL} | fields
    return question_of(model_of(model, None, None, None), cluster_of(cluster, None, None), **given)


def brute(question: Question) -> list[tuple[float, float, TrialConfig]]:
    """Seconds, bytes and configuration of all that fit, buckets at their defaults."""
    space, limits = without_buckets(space_of(question)), memory_limits_of(question)
    configs = list(space.enumerate())
    prediction = predict(
        cases_of(question.model, question.cluster, question.workload, configs, question.engine), question.rates
    )
    count = len(configs)
    seconds, memory = np.broadcast_to(prediction.seconds, count), np.broadcast_to(prediction.memory.needed, count)
    fits = limits.holds(memory, np.broadcast_to(prediction.memory.host, count))
    return [(float(s), float(m), c) for s, m, c, f in zip(seconds, memory, configs, fits, strict=True) if f]


@cache
def fitting_when_asked() -> list[tuple[float, float, TrialConfig]]:
    """`brute(asked())`, once for all tests."""
    return brute(asked())


@pytest.mark.prove
def test_a_scan_finds_what_brute_force_finds() -> None:
    question = asked()
    fitting = fitting_when_asked()
    scanned = scan(question, space_of(question), memory_limits_of(question), slowest=None, bounds=Bounds())
    assert 500 < scanned.fitting <= len(fitting)
    assert scanned.count == len(list(without_buckets(space_of(question)).enumerate()))
    ordered = sorted((seconds, memory) for seconds, memory, _ in fitting)
    assert [leader.seconds for leader in scanned.leaders] == pytest.approx([seconds for seconds, _ in ordered[:1000]])
    assert scanned.fastest == pytest.approx(ordered[0][0])
    by_config = {config: (seconds, memory) for seconds, memory, config in fitting}
    for leader in scanned.leaders[:50]:
        assert by_config[leader.config] == pytest.approx((leader.seconds, leader.memory))


@pytest.mark.prove
def test_a_scan_tells_adapters_apart() -> None:
    """Where there are none, their targets are one configuration; where there are, each trains and holds something else."""
    pins = {
        **SMALL,
        "context_parallel_size": "1",
        "pipeline_parallel_size": "1",
        "lora_rank": "0,16",
        "lora_targets": "attention,mlp",
        "frozen_dtype": "same,nf4",
        "prompt_length": "0,64",
    }
    question = asked(cluster="dgx-h100:1", pins=pins)
    fitting = brute(question)
    scanned = scan(question, space_of(question), memory_limits_of(question), slowest=None, bounds=Bounds())
    assert 0 < scanned.fitting <= len(fitting)
    assert scanned.count == len(list(without_buckets(space_of(question)).enumerate()))
    assert {(config.lora_rank, config.prompt_length) for _, _, config in fitting} == {(0, 0), (16, 0), (0, 64)}
    by_config = {config: (seconds, memory) for seconds, memory, config in fitting}
    for leader in scanned.leaders:
        assert by_config[leader.config] == pytest.approx((leader.seconds, leader.memory))


def test_a_scan_tells_ways_to_compress_apart() -> None:
    pins = {
        **SMALL, "context_parallel_size": "1", "pipeline_parallel_size": "1", "gather_dtype": "same,int8",
        "secondary_shard_size": "0,2", "reduce_dtype": "fp32,int8", "optimizer": "adamw,onebit_adam",
    }  # fmt: skip
    question = asked(cluster="dgx-h100:1", pins=pins)
    fitting = brute(question)
    scanned = scan(question, space_of(question), memory_limits_of(question), slowest=None, bounds=Bounds())
    assert 0 < scanned.fitting <= len(fitting)
    assert {config.secondary_shard_size for _, _, config in fitting} == {0, 2}
    by_config = {config: (seconds, memory) for seconds, memory, config in fitting}
    for leader in scanned.leaders:
        assert by_config[leader.config] == pytest.approx((leader.seconds, leader.memory))


@pytest.mark.prove
def test_at_best_is_the_best_of_each_value() -> None:
    question = asked()
    fitting = fitting_when_asked()
    scanned = scan(question, space_of(question), memory_limits_of(question), slowest=None, bounds=Bounds())
    assert {"tensor_parallel_size", "activation_checkpointing", "zero_stage"} <= set(scanned.at_best)
    for knob, values in scanned.at_best.items():
        for value, found in values.items():
            having = [(seconds, memory) for seconds, memory, config in fitting if getattr(config, knob) == value]
            assert found.fits is bool(having)
            assert (found.leader is None) is (not having)
            if found.leader is not None:
                assert found.leader.seconds == pytest.approx(min(having)[0])
                assert getattr(found.leader.config, knob) == value


def test_the_least_memory_among_the_fast_leads() -> None:
    question = asked()
    fitting = fitting_when_asked()
    fastest = min(seconds for seconds, _, _ in fitting)
    plans = plan(question, PlanOptions(objective=PlanObjective.MEMORY, share=0.9, top=3)).plans
    best = min(memory for seconds, memory, _ in fitting if seconds <= fastest / 0.9)
    assert plans[0].estimate.fullest.needed <= best * 1.0001
    assert [p.estimate.fullest.needed for p in plans] == sorted(p.estimate.fullest.needed for p in plans)
    for found in plans:
        assert found.estimate.step_seconds.mean <= fastest / 0.9 * 1.002  # a bucket may cost a thousandth to save memory


def fastest(plans: RankedPlans) -> float:
    """Seconds of the fastest configuration, whichever row it ties with."""
    return min(
        seconds for found in plans.plans for seconds in (found.estimate.step_seconds.mean, *(t.seconds for t in found.ties))
    )


@pytest.mark.prove
def test_plans_are_legal_fit_and_are_ranked() -> None:
    question = asked()
    plans = plan(question, PlanOptions(top=20))
    space = space_of(question)
    assert 3 <= len(plans.plans) <= 20
    assert fastest(plans) <= min(seconds for seconds, _, _ in fitting_when_asked()) * 1.0001
    # Rows begin where the ones before end: their fastest members are in order.
    leaders = [min([found.estimate.step_seconds.mean, *(tie.seconds for tie in found.ties)]) for found in plans.plans]
    assert leaders[1:] == sorted(leaders[1:])
    for found in plans.plans:
        config = found.estimate.config
        assert check_config(config, space.context) == []
        assert config in space
        assert found.estimate.fit_probability >= PROBABILITY - 1e-9
        assert sum(found.estimate.breakdown_seconds.values()) == pytest.approx(found.estimate.step_seconds.mean)


def test_a_scan_does_not_rank_stage_3_by_gathers_that_nothing_hides() -> None:
    question = asked("llama-3-70b", pins={"prefetch_bucket_size": "0,5e7,1e9,2e9"})
    standing = without_buckets(space_of(question)).base
    assert question.model.layer_parameters <= standing.prefetch_bucket_size == 1_000_000_000


def test_buckets_are_set_where_that_gains() -> None:
    """One configuration but for its buckets: what is chosen is the best of all settings of each bucket alone."""
    pins = {
        "zero_stage": 1, "micro_batch_size": 1, "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "offload_param": "none",
        "sequence_parallel": "true", "context_parallel_size": 1, "offload_optimizer": "none", "checkpoint_every_k": 1,
        "activation_checkpointing": "full", "reduce_bucket_size": "1000,5e8", "overlap_comm": "false,true",
        "allgather_bucket_size": "5e8",
    }  # fmt: skip
    question = asked(pins=pins)
    found = plan(question, PlanOptions(top=5))
    assert found.configurations == 1
    assert found.bucket_settings == 4
    (best,) = found.plans
    space = space_of(question)
    tried = estimates(question, list(space.enumerate()))
    assert best.estimate.config.overlap_comm
    assert best.estimate.config.reduce_bucket_size == 500_000_000
    assert best.estimate.step_seconds.mean <= min(item.step_seconds.mean for item in tried) * 1.001
    assert {reason.knob for reason in best.reasons} == {"reduce_bucket_size", "overlap_comm"}


@pytest.mark.prove
def test_reasons_are_what_the_other_values_come_to() -> None:
    """Each reason again by brute force: the space with the knob pinned to the other value."""
    question = asked(pins=SMALL
        | {"reduce_bucket_size": "5e8", "prefetch_bucket_size": "5e7", "overlap_comm": "true",
                                   "max_live_parameters": "1e9", "param_persistence_threshold": "1e5"})  # fmt: skip
    best = plan(question, PlanOptions(top=1)).plans[0]
    told = {reason.knob: reason for reason in best.reasons}
    assert {"tensor_parallel_size", "pipeline_parallel_size", "zero_stage", "activation_checkpointing"} <= set(told)
    for reason in told.values():
        condition = KNOBS[reason.knob].condition
        assert condition is None or condition.holds(best.estimate.config, space_of(question).context)
    for knob in ("tensor_parallel_size", "zero_stage", "activation_checkpointing", "micro_batch_size"):
        for other in told[knob].alternatives:
            pinned = dataclasses.replace(question, pins={**question.pins, knob: (other.value,)})
            if other.step_seconds is None:
                with pytest.raises(NothingFeasibleError):
                    plan(pinned, PlanOptions(top=1))
                assert other.refused.startswith("needs ")
                continue
            alone = fastest(plan(pinned, PlanOptions(top=20)))
            assert other.step_seconds == pytest.approx(alone)
            assert other.change == pytest.approx(alone / best.estimate.step_seconds.mean - 1)


def test_a_reason_names_what_does_not_fit() -> None:
    best = plan(asked("llama-3-70b", pins=SMALL | {"offload_optimizer": "none,cpu"}), PlanOptions(top=1)).plans[0]
    told = {reason.knob: reason.text(best.goal) for reason in best.reasons}
    assert told["offload_optimizer"].startswith("offload_optimizer=cpu: none in its place needs ")
    assert told["offload_optimizer"].endswith(" GiB")


@pytest.mark.nightly
def test_cost_and_devices_choose_the_size_of_the_cluster() -> None:
    question = asked(cluster="dgx-h100:2", pins=SMALL | {"micro_batch_size": "1", "pipeline_schedule": "1f1b"})
    fast = plan(question, PlanOptions(top=1)).plans[0]
    assert (fast.cluster.world_size, fast.cost_per_million_tokens) == (16, None)
    cheap = plan(question, PlanOptions(objective=PlanObjective.COST, price=2.0, top=1))
    assert cheap.world_sizes == (8, 16)
    best = cheap.plans[0]
    hours = best.estimate.step_seconds.mean / 3600
    assert best.cost_per_million_tokens == pytest.approx(2.0 * best.cluster.world_size * hours / (32 * 8192) * 1e6)
    at_most = plan(question, PlanOptions(objective=PlanObjective.COST, price=2.0, top=100)).plans
    assert best.cost_per_million_tokens == min(item.cost_per_million_tokens or 0 for item in at_most)
    rate = fast.estimate.samples_per_second.mean * 0.4
    few = plan(question, PlanOptions(objective=PlanObjective.DEVICES, rate=rate, top=1))
    (found,) = few.plans
    assert found.estimate.samples_per_second.mean >= rate
    assert few.world_sizes[-1] == found.cluster.world_size < 16
    with pytest.raises(NothingFeasibleError, match="no plan reaches 1e\\+09 samples/s: the fastest is predicted to reach"):
        plan(question, PlanOptions(objective=PlanObjective.DEVICES, rate=1e9))


@pytest.mark.prove
def test_parts_of_one_node() -> None:
    question = asked("gpt2-xl", pins=SMALL, sequence_length=1024)
    assert plan(question, PlanOptions(objective=PlanObjective.COST, price=1.0, top=1)).world_sizes == (1, 2, 4, 8)


@pytest.mark.prove
def test_the_largest_fits_and_the_next_does_not() -> None:
    question = asked(pins=SMALL | {"micro_batch_size": "1", "pipeline_schedule": "1f1b"})
    for dimension in ("sequence_length", "model"):
        found = largest(question, dimension, PROBABILITY)
        assert found.next is not None
        assert found.value < found.next
        best = plan(found.question, PlanOptions(top=1)).plans[0]
        assert best.estimate.fit_probability >= PROBABILITY - 1e-9
        larger = (
            dataclasses.replace(question, sequence_length=found.next)
            if dimension == "sequence_length"
            else dataclasses.replace(question, model=scaled(question.model, _scale_of(question, found.next)))
        )
        with pytest.raises(NothingFeasibleError, match=r"fits into 79\.1 GiB a device with a probability of 95%"):
            plan(larger, PlanOptions(top=1))


def _scale_of(question: Question, parameters: int) -> float:
    scales = [2 ** (step / 24) for step in range(-96, 97)]
    return next(scale for scale in scales if scaled(question.model, scale).parameter_count == parameters)


def test_the_largest_micro_batch_divides_the_global_batch() -> None:
    found = largest(asked(global_batch_size=96, pins=SMALL), "micro_batch_size", PROBABILITY)
    assert 96 % found.value == 0
    assert plan(found.question, PlanOptions(top=1)).plans[0].estimate.config.micro_batch_size == found.value


def test_positions_that_are_learned_bound_the_sequence() -> None:
    found = largest(asked("gpt2", pins=SMALL, sequence_length=1024), "sequence_length", PROBABILITY)
    assert (found.value, found.next) == (1024, None)


def test_scaled_models_keep_their_heads() -> None:
    model = resolve_model("llama-3-8b")
    assert scaled(model, 1.0) is model
    larger = scaled(model, 2.0)
    assert (larger.num_layers, larger.hidden_size, larger.num_attention_heads) == (64, 8192, 64)
    assert (larger.head_dim, larger.num_key_value_heads, larger.ffn_hidden_size) == (128, 8, 28672)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"objective": "speed"}, "objective: 'speed' is not known; use one of throughput, memory, cost, devices"),
        ({"top": 0}, "top: 0 is not between 1 and 100"),
        ({"objective": "cost"}, "price: is missing"),
        ({"price": -1.0}, "price: -1.0 is not positive"),
        ({"rate": float("nan")}, "rate: nan is not positive"),
        ({"share": 0.5}, "share: belongs to the objective memory"),
        ({"share": 2.0, "objective": "memory"}, r"share: 2.0 is not in \(0, 1\]"),
    ],
)
def test_bad_options_are_told(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        PlanOptions(**fields)


def test_bounds_are_kept() -> None:
    with pytest.raises(SpaceTooLargeError, match="more than 100 configurations"):
        plan(asked(), PlanOptions(), Bounds(configurations=100))
    with pytest.raises(SpaceTooLargeError, match="takes too long"):
        plan(asked(), PlanOptions(), Bounds(until=time.monotonic() - 1))
    with pytest.raises(SpaceTooLargeError, match="steps"):
        plan(asked(most_steps=100), PlanOptions())


def test_an_estimate_is_of_one_legal_configuration() -> None:
    with pytest.raises(RequestError, match="zero_stage: has several values"):
        asked(pins={"zero_stage": "1,2"}).config()
    with pytest.raises(IllegalConfigError, match="world-divides"):
        asked("gpt2-xl", pins={"tensor_parallel_size": 5}, sequence_length=1000).config()
    question = asked(pins={"pipeline_parallel_size": 4, "zero_stage": 1})
    (found,) = estimates(question, [question.config()])
    assert [rank.layers for rank in found.ranks] == [8, 8, 9, 7]
    assert found.peak_memory_bytes.mean == max(rank.total for rank in found.ranks)
    for rank in found.ranks:
        assert sum(rank.by_tag.values()) == pytest.approx(rank.total)
    prediction = predict(
        cases_of(question.model, question.cluster, question.workload, [found.config], "native"), question.rates
    )
    assert prediction.memory.total[0] == pytest.approx(found.peak_memory_bytes.mean)


def test_what_fits_is_what_is_probable_to_fit() -> None:
    """A plan's bound and its probability are the same statement."""
    question = asked()
    for probability in (0.5, 0.9, 0.95, 0.99):
        limits = memory_limits_of(question, probability)
        assert chance_to_fit(question, limits.device, 0.0) == pytest.approx(probability)
        assert chance_to_fit(question, 1.0, limits.host) == pytest.approx(probability)
    with pytest.raises(RequestError, match="fit_probability"):
        memory_limits_of(question, 1.0)
