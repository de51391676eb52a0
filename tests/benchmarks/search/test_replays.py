"""Each rule of the replayed procedures, on small made-up tables."""

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from autotune.objective.ranking import Ranking
from benchmarks.search.baselines.deepspeed import DeepSpeedStrategy
from benchmarks.search.baselines.expert import ExpertStrategy
from benchmarks.search.baselines.paddle import PaddleStrategy
from benchmarks.search.baselines.replay import NONEXISTENT, ReplayStrategy, start_of
from benchmarks.search.baselines.roofline import RooflineStrategy
from search_spaces.capability import SpaceContext
from search_spaces.knob import Value
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from tests.autotune import table
from tests.autotune.few_candidates import FewCandidates

Answering = Callable[[TrialConfig], float]
"""Samples/s of a configuration; 0: out of memory."""
SCORE = Ranking().score
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def combined(**domains: Sequence[Value]) -> list[TrialConfig]:
    """Every combination."""
    return [TrialConfig().replace(dict(zip(domains, values, strict=True))) for values in product(*domains.values())]


def row(config: TrialConfig, rate: float, number: int) -> TrialRecord:
    result: TrialResult = table.ok(rate, memory=1000) if rate else table.ended(Outcome.INFEASIBLE)
    return TrialRecord(
        job_id="j", number=number, config=config, config_hash=config.hash, purpose=Purpose.SEARCH, fidelity="full", repeat=0,
        counted=True, outcome=result.outcome, result=result, attempts=1, created=NOW, started=None, finished=None,
    )  # fmt: skip


def tried(kind: type[ReplayStrategy], candidates: FewCandidates, answer: Answering, most: int) -> list[TrialConfig]:
    """The first configurations that are proposed one by one."""
    history: list[TrialRecord] = []
    for number in range(most):
        config = kind(SCORE).propose(candidates, history, [], 1, seed=0)[0]
        history.append(row(config, answer(config), number))
    return [trial.config for trial in history]


def wanted(kind: type[ReplayStrategy], candidates: FewCandidates, answer: Answering) -> list[TrialConfig]:
    """All that the procedure itself wants, `random` left out."""
    found, known = [], {config.hash: config for config in candidates.configs}
    procedure = kind(SCORE).procedure(candidates)
    strategy = kind(SCORE)
    try:
        config = next(procedure)
        while True:
            config = candidates.admitted(config)
            if config.hash not in known:
                config = procedure.send(NONEXISTENT)
                continue
            if config not in found:
                found.append(config)
            config = procedure.send(strategy._answer(row(config, answer(config), len(found))))
    except StopIteration:
        return found


def rising(config: TrialConfig) -> float:
    """Larger micro-batches are faster."""
    return 10.0 * config.micro_batch_size


def sizes(configs: Sequence[TrialConfig]) -> list[tuple[int, int]]:
    return [(config.zero_stage, config.micro_batch_size) for config in configs]


# The contract of replays


def test_the_user_setting_is_the_base_or_has_least_model_parallelism() -> None:
    configs = combined(tensor_parallel_size=[4, 2], micro_batch_size=[2, 1])
    base = TrialConfig(tensor_parallel_size=4, micro_batch_size=1)
    assert start_of(FewCandidates(configs, base)) == base
    partial = [config for config in configs if config.micro_batch_size == 2 or config.tensor_parallel_size == 2]
    assert start_of(FewCandidates(partial, base)) == TrialConfig(tensor_parallel_size=2, micro_batch_size=2)


def test_a_running_trial_holds_the_procedure_up_for_its_own_answer_only() -> None:
    candidates = FewCandidates(combined(zero_stage=[1, 3], micro_batch_size=[1, 2, 4, 8]))
    several = DeepSpeedStrategy(SCORE).propose(candidates, [], [], 4, seed=0)
    assert sizes(several)[0] == (3, 1)
    assert len(set(several)) == 4
    # When the answer is there, what was proposed on a supposition is not wanted back: the procedure goes by the rows.
    history = [row(several[0], 10.0, 0)]
    assert DeepSpeedStrategy(SCORE).propose(candidates, history, several[1:], 1, seed=0)[0] not in several


# DeepSpeed


