"""Rules: what each one refuses, that it says so in one line, and that it reads no more knobs than it names."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from search_spaces.capability import Capability, Combination, SpaceContext
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob import PARALLEL_SIZES, ValueKind
from search_spaces.knob_values import KNOBS
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel
from search_spaces.rules.table import RULES, check_config, rules_of
from search_spaces.trial_config import TrialConfig

Make = Callable[..., SpaceContext]

PICKY = Capability(
    engine="picky",
    knobs={"zero_stage": (0, 3), "reshard_after_forward": None},
    combinations=(
        Combination(
            rule="picky-reshard",
            reads=("zero_stage", "reshard_after_forward", *PARALLEL_SIZES),
            problem="it loses what it keeps",
            remedy="let it go",
            holds=lambda config, world: (
                config.zero_stage == 3 and not config.reshard_after_forward and config.zero_ranks(world) > 1
            ),
        ),
    ),
)
PICKY_RULES = {rule.name: rule for rule in rules_of(PICKY)}

EXPERTS = resolve_model("mixtral-8x7b")
WITHOUT_KERNELS = dataclasses.replace(resolve_cluster("dgx-a100:1"), kernel_packages={})
CAPPED, BALANCED = dataclasses.replace(EXPERTS, capacity_factor=1.25), dataclasses.replace(EXPERTS, load_balance=0.01)

WHOLE, PAIRS = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}

NARROW = dataclasses.replace(resolve_model("llama-2-7b"), ffn_hidden_size=11040)
"""Two ranks have multiples of 16 of it, four have not."""

RUN = {"training_steps": 1000}
CURRICULUM = {"curriculum_start_length": 64, "curriculum_steps": 100}
RANDOM_LTD = {"random_ltd_start_tokens": 64, "random_ltd_steps": 100}

DOCUMENTS = {"documents": (128, 64, 17)}
PACKED = {"pack_sequences": True}
NO_PACKER = Capability(engine="plain", knobs={"curriculum_start_length": None})

REFUSED = [
    ("world-divides", {"pipeline_parallel_size": 3}, {}),
    ("world-divides", {"tensor_parallel_size": 4, "context_parallel_size": 4}, {}),
    ("tensor-divides", {"tensor_parallel_size": 3}, {}),
    ("tensor-divides", {"tensor_parallel_size": 4}, {}),
    ("tensor-head-norms", {"tensor_parallel_size": 2}, {"model": "olmo-2-7b"}),
    ("tensor-in-node", {"tensor_parallel_size": 16}, {"model": "llama-2-7b", "cluster": "dgx-a100:2"}),
    ("tensor-in-node", {"tensor_parallel_size": 16}, {"model": "llama-2-7b", "cluster": "gb200-nvl72:36"}),
    ("batch-divides", {"micro_batch_size": 3}, {}),
    ("batch-divides", {"micro_batch_size": 8}, {}),
    ("sequence-divides", {"context_parallel_size": 8}, {"sequence": 100}),
    ("sequence-divides", {"context_parallel_size": 8}, {"sequence": 8}),
    (
        "sequence-divides",
        {"context_parallel_size": 2, "tensor_parallel_size": 4, "sequence_parallel": True},
        {"sequence": 4, "model": "llama-2-7b"},
    ),
    ("sequence-divides", {"tensor_parallel_size": 2, "sequence_parallel": True}, {"sequence": 99}),
    ("pipeline-layers", {"pipeline_parallel_size": 8}, {}),
    ("pipeline-layout", {"pipeline_parallel_size": 2, "pipeline_layout": "1-1-2"}, {}),
    ("pipeline-layout", {"pipeline_parallel_size": 2, "pipeline_layout": "1-2"}, {}),
    (
        "pipeline-layout",
        {"pipeline_parallel_size": 2, "pipeline_layout": "1-3"},
        {"model": FactoryModel(reference="m:f", parameter_count=10, pipeline_stages=4)},
    ),
    ("layout-repeats", {"pipeline_parallel_size": 2, "pipeline_layout": "1f-3f"}, {}),
    ("layout-repeats", {"pipeline_parallel_size": 2, "pipeline_layout": "1o-3o", "zero_stage": 1}, {}),
    ("layout-repeats", {"pipeline_parallel_size": 4, "pipeline_layout": "8-8-8-8"}, {"model": "llama-2-7b"}),
    ("offload-optimizer-stage", {"pipeline_parallel_size": 2, "pipeline_layout": "1o-3"}, {}),
    ("virtual-stages", {"pipeline_parallel_size": 2, "virtual_stages": 2}, {}),
    ("virtual-stages", {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b"}, {}),
    ("virtual-stages", {"pipeline_parallel_size": 2, "pipeline_schedule": "looped_bfs"}, {}),
    ("virtual-stages", {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"}, {}),
    ("pipeline-micro-batches", {"pipeline_parallel_size": 2, "micro_batch_size": 8}, {}),
    (
        "pipeline-micro-batches",
        {"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b"},
        {"batch": 20},
    ),
    (
        "pipeline-micro-batches",
        {"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "dualpipev", "micro_batch_size": 4},
        {},
    ),
    ("experts-divide", {"expert_parallel_size": 2}, {}),
    ("experts-divide", {"expert_parallel_size": 3}, {"model": "mixtral-8x7b"}),
    ("experts-divide", {"expert_parallel_size": 8, "tensor_parallel_size": 2}, {"model": "mixtral-8x7b"}),
    ("experts-divide", {"expert_parallel_size": 8, **PAIRS, "tensor_parallel_size": 4}, {"model": "mixtral-8x7b"}),
    ("expert-slices", {"expert_tensor_parallel_size": 3, "tensor_parallel_size": 4}, {"model": "mixtral-8x7b"}),
    ("expert-slices", {"expert_tensor_parallel_size": 4, "tensor_parallel_size": 2}, {"model": "mixtral-8x7b"}),
    ("expert-tokens", {**WHOLE, "tensor_parallel_size": 2}, {"model": CAPPED}),
    ("expert-tokens", {**WHOLE, "tensor_parallel_size": 8}, {"model": "mixtral-8x7b", "sequence": 4100}),
    ("experts-context", {"context_parallel_size": 2}, {"model": CAPPED}),
    ("experts-context", {"context_parallel_size": 2}, {"model": BALANCED}),
    ("hsdp-shards", {"hsdp_shard_size": 2}, {}),
    ("hsdp-shards", {"hsdp_shard_size": 3, "zero_stage": 3}, {}),
    ("hsdp-shards", {"hsdp_shard_size": 16, "zero_stage": 3}, {}),
    ("hsdp-shards", {"hsdp_shard_size": 8, "zero_stage": 3, "tensor_parallel_size": 2}, {}),
    ("secondary-shards", {"secondary_shard_size": 3, "zero_stage": 3}, {}),
    ("secondary-shards", {"secondary_shard_size": 16, "zero_stage": 3}, {}),
    ("secondary-shards", {"secondary_shard_size": 4, "hsdp_shard_size": 2, "zero_stage": 3}, {}),
    ("offload-optimizer-stage", {"offload_optimizer": "cpu"}, {}),
    ("offload-param-stage", {"offload_param": "cpu", "zero_stage": 2}, {}),
    ("nvme-path", {"offload_optimizer": "nvme", "zero_stage": 1}, {}),
    ("nvme-path", {"offload_param": "nvme", "zero_stage": 3}, {}),
    ("checkpoint-layers", {"activation_checkpointing": "full", "checkpoint_every_k": 5}, {}),
    ("precision-supported", {"precision": "bf16"}, {"cluster": "dgx-1v"}),
    ("attention-kernel", {"attention_backend": "cudnn"}, {"cluster": "local"}),
    ("attention-kernel", {"attention_backend": "flash"}, {"cluster": "dgx-a100:1"}),
    (
        "attention-kernel",
        {"attention_backend": "flash", "precision": "bf16"},
        {"cluster": "dgx-a100:1", "model": "mistral-7b", "sequence": 8192},
    ),
    ("attention-kernel", {"attention_backend": "efficient"}, {"cluster": "dgx-a100:1", "model": "gemma-2-2b"}),
    ("float8-device", {"precision": "fp8"}, {"cluster": "local"}),
    ("float8-device", {"precision": "fp8"}, {"cluster": "dgx-a100"}),
    ("float8-recipe", {"precision": "fp8", "fp8_recipe": "mxfp8"}, {"cluster": "dgx-h100"}),
    (
        "float8-model",
        {"precision": "fp8"},
        {"cluster": "dgx-h100", "model": FactoryModel(reference="m:f", parameter_count=10)},
    ),
    ("float8-sizes", {"precision": "fp8"}, {"cluster": "dgx-h100"}),
    ("float8-sizes", {"precision": "fp8", "tensor_parallel_size": 4}, {"cluster": "dgx-h100", "model": NARROW}),
    ("accumulation-type", {"precision": "bf16", "accumulation_dtype": "fp16"}, {"cluster": "dgx-a100"}),
    ("accumulation-type", {"precision": "fp64", "accumulation_dtype": "bf16"}, {"cluster": "local"}),
    ("adapters", {"lora_rank": 2**20}, {}),
    ("adapters", {"lora_rank": 8}, {"model": FactoryModel(reference="m:f", parameter_count=10)}),
    ("environment-variables", {"environment": "NCCL_ALGO=Ring"}, {"cluster": "local"}),
    ("environment-variables", {"environment": "LD_PRELOAD=/tmp/x.so"}, {"cluster": "dgx-a100"}),
    ("adapters-together", {"lora_rank": 8, "prefix_length": 8}, {}),
    ("virtual-tokens", {"prompt_length": 2**20}, {}),
    ("ulysses-heads", {"context_parallel_size": 3, "context_parallel_method": "ulysses"}, {}),
    ("documents-model", {}, {**DOCUMENTS, "model": FactoryModel(reference="m:f", parameter_count=10)}),
    ("documents-engine", {}, {**DOCUMENTS, "capability": NO_PACKER}),
    ("documents-experts", {}, {**DOCUMENTS, "model": BALANCED}),
    ("documents-experts", PACKED, {**DOCUMENTS, "model": CAPPED}),
    ("documents-schedule", CURRICULUM, {**DOCUMENTS, **RUN}),
    ("documents-schedule", RANDOM_LTD, {**DOCUMENTS, **RUN}),
    ("pack-context", {**PACKED, "context_parallel_size": 2}, DOCUMENTS),
    ("pack-window", {**PACKED, "attention_window": 8}, DOCUMENTS),
    ("pack-window", PACKED, {"documents": (4096, 64), "model": "mistral-7b", "sequence": 8192}),
    ("pack-tokens", {**PACKED, "prompt_length": 8}, DOCUMENTS),
    ("pack-compiled", {**PACKED, "compile_blocks": True}, DOCUMENTS),
    ("attention-window", {"attention_window": 8}, {"model": FactoryModel(reference="m:f", parameter_count=10)}),
    ("mtp-model", {"mtp_layers": 1}, {"model": FactoryModel(reference="m:f", parameter_count=10)}),
    ("mtp-model", {"mtp_layers": 1}, {"model": "gpt2"}),
    ("mtp-model", {"mtp_layers": 1}, {"model": "opt-350m"}),
    ("router-bias-padding", {"router_bias_update_rate": 0.001}, {**DOCUMENTS, "model": "deepseek-v3"}),
    ("mtp-together", {"mtp_layers": 1, "lora_rank": 8}, {}),
    ("mtp-together", {"mtp_layers": 2, **RANDOM_LTD}, RUN),
    ("mtp-together", {"mtp_layers": 2, **CURRICULUM}, RUN),
    ("curriculum-length", {**CURRICULUM, "curriculum_start_length": 128}, RUN),
    ("curriculum-length", {**CURRICULUM, "curriculum_start_length": 20}, RUN),
    ("curriculum-steps", CURRICULUM, {}),
    ("curriculum-steps", {"curriculum_start_length": 64}, RUN),
    ("curriculum-steps", {**CURRICULUM, "curriculum_steps": 1000}, RUN),
    ("curriculum-divides", {**CURRICULUM, "context_parallel_size": 8}, RUN),
    (
        "curriculum-divides",
        {**CURRICULUM, "context_parallel_size": 4, "tensor_parallel_size": 4, "sequence_parallel": True},
        RUN,
    ),
    ("random-ltd-tokens", {**RANDOM_LTD, "random_ltd_start_tokens": 256}, RUN),
    ("random-ltd-steps", RANDOM_LTD, {}),
    ("random-ltd-layers", RANDOM_LTD, {**RUN, "model": EXPERTS}),
    ("random-ltd-layers", RANDOM_LTD, {**RUN, "model": dataclasses.replace(resolve_model("llama-tiny"), num_layers=2)}),
    ("random-ltd-layers", {**RANDOM_LTD, "attention_window": 32}, RUN),
    ("schedule-tokens", {**CURRICULUM, "prompt_length": 4}, RUN),
    ("schedule-tokens", {**RANDOM_LTD, "prefix_length": 4}, RUN),
    ("schedule-model", RANDOM_LTD, {**RUN, "model": FactoryModel(reference="m:f", parameter_count=10)}),
    ("fused-kernels-model", {"fused_kernels": "liger"}, {"model": FactoryModel(reference="m:f", parameter_count=10)}),
    ("fused-kernels-device", {"fused_kernels": "transformer_engine"}, {"cluster": "local"}),
    ("fused-kernels-package", {"fused_kernels": "liger"}, {"cluster": WITHOUT_KERNELS}),
    ("fused-kernels-precision", {"fused_kernels": "liger", "precision": "fp64"}, {}),
    ("fused-kernels-beside", {"fused_kernels": "transformer_engine", "compile_blocks": True}, {}),
    ("fused-kernels-beside", {"fused_kernels": "liger", "cuda_graphs": True}, {}),
    ("fused-kernels-beside", {"fused_kernels": "liger"}, DOCUMENTS),
    ("graphs-model", {"cuda_graphs": True}, {"model": EXPERTS}),
    ("graphs-model", {"cuda_graphs": True}, {"model": "mistral-7b", "sequence": 8192}),
    ("graphs-model", {"cuda_graphs": True, "attention_window": 32}, {}),
    ("graphs-model", {"cuda_graphs": True}, {"model": "gemma-2-2b"}),
    ("graphs-model", {"cuda_graphs": True}, {"model": FactoryModel(reference="m:f", parameter_count=10)}),
    ("engine-honours", {"zero_stage": 1}, {"capability": Capability(engine="small", knobs={})}),
    ("picky-reshard", {"zero_stage": 3, "reshard_after_forward": False}, {"capability": PICKY}),
    ("factory-shape", {"tensor_parallel_size": 2}, {"model": FactoryModel(reference="m:f", parameter_count=10)}),
    (
        "called-blocks",
        {"offload_activations": True},
        {"model": FactoryModel(reference="m:f", parameter_count=1, refused_knobs=(("offload_activations", "why"),))},
    ),
]


@pytest.mark.parametrize(("rule", "changes", "where"), REFUSED)
def test_refusal_names_rule_and_remedy_in_one_line(make_context: Make, rule: str, changes: Any, where: Any) -> None:
    refusals = {refusal.rule: refusal for refusal in check_config(TrialConfig().replace(changes), make_context(**where))}
    assert rule in refusals
    assert refusals[rule].remedy == PICKY_RULES[rule].remedy
    assert "\n" not in str(refusals[rule])


def test_every_rule_is_seen_to_refuse() -> None:
    assert {rule for rule, _, _ in REFUSED} == set(PICKY_RULES)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, {}),
        ({"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 3}, {}),
        ({"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "zbv"}, {}),
        ({"pipeline_parallel_size": 4, "micro_batch_size": 4}, {}),
        ({"pipeline_parallel_size": 2, "pipeline_layout": "3f2-1s"}, {}),
        ({"pipeline_parallel_size": 2, "pipeline_layout": "1o-3", "zero_stage": 1}, {}),
        ({"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_zero_bubble"}, {}),
        ({"pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b"}, {"batch": 12}),
        ({"context_parallel_size": 8}, {"sequence": 16}),
        ({"context_parallel_size": 4, "tensor_parallel_size": 2, "hsdp_shard_size": 4, "zero_stage": 3}, {}),
        (
            {"zero_stage": 3, "reshard_after_forward": False},
            {"capability": PICKY, "cluster": resolve_cluster("local", ranks=1)},
        ),
        ({"zero_stage": 3}, {"capability": PICKY}),
        (PACKED, {**DOCUMENTS, "capability": Capability(engine="packer", knobs=dict.fromkeys(PACKED))}),
        ({**PACKED, "expert_parallel_size": 8}, {**DOCUMENTS, "model": "mixtral-8x7b"}),
        ({"context_parallel_size": 2, "attention_window": 8, "compile_blocks": True}, DOCUMENTS),
        ({}, {**DOCUMENTS, "model": CAPPED}),
        ({"expert_parallel_size": 8}, {"model": "mixtral-8x7b"}),
        ({"expert_parallel_size": 8}, {"model": CAPPED}),
        ({**WHOLE, "tensor_parallel_size": 8, "expert_parallel_size": 8}, {"model": "mixtral-8x7b"}),
        ({**WHOLE, "tensor_parallel_size": 2, "sequence_parallel": True}, {"model": BALANCED}),
        ({"context_parallel_size": 4, "tensor_parallel_size": 2, "expert_parallel_size": 4}, {"model": EXPERTS}),
        ({"context_parallel_size": 2}, {"model": EXPERTS}),
        ({"hsdp_shard_size": 4, "zero_stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"}, {}),
        ({"precision": "bf16"}, {"cluster": "local"}),
        ({"precision": "fp16", "accumulation_dtype": "fp16", "reduce_dtype": "fp16"}, {"cluster": "local"}),
        ({"precision": "fp8", "tensor_parallel_size": 8}, {"cluster": "dgx-h100", "model": "llama-2-7b"}),
        ({"fused_kernels": "liger", "precision": "bf16"}, {}),
        ({"environment": "MALLOC_ARENA_MAX=1 NCCL_ALGO=Ring"}, {"cluster": "dgx-h100"}),
        ({"zero_stage": 3}, {"capability": Capability(engine="some", knobs={"zero_stage": None})}),
        ({"zero_stage": 3}, {"model": FactoryModel(reference="m:f", parameter_count=10)}),
        ({**CURRICULUM, "context_parallel_size": 4}, RUN),
        ({**CURRICULUM, "tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}, RUN),
        (RANDOM_LTD, RUN),
    ],
)
def test_legal_configurations_pass(make_context: Make, changes: Any, where: Any) -> None:
    assert check_config(TrialConfig().replace(changes), make_context(**where)) == []


@pytest.mark.prove(every=7)
@pytest.mark.parametrize("rule", rules_of(PICKY), ids=lambda rule: rule.name)
def test_a_rule_reads_no_other_knobs_than_it_names(make_context: Make, rule: Any) -> None:
    rng = random.Random(rule.name)
    context = make_context(model="mixtral-8x7b", capability=PICKY)
    for _ in range(200):
        config, other = _any_config(rng), _any_config(rng)
        kept = {name: getattr(config, name) for name in rule.reads}
        same = rule.check(config, context) == rule.check(dataclasses.replace(other, **kept), context)
        assert same


def test_an_engine_adds_its_own_rules_and_takes_none_away() -> None:
    assert rules_of(None) == RULES
    assert rules_of(PICKY)[: len(RULES)] == RULES


def _any_config(rng: random.Random) -> TrialConfig:
    """Any values, legal or not."""
    environments = ("", "MALLOC_ARENA_MAX=1", "NCCL_ALGO=Ring", "PATH=/tmp")
    texts = {"environment": environments, "script": ("", "a=1"), "pipeline_layout": ("", "1-1", "16-16", "30f-2", "16o-16o")}
    values = {
        name: rng.choice(knob.choices or texts.get(name, (1, 2, 4)))
        for name, knob in KNOBS.items()
        if knob.kind is not ValueKind.FLOAT
    }
    return TrialConfig().replace(values)
