"""What the engines honour and refuse: well-formed, refused in their spaces with the remedy, and on the page that tells it."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.engines import engines_page_markdown, schedule_rows
from autotune.request.engines import CAPABILITIES
from search_spaces.capability import Capability, Combination, SpaceContext
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob_values import KNOBS, check_value
from search_spaces.models.huggingface import resolve_model
from search_spaces.plain import to_plain
from search_spaces.rules.table import RULES, check_config
from search_spaces.space import SearchSpace
from search_spaces.spaces import device_defaults, resolve_space
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
ENGINES = tuple(CAPABILITIES.values())
COMBINATIONS = [(engine, item) for engine in ENGINES for item in engine.combinations]
WORK = Workload(global_batch_size=16, sequence_length=128, training_steps=1000)

REFUSED: dict[str, dict[str, Any]] = {
    "zero-bubble-reshard": {
        "zero_stage": 3, "pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "zbv",
    },
    "mtp-zero-bubble": {
        "mtp_layers": 1, "pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_zero_bubble",
    },
    "fsdp2-zero-bubble": {
        "zero_stage": 2, "pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_zero_bubble",
    },
    "offload-selective": {"offload_activations": True, "activation_checkpointing": "selective"},
    "offload-compiled": {"offload_activations": True, "compile_blocks": True},
    "async-tensor-zero-bubble": {
        "async_tensor_parallel": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_stages": 2,
        "pipeline_schedule": "interleaved_zero_bubble",
    },
    "async-tensor-quantised": {
        "async_tensor_parallel": True, "tensor_parallel_size": 2, "lora_rank": 4, "frozen_dtype": "int8",
    },
    "fused-kernels-zero-bubble": {
        "fused_kernels": "transformer_engine", "pipeline_parallel_size": 2, "virtual_stages": 2, "pipeline_schedule": "zbv",
    },
    "fused-kernels-selective": {"fused_kernels": "liger", "activation_checkpointing": "selective"},
    "float8-async-tensor": {"precision": "fp8", "async_tensor_parallel": True, "tensor_parallel_size": 2},
    "float8-quantised": {"precision": "fp8", "lora_rank": 4, "frozen_dtype": "int8"},
    "optimizer-on-device": {"zero_stage": 1, "offload_optimizer": "cpu", "optimizer": "muon"},
    "fsdp2-offloads-both": {"zero_stage": 3, "offload_optimizer": "cpu"},
    "fsdp2-copies-alone": {"zero_stage": 3, "hsdp_shard_size": 1},
    "fsdp2-bf16-alone": {"zero_stage": 3, "precision": "bf16", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "deepspeed-pipeline-stage": {"pipeline_parallel_size": 2, "zero_stage": 2},
    "deepspeed-pipeline-tensor": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "deepspeed-pipeline-overlap": {"pipeline_parallel_size": 2, "zero_stage": 1, "overlap_comm": False},
    "deepspeed-stage-0-reduction": {"overlap_comm": False},
    "deepspeed-bf16-norm": {"precision": "bf16", "tensor_parallel_size": 2},
    "deepspeed-offload-contiguous": {"zero_stage": 2, "offload_optimizer": "cpu", "contiguous_gradients": False},
    "deepspeed-hpz-off": {"zero_stage": 3, "hsdp_shard_size": 1},
    "deepspeed-hpz-tensor": {"zero_stage": 3, "hsdp_shard_size": 2, "tensor_parallel_size": 2},
    "compile-zero-bubble": {
        "compile_blocks": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_stages": 2,
        "pipeline_schedule": "interleaved_zero_bubble",
    },
    "experts-copies": {"expert_parallel_size": 2, "zero_stage": 3, "hsdp_shard_size": 2},
    "experts-compiled": {"expert_parallel_size": 2, "compile_blocks": True, "precision": "fp8"},
    "experts-adapters": {"expert_parallel_size": 2, "lora_rank": 4},
    "prompt-context": {"context_parallel_size": 2, "prompt_length": 4},
    "virtual-tokens-muon": {"optimizer": "muon", "prefix_length": 4},
    "bf16-masters": {"optimizer": "adamw_bf16", "precision": "fp32"},
    "schedule-compiled": {"compile_blocks": True, "curriculum_start_length": 64, "curriculum_steps": 100},
    "random-ltd-curriculum": {
        "random_ltd_start_tokens": 64, "random_ltd_steps": 100, "curriculum_start_length": 64, "curriculum_steps": 100,
    },
    "random-ltd-divided": {"random_ltd_start_tokens": 64, "random_ltd_steps": 100, "context_parallel_size": 2},
    "onebit-stage": {"optimizer": "onebit_adam", "zero_stage": 1},
    "graphs-stage-3": {"cuda_graphs": True, "zero_stage": 3},
    "graphs-collectives": {"cuda_graphs": True, "tensor_parallel_size": 2},
    "graphs-pipeline": {"cuda_graphs": True, "pipeline_parallel_size": 2},
    "graphs-checkpointing": {"cuda_graphs": True, "activation_checkpointing": "full"},
    "graphs-offloading": {"cuda_graphs": True, "offload_activations": True},
    "graphs-compiled": {"cuda_graphs": True, "compile_blocks": True},
    "graphs-schedule": {"cuda_graphs": True, "curriculum_start_length": 64, "curriculum_steps": 100},
    "onebit-dimensions": {"optimizer": "onebit_adam", "tensor_parallel_size": 2},
    "recompute-modules-hooks": {"recompute_modules": "norms", "offload_activations": True},
    "recompute-attention-context": {"recompute_modules": "attention", "context_parallel_size": 2},
}  # fmt: skip
"""For each combination, a configuration that it alone refuses on 4 ranks; else the values that the engine begins with."""
REMEDIED: dict[str, dict[str, Any]] = {
    "zero-bubble-reshard": {"reshard_after_forward": False},
    "fsdp2-zero-bubble": {"pipeline_schedule": "interleaved_1f1b"},
    "mtp-zero-bubble": {"mtp_layers": 0},
    "fsdp2-offloads-both": {"offload_param": "cpu"},
    "fsdp2-copies-alone": {"hsdp_shard_size": 2},
    "fsdp2-bf16-alone": {"precision": "fp32"},
    "deepspeed-pipeline-stage": {"zero_stage": 1},
    "deepspeed-pipeline-tensor": {"tensor_parallel_size": 1},
    "deepspeed-pipeline-overlap": {"overlap_comm": True},
    "deepspeed-stage-0-reduction": {"zero_stage": 1},
    "deepspeed-bf16-norm": {"zero_stage": 1},
    "deepspeed-offload-contiguous": {"contiguous_gradients": True},
    "deepspeed-hpz-off": {"hsdp_shard_size": 2},
    "deepspeed-hpz-tensor": {"tensor_parallel_size": 1},
    "compile-zero-bubble": {"pipeline_schedule": "interleaved_1f1b"},
    "offload-selective": {"activation_checkpointing": "full"},
    "recompute-modules-hooks": {"offload_activations": False},
    "recompute-attention-context": {"recompute_modules": "norms"},
    "offload-compiled": {"compile_blocks": False},
    "async-tensor-zero-bubble": {"pipeline_schedule": "interleaved_1f1b"},
    "async-tensor-quantised": {"frozen_dtype": "same"},
    "fused-kernels-zero-bubble": {"pipeline_schedule": "interleaved_1f1b"},
    "fused-kernels-selective": {"activation_checkpointing": "full"},
    "float8-async-tensor": {"async_tensor_parallel": False},
    "float8-quantised": {"frozen_dtype": "same"},
    "optimizer-on-device": {"optimizer": "adamw"},
    "experts-copies": {"hsdp_shard_size": 0},
    "experts-compiled": {"compile_blocks": False},
    "experts-adapters": {"lora_rank": 0},
    "prompt-context": {"prompt_length": 0, "prefix_length": 4},
    "virtual-tokens-muon": {"optimizer": "adamw"},
    "bf16-masters": {"precision": "bf16"},
    "schedule-compiled": {"compile_blocks": False},
    "random-ltd-curriculum": {"curriculum_start_length": 0},
    "random-ltd-divided": {"context_parallel_size": 1},
    "onebit-stage": {"zero_stage": 0},
    "graphs-stage-3": {"zero_stage": 2},
    "graphs-collectives": {"tensor_parallel_size": 1},
    "graphs-pipeline": {"pipeline_parallel_size": 1},
    "graphs-checkpointing": {"activation_checkpointing": "none"},
    "graphs-offloading": {"offload_activations": False},
    "graphs-compiled": {"compile_blocks": False},
    "graphs-schedule": {"curriculum_start_length": 0},
    "onebit-dimensions": {"tensor_parallel_size": 1},
}
"""What its remedy makes of that."""


def context(engine: Capability, experts: int = 0, gpus: bool = False, float8: bool = False) -> SpaceContext:
    there = "dgx-h100" if float8 else "dgx-a100:1"
    cluster = resolve_cluster(there) if gpus or float8 else resolve_cluster("local", ranks=4)
    model = dataclasses.replace(resolve_model("llama-tiny"), num_experts=experts, experts_per_token=min(experts, 1))
    model = dataclasses.replace(model, ffn_hidden_size=352) if float8 else model  # whose halves are multiples of 16
    return SpaceContext(model=model, cluster=cluster, workload=WORK, world_size=4, capability=engine)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.engine)
def test_values_that_are_honoured_are_values_of_the_knob(engine: Capability) -> None:
    for name, values in engine.knobs.items():
        assert name in KNOBS
        assert all(check_value(name, value) == value for value in values or ())
        assert len(set(values or (0,))) == len(values or (0,))


@pytest.mark.parametrize(("engine", "item"), COMBINATIONS, ids=lambda part: getattr(part, "rule", ""))
def test_a_combination_is_refused_by_its_name_and_its_remedy_helps(engine: Capability, item: Combination) -> None:
    config = TrialConfig().replace({**engine.starting_values(), **REFUSED[item.rule]})
    asked = {"gpus": config.fused_kernels != "none", "float8": config.precision == "fp8"}
    place = context(engine, experts=4 if config.expert_parallel_size > 1 else 0, **asked)
    (refusal,) = check_config(config, place)
    assert (refusal.rule, refusal.message, refusal.remedy) == (item.rule, item.problem, item.remedy)
    assert "\n" not in str(refusal)
    assert engine.refusals(config, 4) == [refusal]
    assert check_config(config.replace(REMEDIED[item.rule]), place) == []


@pytest.mark.parametrize(("engine", "item"), COMBINATIONS, ids=lambda part: getattr(part, "rule", ""))
def test_a_combination_has_a_name_of_its_own_and_reads_what_is_honoured(engine: Capability, item: Combination) -> None:
    assert item.rule not in {rule.name for rule in RULES}
    # Engines may share one, which then is the same for each.
    assert [other for _, other in COMBINATIONS if other.rule == item.rule and other is not item] == []
    assert [other.rule for other in engine.combinations].count(item.rule) == 1
    assert set(item.reads) <= set(engine.knobs)


@pytest.mark.parametrize(("engine", "item"), sampled(COMBINATIONS, every=4), ids=lambda part: getattr(part, "rule", ""))
def test_a_combination_reads_no_other_knobs_than_it_names(engine: Capability, item: Combination) -> None:
    layouts = ("", "1-3", "1s-3", "1f-3", "1-3o")
    domains = {name: KNOBS[name].choices or (layouts if name == "pipeline_layout" else (1, 2, 4)) for name in item.reads}
    other = {name: knob.choices[-1] if knob.choices else 2 for name, knob in KNOBS.items() if name not in item.reads}
    for values in itertools.product(*domains.values()):
        point = dict(zip(domains, values, strict=True))
        assert item.holds(TrialConfig().replace(point), 8) == item.holds(TrialConfig().replace(other | point), 8)


def test_fsdp2_under_zero_bubble_is_right_where_nothing_is_sharded() -> None:
    engine = CAPABILITIES["fsdp2"]
    config = TrialConfig().replace(REFUSED["fsdp2-zero-bubble"])
    assert engine.refusals(config, 2) == []
    assert [refusal.rule for refusal in engine.refusals(config.replace({"context_parallel_size": 2}), 4)] == [
        "fsdp2-zero-bubble"
    ]


def test_single_values_are_told_before_combinations() -> None:
    engine = CAPABILITIES["fsdp2"]
    config = TrialConfig(offload_optimizer="cpu")
    told = [refusal.rule for refusal in engine.refusals(config, 1)]
    assert told == ["engine-honours", "fsdp2-offloads-both"]
    assert "does not honour zero_stage=0 (it honours 2, 3)" in str(engine.refusal(config))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.engine)
@pytest.mark.parametrize("cluster", ["local", "dgx-a100", "dgx-h100:8"])
def test_the_defaults_are_what_the_engine_honours(engine: Capability, cluster: str) -> None:
    defaults = device_defaults(resolve_cluster(cluster), engine)
    assert engine.refusals(defaults, resolve_cluster(cluster).world_size) == []


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.engine)
@pytest.mark.parametrize("name", sampled(["zero", "zero-buckets", "3d", "full"], every=2))
@pytest.mark.parametrize(("model", "cluster", "batch"), [("llama-tiny", "local", 16), ("llama-3-70b", "dgx-h100:2", 128)])
def test_no_preset_is_empty_for_an_engine(engine: Capability, name: str, model: str, cluster: str, batch: int) -> None:
    work = Workload(global_batch_size=batch, sequence_length=128)
    assert resolve_space(name, resolve_model(model), resolve_cluster(cluster), work, engine).count() > 0


def test_capabilities_tell_spaces_apart() -> None:
    def space(capability: Capability | None) -> SearchSpace:
        return resolve_space("zero", resolve_model("llama-tiny"), resolve_cluster("local", ranks=2), WORK, capability)

    native = CAPABILITIES["native"]
    free = Capability(engine=native.engine, knobs=native.knobs)
    hashes = {space(capability).hash for capability in (None, native, free, CAPABILITIES["ddp"])}
    assert len(hashes) == 4
    assert to_plain(native.plain()) == native.plain()


def test_the_page_is_up_to_date() -> None:
    """Write it anew with `autotune engines --markdown > docs/engines.md`."""
    assert PAGE.read_text(encoding="utf-8") == engines_page_markdown()


def test_the_page_tells_every_combination_and_where_a_schedule_is_refused() -> None:
    page = engines_page_markdown()
    assert all(text in page for _, item in COMBINATIONS for text in (item.rule, item.problem, item.remedy))
    cells = {schedule: dict(zip(CAPABILITIES, told, strict=True)) for schedule, *told in schedule_rows()}
    assert cells["1f1b"] == {"native": "yes", "ddp": "no", "fsdp2": "yes", "deepspeed": "yes"}
    unless = {
        "native": "unless compile-zero-bubble, zero-bubble-reshard, async-tensor-zero-bubble, "
        "fused-kernels-zero-bubble, mtp-zero-bubble",
        "fsdp2": "unless compile-zero-bubble, fsdp2-zero-bubble",
    }  # fmt: skip
    assert cells["zbv"] == {**unless, "ddp": "no", "deepspeed": "no"}


@pytest.mark.prove
def test_4_ranks_have_many_layouts_to_try_in_3d() -> None:
    for batch in (8, 16):
        work = Workload(global_batch_size=batch, sequence_length=128)
        space = resolve_space(
            "3d", resolve_model("llama-tiny"), resolve_cluster("local", ranks=4), work, CAPABILITIES["native"]
        )
        configs = list(space.enumerate())
        degrees = {(c.tensor_parallel_size, c.pipeline_parallel_size, c.data_parallel_size(4)) for c in configs}
        layouts = {
            (c.tensor_parallel_size, c.pipeline_parallel_size, c.zero_stage, c.pipeline_schedule, c.virtual_stages)
            for c in configs
        }
        assert degrees == {(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 4, 1)}
        assert {c.pipeline_schedule for c in configs} == set(KNOBS["pipeline_schedule"].choices)
        assert {c.activation_checkpointing for c in configs} == {"none", "selective", "full"}
        assert len(layouts) >= 12