def test_deepspeed_profiles_then_takes_stages_in_order_and_their_largest_micro_batch() -> None:
    candidates = FewCandidates(combined(zero_stage=[0, 1, 2, 3], micro_batch_size=[1, 2, 4, 8]))
    first = tried(DeepSpeedStrategy, candidates, lambda config: 10.0 + config.micro_batch_size, 3)
    assert sizes(first) == [(3, 1), (0, 1), (0, 8)]


def test_deepspeed_bisects_where_the_largest_micro_batch_does_not_fit() -> None:
    candidates = FewCandidates(combined(zero_stage=[0, 3], micro_batch_size=[1, 2, 4, 8, 16, 32]))
    order = wanted(
        DeepSpeedStrategy, candidates, lambda config: 10.0 * config.micro_batch_size * (config.micro_batch_size < 16)
    )
    # 32 and its 0.95 in the domain, then the middle of what is left: 4, 16, 8.
    assert sizes(order)[1:6] == [(0, 1), (0, 32), (0, 16), (0, 4), (0, 8)]


def test_deepspeed_stops_the_bisection_where_the_rate_is_level() -> None:
    candidates = FewCandidates(combined(zero_stage=[0, 3], micro_batch_size=[1, 2, 4, 8, 16, 32, 64]))
    order = wanted(DeepSpeedStrategy, candidates, lambda config: 10.0 * (config.micro_batch_size < 32))
    # 8, in the middle, is no faster than 1.
    assert (0, 8) in sizes(order)
    assert (0, 16) not in sizes(order)


def test_deepspeed_ends_where_the_profile_does_not_run() -> None:
    candidates = FewCandidates(combined(zero_stage=[0, 3], micro_batch_size=[1, 2]))
    assert sizes(wanted(DeepSpeedStrategy, candidates, lambda config: 0.0)) == [(3, 1)]


def test_deepspeed_profiles_at_the_highest_stage_that_there_is() -> None:
    candidates = FewCandidates(combined(zero_stage=[1], micro_batch_size=[1, 2, 4]), TrialConfig(zero_stage=1))
    assert sizes(wanted(DeepSpeedStrategy, candidates, rising)) == [(1, 1), (1, 4), (1, 2)]


def test_deepspeed_leaves_out_stages_that_its_estimate_refuses(tmp_path: Path) -> None:
    context = memory_of(table.session(tmp_path).space.context, share=13)
    candidates = FewCandidates(combined(zero_stage=[0, 1, 2, 3], micro_batch_size=[1, 2, 4]), context=context)
    stages = {stage for stage, _ in sizes(wanted(DeepSpeedStrategy, candidates, lambda config: 10.0))}
    # fp32 on 2 ranks: 16, 12, 10 and 8 bytes a parameter.
    assert stages == {1, 2, 3}


def test_deepspeed_leaves_out_stages_with_less_room_than_those_before() -> None:
    def rate(config: TrialConfig) -> float:
        return 10.0 * config.micro_batch_size if config.zero_stage == 0 or config.micro_batch_size < 8 else 0.0

    candidates = FewCandidates(combined(zero_stage=[0, 1, 3], micro_batch_size=[1, 2, 4, 8]))
    order = sizes(wanted(DeepSpeedStrategy, candidates, rate))
    assert [size for stage, size in order if stage == 1] == [8]


def test_deepspeed_tunes_buckets_of_a_better_stage_and_gives_up_after_five() -> None:
    buckets = [50_000_000, 500_000_000, 1_000_000_000]

    def rate(config: TrialConfig) -> float:
        return 10.0 * config.micro_batch_size if config.micro_batch_size <= 2 * (1 + config.zero_stage) else 0.0

    candidates = FewCandidates(
        combined(zero_stage=[0, 1, 3], micro_batch_size=[1, 2, 4], reduce_bucket_size=buckets, allgather_bucket_size=buckets)
    )
    order = wanted(DeepSpeedStrategy, candidates, rate)
    tuned = [config for config in order if config.zero_stage == 1 and config.reduce_bucket_size == buckets[0]]
    # The stage's own sizes have run with the buckets nearest to the defaults, and are not repeated.
    # Sizes 2 and 4 alternate; the best is the second experiment, so that the sixth is the last one.
    order_of_buckets = [buckets[1], buckets[0], buckets[2]]
    assert [(c.micro_batch_size, c.allgather_bucket_size) for c in tuned] == [(s, b) for b in order_of_buckets for s in (2, 4)]
    assert not any(c.zero_stage == 1 and c.reduce_bucket_size == buckets[2] for c in order)


