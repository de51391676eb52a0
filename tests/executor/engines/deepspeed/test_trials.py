"""DeepSpeed in warm ranks: it trains as the native engine does, tells what it holds and sends, and leaves nothing behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.correctness import user_model
from benchmarks.correctness.parity_cases import USER_PARAMETERS
from executor.engines.deepspeed.capability import installed_version, unusable
from executor.runners.local import LocalRunner
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel, Model, ModelSpec, Norm, Position
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, TrialResult, Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.skipif(
    unusable(installed_version()) is not None, reason="DeepSpeed is not installed: pip install 'autotune-parallel[deepspeed]'"
)
RANKS = 2
WORK = Workload(global_batch_size=8, sequence_length=32)
SHORT = Fidelity(max_warmup_steps=4, min_steps=3, max_steps=3)
MODEL = ModelSpec(
    name="tiny", family="llama", num_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=64, vocab_size=128, sequence_length=64,
)  # fmt: skip
TIED = ModelSpec(
    name="tied", family="gpt2", num_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    ffn_hidden_size=64, vocab_size=128, sequence_length=64, norm=Norm.LAYERNORM, position=Position.LEARNED, gated_mlp=False,
    activation="gelu_tanh", qkv_bias=True, attention_output_bias=True, mlp_bias=True, tied_embeddings=True,
)  # fmt: skip
USERS = FactoryModel(
    reference=user_model.REFERENCE, parameter_count=USER_PARAMETERS, python_path=(str(Path(user_model.__file__).parents[2]),)
)
FP32_BOUND, BF16_BOUND = 1e-5, 2e-2
"""Relative, of losses and gradient norms after up to two updates."""
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "stage 1, one micro-batch": {"zero_stage": 1, "micro_batch_size": 4},
    "stage 2, small buckets": {"zero_stage": 2, "reduce_bucket_size": 3_000, "overlap_comm": False},
    "stage 3, small sizes": {
        "zero_stage": 3, "reduce_bucket_size": 3_000, "prefetch_bucket_size": 2_000, "param_persistence_threshold": 100,
        "activation_checkpointing": "full",
    },
    "stage 3, kept until backward": {"zero_stage": 3, "reshard_after_forward": False, "param_persistence_threshold": 100},
    "stage 2 in bf16": {"zero_stage": 2, "precision": "bf16"},
    "offloaded optimizer": {"zero_stage": 2, "offload_optimizer": "cpu"},
    "everything offloaded": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "AutoTP": {"zero_stage": 0, "tensor_parallel_size": 2},
    "pipeline": {"zero_stage": 1, "pipeline_parallel_size": 2},
    "pipeline, optimizer offloaded": {"zero_stage": 1, "pipeline_parallel_size": 2, "offload_optimizer": "cpu"},
}  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    with LocalRunner(RANKS, device="cpu") as local:
        yield local


def request(engine: str, knobs: dict[str, Any], model: Model = MODEL, **fields: Any) -> TrialRequest:
    return TrialRequest(
        attempt=f"{engine} {knobs}", model=model, config=TrialConfig(**{"micro_batch_size": 2, **knobs}), workload=WORK,
        engine=engine, **{"world_size": RANKS, "fidelity": SHORT, **fields},
    )  # fmt: skip


@pytest.fixture(scope="module")
def native(runner: LocalRunner) -> TrialResult:
    return runner.run(request("native", {}))


@pytest.fixture(scope="module")
def users_own(runner: LocalRunner) -> TrialResult:
    return runner.run(request("native", {}, model=USERS))


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_native_engine(runner: LocalRunner, native: TrialResult, name: str) -> None:
    knobs = CASES[name]
    result = runner.run(request("deepspeed", knobs, reference_losses=native.losses))
    assert result.outcome is Outcome.OK, f"{result.message}\n{result.traceback}"
    bound = BF16_BOUND if knobs.get("precision") == "bf16" else FP32_BOUND
    assert result.losses == pytest.approx(native.losses, rel=bound)
    assert result.gradient_norms == pytest.approx(native.gradient_norms, rel=bound)
    assert result.warm


def test_what_it_holds_and_sends_is_told(runner: LocalRunner) -> None:
    whole = MODEL.parameter_count * 4
    result = runner.run(request("deepspeed", {"zero_stage": 1, "micro_batch_size": 4}))
    for rank in result.ranks:
        assert rank.memory_by_tag["parameters"] == pytest.approx(whole, rel=0.01)
        assert rank.tag_peak_bytes["optimizer_state"] == pytest.approx(
            1.5 * whole, rel=0.05
        )  # a half of master and two moments
        assert rank.tag_peak_bytes["gradients"] > 0
        assert sum(rank.memory_by_tag.values()) == rank.peak_memory_bytes
        sent = {(sent.operation, sent.mesh_dimension): sent for sent in rank.collectives if sent.bytes > 1_000}
        assert {dimension for _, dimension in sent} == {"data"}
        assert sent["all_gather", "data"].bytes == pytest.approx(whole, rel=0.01)


def test_offloading_moves_bytes_to_the_host(runner: LocalRunner) -> None:
    kept, moved = (
        runner.run(request("deepspeed", {"zero_stage": 2, "offload_optimizer": place})).ranks[0] for place in ("none", "cpu")
    )
    assert kept.host_memory_bytes == 0
    assert (moved.host_memory_bytes or 0) > MODEL.parameter_count * 6
    assert moved.tag_peak_bytes["optimizer_state"] == 0


def test_tensor_and_pipeline_traffic_is_told_apart(runner: LocalRunner) -> None:
    tensor = runner.run(request("deepspeed", {"tensor_parallel_size": 2}))
    pipeline = runner.run(request("deepspeed", {"pipeline_parallel_size": 2}))
    assert {sent.mesh_dimension for sent in tensor.ranks[0].collectives} == {"tensor"}
    sends = [sent for sent in pipeline.ranks[0].collectives if sent.operation == "send"]
    micro_batches, hidden = WORK.global_batch_size // 2, 2 * WORK.sequence_length * MODEL.hidden_size * 4
    assert [(sent.mesh_dimension, sent.count, sent.bytes) for sent in sends] == [
        ("pipeline", micro_batches, micro_batches * hidden)
    ]


def test_fewer_micro_batches_are_timed_where_that_is_asked_for(runner: LocalRunner) -> None:
    fidelity = Fidelity(max_warmup_steps=4, min_steps=3, max_steps=8, most_micro_batches=2)
    result = runner.run(request("deepspeed", {"zero_stage": 2, "micro_batch_size": 1}, fidelity=fidelity))
    assert result.outcome is Outcome.OK, f"{result.message}\n{result.traceback}"


def test_the_native_engine_is_itself_after_stage_3(runner: LocalRunner, native: TrialResult) -> None:
    """Stage 3 replaces `torch.nn.functional.linear`, and tensor parallelism leaves groups that the next trial would find."""
    for knobs in ({"zero_stage": 3}, {"tensor_parallel_size": 2}):
        assert runner.run(request("deepspeed", knobs)).outcome is Outcome.OK
        after = runner.run(request("native", {}))
        assert (after.losses, after.gradient_norms) == (native.losses, native.gradient_norms)
        assert [rank.peak_memory_bytes for rank in after.ranks] == [rank.peak_memory_bytes for rank in native.ranks]


def test_one_weight_at_both_ends_of_a_pipeline_is_refused(runner: LocalRunner) -> None:
    result = runner.run(request("deepspeed", {"pipeline_parallel_size": 2}, model=TIED))
    assert (result.outcome, result.rule) == (Outcome.INVALID, "deepspeed-tied-pipeline")
    assert runner.run(request("deepspeed", {"zero_stage": 3}, model=TIED)).outcome is Outcome.OK


@pytest.mark.parametrize(
    "knobs", [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3, "activation_checkpointing": "full"}], ids=str
)
def test_a_module_of_the_users_own_trains_as_in_the_native_engine(
    runner: LocalRunner, users_own: TrialResult, knobs: dict[str, Any]
) -> None:
    """It draws random numbers in training, has a frozen parameter and tied ones, and names its blocks."""
    result = runner.run(request("deepspeed", knobs, model=USERS, reference_losses=users_own.losses))
    assert result.outcome is Outcome.OK, f"{result.message}\n{result.traceback}"
    assert result.losses == pytest.approx(users_own.losses, rel=FP32_BOUND)
    assert result.gradient_norms == pytest.approx(users_own.gradient_norms, rel=FP32_BOUND)


@pytest.mark.parametrize(
    ("degree", "rule", "remedy"),
    [
        ("tensor_parallel_size", "factory-shape", "use tensor_parallel_size=1"),
        ("pipeline_parallel_size", "pipeline-layers", "use fewer pipeline ranks"),
    ],
)
def test_a_module_of_the_users_own_is_not_divided(runner: LocalRunner, degree: str, rule: str, remedy: str) -> None:
    result = runner.run(request("deepspeed", {degree: 2}, model=USERS))
    assert (result.outcome, result.rule) == (Outcome.INVALID, rule)
    assert remedy in result.message


def test_a_preset_in_a_sweep_of_the_engine(runner: LocalRunner) -> None:
    model = resolve_model("llama-tiny")
    assert isinstance(model, ModelSpec)
    assert runner.run(request("deepspeed", {"zero_stage": 3}, model=model)).outcome is Outcome.OK


def test_a_second_copy_of_the_parameters_near(runner: LocalRunner) -> None:
    """hpZ, which takes four ranks to be anything: exact alone, wrong under AutoTP, for which it is refused."""
    sharded = {"zero_stage": 3, "param_persistence_threshold": 100, "micro_batch_size": 1}
    near, tensor = {**sharded, "hsdp_shard_size": 2}, {**sharded, "tensor_parallel_size": 2}
    with LocalRunner(
        4, device="cpu", trial_function="unguarded:run_unguarded", environment={"PYTHONPATH": str(Path(__file__).parent)}
    ) as four:
        plain, copied, divided, both = (
            four.run(request("deepspeed", knobs, world_size=4)) for knobs in (sharded, near, tensor, {**tensor, **near})
        )
    assert copied.losses == plain.losses
    assert divided.losses == pytest.approx(plain.losses, rel=FP32_BOUND)
    assert both.losses[0] != pytest.approx(plain.losses[0], rel=1e-3), "hpZ under AutoTP is right now: let it run"
    extra = copied.ranks[0].tag_peak_bytes["parameters"] - plain.ranks[0].tag_peak_bytes["parameters"]
    assert extra == pytest.approx(MODEL.parameter_count * 4 / 2, rel=0.05)
    refused = runner.run(request("deepspeed", {**sharded, "hsdp_shard_size": 1}))
    assert (refused.outcome, refused.rule) == (Outcome.INVALID, "deepspeed-hpz-off")


def test_what_is_refused_is_wrong_or_fails(native: TrialResult) -> None:
    here = str(Path(__file__).parent)
    with LocalRunner(
        RANKS, device="cpu", trial_function="unguarded:run_unguarded", environment={"PYTHONPATH": here}
    ) as unguarded:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            part = unguarded.run(request("deepspeed", {"precision": "bf16", name: 2}))
            assert part.gradient_norms[0] < 0.95 * native.gradient_norms[0], "clips by the whole norm now: let it run"
        sharded = unguarded.run(request("deepspeed", {"zero_stage": 2, "pipeline_parallel_size": 2}))
    assert sharded.outcome is Outcome.FAILED
    assert "incompatible with pipeline parallelism" in sharded.message
