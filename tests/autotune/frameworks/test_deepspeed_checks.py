"""What DeepSpeed takes without a word, rule by rule."""

from typing import Any

import pytest

from autotune.frameworks.deepspeed_checks import findings
from search_spaces.errors import Effect

BATCH = {"train_micro_batch_size_per_gpu": 1}
REFUSED, FAILS, IGNORED, CHANGED = Effect.REFUSED, Effect.FAILS, Effect.IGNORED, Effect.CHANGED


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {**BATCH, "zero_optimization": {"stage": stage, **keys}}


CASES: dict[str, tuple[dict[str, Any], tuple[str, str, Effect]]] = {
    "a typo at the top": (
        {**BATCH, "gradient_cliping": 1.0}, ("unknown-key", "gradient_cliping", IGNORED),
    ),
    "a typo in an open section": (
        {**BATCH, "optimizer": {"type": "AdamW", "parms": {}}}, ("unknown-key", "optimizer.parms", IGNORED),
    ),
    "a typo in a closed section": (
        zero(2, reduce_bucket_sise=1), ("unknown-key", "zero_optimization.reduce_bucket_sise", REFUSED),
    ),
    "an older section as a flag": ({**BATCH, "bfloat16": True}, ("section-type", "bfloat16", REFUSED)),
    "a section of null": ({**BATCH, "checkpoint": None}, ("section-type", "checkpoint", REFUSED)),
    "an inner section as a flag": ({**BATCH, "timers": {"throughput": True}}, ("section-type", "timers.throughput", REFUSED)),
    "a switch as text without ZeRO": (
        {**BATCH, "bf16": {"enabled": "true", "bf16_master_weights_and_grads": "yes"}},
        ("master-stage", "bf16.bf16_master_weights_and_grads", REFUSED),
    ),
    "both precisions as text": ({**BATCH, "bf16": {"enabled": 1}, "fp16": {"enabled": "on"}},
                                ("two-precisions", "fp16.enabled", REFUSED)),
    "a profiled text": ({**BATCH, "flops_profiler": {"enabled": "true"}}, ("value", "flops_profiler.enabled", REFUSED)),
    "names that are no list": (
        {**BATCH, "data_types": {"keep_in_fp32_modules": "norm"}}, ("value", "data_types.keep_in_fp32_modules", REFUSED),
    ),
    "a section that is gone": ({**BATCH, "elasticity": {}}, ("removed-key", "elasticity", REFUSED)),
    "a ZeRO key that is gone": (
        zero(3, mics_shard_size=2), ("removed-key", "zero_optimization.mics_shard_size", REFUSED),
    ),
    "an optimizer that is gone": (
        {**BATCH, "optimizer": {"type": "OneBitAdam"}}, ("removed-key", "optimizer.type", FAILS),
    ),
    "parameters offloaded at stage 2": (
        zero(2, offload_param={"device": "cpu"}), ("offload-param-stage", "zero_optimization.offload_param", IGNORED),
    ),
    "an optimizer offloaded at stage 0": (
        zero(0, offload_optimizer={"device": "cpu"}),
        ("offload-optimizer-stage", "zero_optimization.offload_optimizer", CHANGED),
    ),
    "nvme without a folder": (
        zero(3, offload_optimizer={"device": "nvme"}), ("nvme-path", "zero_optimization.offload_optimizer.nvme_path", FAILS),
    ),
    "hpz at stage 2": (
        zero(2, zero_hpz_partition_size=2), ("stage-3-key", "zero_optimization.zero_hpz_partition_size", IGNORED),
    ),
    "a key of stage 3 at stage 1": (
        zero(1, stage3_prefetch_bucket_size=1), ("stage-3-key", "zero_optimization.stage3_prefetch_bucket_size", IGNORED),
    ),
    "a bucket at stage 0": (
        zero(0, reduce_bucket_size=1), ("stage-0-key", "zero_optimization.reduce_bucket_size", IGNORED),
    ),
    "a flag for a stage": ({**BATCH, "zero_optimization": True}, ("stage-as-flag", "zero_optimization", CHANGED)),
    "no stage": (
        {**BATCH, "zero_optimization": {"ignore_unused_parameters": True}}, ("stage-missing", "zero_optimization", CHANGED),
    ),
    "a dead knob": (
        zero(2, allgather_partitions=True), ("never-read", "zero_optimization.allgather_partitions", IGNORED),
    ),
    "a dead knob that must be even": (
        zero(2, allgather_bucket_size=13), ("odd-bucket", "zero_optimization.allgather_bucket_size", FAILS),
    ),
    "a part offloaded at stage 2": (
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        ("offload-ratio-stage", "zero_optimization.offload_optimizer.ratio", REFUSED),
    ),
    "a part offloaded by torch's Adam": (
        {
            **zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        },
        ("offload-ratio-optimizer", "zero_optimization.offload_optimizer.ratio", FAILS),
    ),
    "scattered gradients of an offloaded optimizer": (
        zero(2, offload_optimizer={"device": "cpu"}, contiguous_gradients=False),
        ("offload-contiguous", "zero_optimization.contiguous_gradients", IGNORED),
    ),
    "two precisions": (
        {**BATCH, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, ("two-precisions", "fp16.enabled", REFUSED),
    ),
    "a norm in the optimizer": (
        {**BATCH, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        ("max-grad-norm", "optimizer.params.max_grad_norm", FAILS),
    ),
    "no batch": ({}, ("batch-missing", "train_batch_size", REFUSED)),
    "no samples": ({"train_micro_batch_size_per_gpu": 0}, ("batch-positive", "train_micro_batch_size_per_gpu", REFUSED)),
    "a switch for a section": ({**BATCH, "bf16": True}, ("section-type", "bf16", REFUSED)),
    "a name for the optimizer's section": ({**BATCH, "optimizer": "AdamW"}, ("section-type", "optimizer", REFUSED)),
    "a number for ZeRO's section": ({**BATCH, "zero_optimization": 3}, ("section-type", "zero_optimization", REFUSED)),
    "a place for a section": (
        zero(3, offload_optimizer="cpu"), ("section-type", "zero_optimization.offload_optimizer", REFUSED),
    ),
    "a comment at the top": ({**BATCH, "_about": "two nodes"}, ("unknown-key", "_about", IGNORED)),
    "a typo in a monitor": (
        {**BATCH, "tensorboard": {"enabled": True, "folder": "logs"}}, ("unknown-key", "tensorboard.folder", REFUSED),
    ),
    "a typo in a section of a section": (
        zero(3, leaf_module={"klasses": ["Block"]}), ("unknown-key", "zero_optimization.leaf_module.klasses", REFUSED),
    ),
    "an unknown key that is auto": (zero(2, bucket="auto"), ("unknown-key", "zero_optimization.bucket", IGNORED)),
    "a number as people write it": (
        zero(2, reduce_bucket_size="2e8"), ("value", "zero_optimization.reduce_bucket_size", REFUSED),
    ),
    "a stage that is none": (zero(4), ("value", "zero_optimization.stage", REFUSED)),
    "a size out of bounds": (
        zero(3, offload_optimizer={"device": "cpu", "ratio": 1.5}),
        ("value", "zero_optimization.offload_optimizer.ratio", REFUSED),
    ),
    "an older switch beside the section of today": (
        zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}),
        ("two-spellings", "zero_optimization.cpu_offload", REFUSED),
    ),
    "both spellings of a key": (
        zero(3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
        ("two-spellings", "zero_optimization.prefetch_bucket_size", REFUSED),
    ),
    "a word of torch for a type": (
        {**BATCH, "communication_data_type": "bfloat16"}, ("word", "communication_data_type", REFUSED),
    ),
    "a sum at stage 3": ({**zero(3), "gradient_allreduce_op": "sum"}, ("sum-stage", "gradient_allreduce_op", REFUSED)),
    "master weights without ZeRO": (
        {**BATCH, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        ("master-stage", "fp16.fp16_master_weights_and_grads", REFUSED),
    ),
    "states in bf16 alone": (
        {**zero(2), "bf16": {"enabled": True, "bf16_optimizer_states": True}},
        ("bf16-states", "bf16.bf16_optimizer_states", REFUSED),
    ),
    "a window that divides by zero": (
        {**BATCH, "fp16": {"enabled": True, "loss_scale_window": 0}}, ("loss-scale", "fp16.loss_scale_window", REFUSED),
    ),
    "no norm at stage 3": (
        zero(3, compute_grad_norm=False), ("norm-stage", "zero_optimization.compute_grad_norm", REFUSED),
    ),
    "a batch in quotes": ({"train_batch_size": "8"}, ("batch-positive", "train_batch_size", REFUSED)),
    "nothing for a section": ({**BATCH, "fp16": None}, ("section-type", "fp16", REFUSED)),
    "a text for the breakdown": ({**BATCH, "wall_clock_breakdown": "yes"}, ("value", "wall_clock_breakdown", REFUSED)),
    "AutoTP with the whole triple": (
        {
            "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
            "tensor_parallel": {"autotp_size": 2, "preset_model": "llama"},
        },
        ("autotp-batch", "train_batch_size", REFUSED),
    ),
    "AutoTP without a plan": (
        {**BATCH, "tensor_parallel": {"autotp_size": 2}}, ("autotp-plan", "tensor_parallel", CHANGED),
    ),
    "a plan without AutoTP": (
        {**BATCH, "tensor_parallel": {"preset_model": "llama"}}, ("autotp-off", "tensor_parallel.preset_model", IGNORED),
    ),
}  # fmt: skip
CLEAN: dict[str, dict[str, Any]] = {
    "stage 2": zero(2, reduce_bucket_size=500_000_000, overlap_comm=True, offload_optimizer={"device": "cpu"}),
    "stage 3": zero(
        3, stage3_prefetch_bucket_size=1, offload_param={"device": "nvme", "nvme_path": "/fast"}, zero_hpz_partition_size=2,
    ),
    "as Hugging Face fills it in": {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"},
    },
    "values as text": {
        **BATCH, "zero_optimization": {"stage": "2", "leaf_module": {"names": "experts"}}, "wandb": "auto",
        "bf16": {"enabled": "yes", "bf16_master_weights_and_grads": "1"},
    },
    "older spellings, and values that mean the same": zero(
        3, cpu_offload=True, cpu_offload_param=1, stage3_gather_fp16_weights_on_model_save="true", reduce_bucket_size=2e8,
        stage3_max_live_parameters="1000000", overlap_comm=None,
    ),
    "AutoTP": {**BATCH, "tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rule_finds_its_case_and_nothing_else(name: str) -> None:
    config, told = CASES[name]
    found = findings(config, "0.19.8")
    extra = {"a dead knob that must be even": {"never-read"}}.get(name, set())
    assert [(one.rule, one.key, one.effect) for one in found if one.rule not in extra] == [told]
    assert all(one.problem and one.remedy for one in found)


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_as_it_says_has_no_finding(name: str) -> None:
    assert findings(CLEAN[name], "0.19.8") == []


@pytest.mark.parametrize("micro", [0, -2])
def test_sizes_that_are_none_are_told_with_ranks_too(micro: int) -> None:
    found = findings({"train_batch_size": 8, "train_micro_batch_size_per_gpu": micro}, "0.19.8", 4)
    assert [one.rule for one in found] == ["batch-positive"]


def test_what_was_meant_is_named() -> None:
    (found,) = findings({**BATCH, "gradient_cliping": 1.0}, "0.19.8")
    assert str(found) == "gradient_cliping: ignored: no part of DeepSpeed reads this key; did you mean gradient_clipping?"


def test_an_older_version_still_has_what_was_removed() -> None:
    config = {**zero(3, mics_shard_size=2), "elasticity": {}}
    assert findings(config, "0.17.0") == []
    assert {one.key for one in findings(config, "0.19.8")} == {"elasticity", "zero_optimization.mics_shard_size"}


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({**BATCH, "tensor_parallel": {"autotp_size": 3, "preset_model": "llama"}}, "autotp-ranks"),
        (zero(3, zero_hpz_partition_size=3), "hpz-ranks"),
        ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 1}, "batch-product"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}, "batch-product"),
        ({"train_batch_size": 9}, "batch-product"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, "batch-product"),
        ({**BATCH, "sequence_parallel_size": 3}, "sequence-ranks"),
    ],
)
def test_sizes_are_held_against_the_ranks(config: dict[str, Any], rule: str) -> None:
    assert findings(config, "0.19.8") == []
    assert [one.rule for one in findings(config, "0.19.8", 8)] == [rule]