def test_deepspeed_in_fast_mode_tunes_no_buckets() -> None:
    class Fast(DeepSpeedStrategy):
        fast = True

    candidates = FewCandidates(combined(zero_stage=[2, 3], micro_batch_size=[1, 2, 4], overlap_comm=[True, False]))
    assert not all(config.overlap_comm for config in wanted(DeepSpeedStrategy, candidates, rising))
    assert all(config.overlap_comm for config in wanted(Fast, candidates, rising))


def test_deepspeed_leaves_model_parallelism_as_it_is() -> None:
    candidates = FewCandidates(combined(tensor_parallel_size=[2, 4], zero_stage=[0, 3], micro_batch_size=[1, 2]))
    order = wanted(DeepSpeedStrategy, candidates, lambda config: 10.0)
    assert {config.tensor_parallel_size for config in order} == {2}


# Paddle


def test_paddle_begins_with_little_tensor_parallelism_and_large_micro_batches() -> None:
    candidates = FewCandidates(combined(tensor_parallel_size=[2, 1], zero_stage=[0, 1], micro_batch_size=[1, 2]))
    first = tried(PaddleStrategy, candidates, lambda config: 0.0, 1)[0]
    assert (first.tensor_parallel_size, first.zero_stage, first.micro_batch_size) == (1, 1, 2)


def test_paddle_leaves_out_micro_batches_by_what_ran_and_by_what_did_not_fit() -> None:
    candidates = FewCandidates(combined(zero_stage=[1], micro_batch_size=[1, 2, 4, 8]))
    order = wanted(PaddleStrategy, candidates, lambda config: 10.0 * (config.micro_batch_size <= 4))
    assert sizes(order) == [(1, 8), (1, 4)]


def test_paddle_leaves_out_higher_stages_and_recomputation_of_what_runs() -> None:
    candidates = FewCandidates(combined(zero_stage=[1, 2, 3], activation_checkpointing=["none", "selective", "full"]))
    order = wanted(PaddleStrategy, candidates, lambda config: 10.0 * (config.activation_checkpointing != "none"))
    kept = [(config.zero_stage, config.activation_checkpointing) for config in order]
    assert kept == [(1, "none"), (1, "selective"), (2, "none"), (3, "none")]


def test_paddle_refuses_before_anything_runs() -> None:
    configs = combined(pipeline_parallel_size=[1, 2, 4], zero_stage=[0, 1, 2], virtual_stages=[1, 2])
    order = wanted(PaddleStrategy, FewCandidates(configs), lambda config: 0.0)
    assert order
    assert all(config.pipeline_parallel_size == 1 or config.zero_stage < 2 for config in order)
    assert all(config.pipeline_parallel_size > 2 for config in order if config.virtual_stages > 1)


def test_paddle_leaves_out_fewer_virtual_stages_than_what_did_not_fit() -> None:
    configs = combined(pipeline_parallel_size=[4], zero_stage=[1], virtual_stages=[1, 2, 4], micro_batch_size=[1])
    assert [config.virtual_stages for config in wanted(PaddleStrategy, FewCandidates(configs), lambda config: 0.0)] == [4]


def test_paddle_refuses_what_does_not_divide_the_model(tmp_path: Path) -> None:
    context = table.session(tmp_path, ranks=2).space.context
    configs = combined(tensor_parallel_size=[1, 3], pipeline_parallel_size=[1, 2], micro_batch_size=[1, 4, 8])
    order = wanted(PaddleStrategy, FewCandidates(configs, context=context), lambda config: 0.0)
    assert {config.tensor_parallel_size for config in order} == {1}
    # 8 samples in a step: at once they would be one micro-batch for a pipeline of 2, and too many for one of 2 replicas.
    assert {config.micro_batch_size for config in order} == {1, 4}


# Expert


def test_expert_begins_without_checkpointing_with_least_parallelism_and_micro_batch_one() -> None:
    configs = combined(
        tensor_parallel_size=[1, 2], pipeline_parallel_size=[1, 2], zero_stage=[1, 3], micro_batch_size=[1, 2],
        activation_checkpointing=["none", "full"],
    )  # fmt: skip
    order = wanted(ExpertStrategy, FewCandidates(configs), lambda config: 10.0)
    assert len(order) == len(configs)
    assert order[0] == TrialConfig(zero_stage=1)
    assert [config.activation_checkpointing for config in order] == ["none"] * 16 + ["full"] * 16
    parallel = [config for config in order if config.model_parallel_size == 2]
    assert parallel[0].pipeline_parallel_size == 2