def test_ranks_that_share_a_sample_are_one_replica() -> None:
    sizes = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}
    assert findings({**sizes, "sequence_parallel_size": 4}, "0.19.8", 8) == []
    (found,) = findings({**sizes, "sequence_parallel_size": 2}, "0.19.8", 8)
    assert found.problem == "6 is not 1 samples x 3 micro-batches x 4 replicas of 2 ranks"


@pytest.mark.parametrize(
    ("config", "refusing", "taking"),
    [
        (zero(3, zenflow={"topk_ratio": 0.2}), "0.17.4", "0.17.5"),
        ({**BATCH, "fp16": {"enabled": True, "opt_level": "O2"}}, "0.17.1", "0.17.0"),
        ({**BATCH, "bf16": {"enabled": True, "later": True}}, "0.19.8", "0.20.0"),
        ({**BATCH, "communication_data_type": "bfp16"}, "0.14.1", "0.14.0"),
        ({**BATCH, "communication_data_type": "bf16"}, "0.14.0", "0.14.1"),
    ],
)
def test_what_depends_on_the_version(config: dict[str, Any], refusing: str, taking: str) -> None:
    (found,) = [one for one in findings(config, refusing) if one.effect is REFUSED]
    assert found.remedy
    assert [one for one in findings(config, taking) if one.effect is REFUSED] == []


def test_sizes_that_fit_the_ranks_are_let_pass() -> None:
    config = {**zero(3, zero_hpz_partition_size=2), "train_batch_size": 16, "gradient_accumulation_steps": 2}
    assert findings(config, "0.19.8", 8) == []