def test_expert_passes_over_what_is_larger_than_what_did_not_fit() -> None:
    configs = combined(pipeline_parallel_size=[1, 2, 4], micro_batch_size=[1, 2, 4], activation_checkpointing=["none", "full"])
    order = wanted(ExpertStrategy, FewCandidates(configs), lambda config: 10.0 * (config.pipeline_parallel_size > 1))
    shown = [(c.pipeline_parallel_size, c.micro_batch_size, c.activation_checkpointing) for c in order]
    assert shown[:4] == [(1, 1, "none"), (2, 1, "none"), (2, 2, "none"), (2, 4, "none")]
    assert (1, 2, "none") not in shown
    assert (1, 1, "full") in shown


def test_expert_keeps_tensor_parallelism_in_the_node_until_the_end() -> None:
    configs = combined(tensor_parallel_size=[8, 16], activation_checkpointing=["none", "full"])
    order = wanted(ExpertStrategy, FewCandidates(configs), lambda config: 10.0)
    assert [config.tensor_parallel_size for config in order] == [8, 8, 16, 16]


def test_expert_takes_sequence_parallelism_for_large_models_only(tmp_path: Path) -> None:
    configs = combined(tensor_parallel_size=[2], sequence_parallel=[False, True])
    small = table.session(tmp_path).space.context
    assert wanted(ExpertStrategy, FewCandidates(configs), lambda config: 10.0)[0].sequence_parallel
    assert not wanted(ExpertStrategy, FewCandidates(configs, context=small), lambda config: 10.0)[0].sequence_parallel


def test_expert_passes_over_what_its_states_exceed(tmp_path: Path) -> None:
    context = memory_of(table.session(tmp_path).space.context, share=11, beside=34 * TOKENS_BY_WIDTH)
    order = wanted(ExpertStrategy, FewCandidates(combined(zero_stage=[0, 1, 2, 3]), context=context), lambda config: 10.0)
    # 16, 10, 9 and 8 bytes a parameter on 2 ranks.
    assert [config.zero_stage for config in order] == [1, 2, 3]


def test_expert_passes_over_what_its_activations_exceed(tmp_path: Path) -> None:
    context = memory_of(table.session(tmp_path).space.context, share=16, beside=34 * TOKENS_BY_WIDTH)
    configs = combined(micro_batch_size=[1, 2], activation_checkpointing=["none", "full"])
    order = wanted(ExpertStrategy, FewCandidates(configs, context=context), lambda config: 10.0)
    assert [(c.micro_batch_size, c.activation_checkpointing) for c in order] == [(1, "none"), (1, "full"), (2, "full")]


# Roofline


def test_roofline_tries_what_fits_first_then_what_computes_and_sends_least(tmp_path: Path) -> None:
    context = memory_of(table.session(tmp_path).space.context, share=16, beside=34 * TOKENS_BY_WIDTH)
    configs = combined(micro_batch_size=[2, 1], activation_checkpointing=["full", "none"])
    order = wanted(RooflineStrategy, FewCandidates(configs, context=context), lambda config: 0.0)
    shown = [(c.micro_batch_size, c.activation_checkpointing) for c in order]
    # Only the last does not fit. Recomputation costs a third; one micro-batch of two reads the parameters once.
    assert shown == [(1, "none"), (2, "full"), (1, "full"), (2, "none")]


def test_roofline_without_a_model_keeps_the_order_of_the_candidates() -> None:
    configs = combined(tensor_parallel_size=[2, 1])
    assert wanted(RooflineStrategy, FewCandidates(configs), lambda config: 1.0) == configs


TOKENS_BY_WIDTH = 2 * 64 * 64
"""Layers x tokens x hidden size of `table.session`."""


def memory_of(context: SpaceContext, share: int, beside: int = 0) -> SpaceContext:
    """The same place with so many bytes of device memory for each parameter of the model, and so many beside."""
    device = dataclasses.replace(context.cluster.device, memory_bytes=context.model.parameter_count * share + beside)
    return dataclasses.replace(context, cluster=dataclasses.replace(context.cluster, device=device))
