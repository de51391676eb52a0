"""Layouts that are refused: exit code 2 and one line with the rule and its remedy, before any process starts.

Every value here is legal alone; so is the rest of the space. `--pin` pins the layout, so that no other point is left.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import table
from called import Command

from autotune.request.engines import CAPABILITIES
from executor.runners import one_process, rank_process
from search_spaces.rules.table import RULES
from tests.sampling import sampled

PLAIN = {
    "tensor_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_parallel_size": 1,
    "pipeline_schedule": "1f1b",
    "virtual_stages": 1,
    "micro_batch_size": 1,
    "zero_stage": 0,
    "activation_checkpointing": "none",
}
"""A legal layout: each case changes it as little as it can."""
CONFIG = json.loads(table.MODEL_CONFIG) | {"num_hidden_layers": 4}
EXPERTS = CONFIG | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
CAPPED = EXPERTS | {"expert_capacity_factor": 1.25, "output_router_logits": True, "router_aux_loss_coef": 0.01}
NARROW = CONFIG | {"intermediate_size": 144}
"""Half of which is no multiple of 16."""
OLMO = CONFIG | {"model_type": "olmo2"}
DEEPSEEK_V3 = CONFIG | {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": CONFIG["num_attention_heads"], "n_routed_experts": 16, "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "deepseek.json": DEEPSEEK_V3,
    "config.json": CONFIG,
    "narrow.json": NARROW,
    "experts.json": EXPERTS,
    "capped.json": CAPPED,
    "olmo.json": OLMO,
}

Case = tuple[str, Mapping[str, object], tuple[str, ...]]
"""The rule, the knobs, and the other words of the command (in place of `config.json`)."""

PIPELINE = {"pipeline_parallel_size": 2}
FLOAT8 = ("--cluster", "dgx-h100", "--ranks", "8")
DEEPSPEED = ("config.json", "--engine", "deepspeed")
BARE = ("--cluster", "bare.toml", "--ranks", "4")
CLUSTER = """
device = "a100-80gb"
devices_per_node = 4
intra_node_bandwidth = 3e11
inter_node_bandwidth = 2e11
host_memory_bytes = 1000000000000
cores_per_node = 64
kernel_packages = {}
"""
GPUS = ("--cluster", "dgx-a100:1", "--ranks", "8")
LLAMA_ON_GPUS = ("config.json", *GPUS)
RUN = ("config.json", "--training-steps", "1000")
GRAPHED = {"cuda_graphs": True}
CURRICULUM = {"curriculum_start_length": 64, "curriculum_steps": 100}
RANDOM_LTD = {"random_ltd_start_tokens": 64, "random_ltd_steps": 100}
DOCUMENTS = ("--document-lengths", "128,64,17")
PACKED = {"pack_sequences": "true"}
ZBV = {**PIPELINE, "pipeline_schedule": "zbv", "virtual_stages": 2}
EIGHT = ("config.json", "--global-batch-size", "8")
CASES: dict[str, Case] = {
    "degrees that do not divide the ranks": ("world-divides", {"pipeline_parallel_size": 3}, ()),
    "tensor ranks and key-value heads": ("tensor-divides", {"tensor_parallel_size": 4}, ()),
    "tensor ranks and norms of all heads": ("tensor-head-norms", {"tensor_parallel_size": 2}, ("olmo.json",)),
    "tensor ranks across nodes": ("tensor-in-node", {"tensor_parallel_size": 2}, ("--ranks", "3", "--global-batch-size", "9")),
    "context ranks of a module of the user's": ("factory-shape", {"context_parallel_size": 2}, ("factory:build",)),
    "micro-batches of a replica": ("batch-divides", {"micro_batch_size": 4}, EIGHT),
    "chunks of the context ranks": (
        "sequence-divides",
        {"context_parallel_size": 4},
        ("config.json", "--sequence-length", "20"),
    ),
    "tokens of the sequence-parallel ranks": (
        "sequence-divides",
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        ("config.json", "--sequence-length", "33"),
    ),
    "more stages than layers": (
        "pipeline-layers",
        {"pipeline_parallel_size": 4, "virtual_stages": 2, "pipeline_schedule": "looped_bfs"},
        (),
    ),
    "1f1b with two stages a rank": ("virtual-stages", {**PIPELINE, "virtual_stages": 2}, ()),
    "a layout of fewer layers": ("pipeline-layout", {**PIPELINE, "pipeline_layout": "1-2"}, ()),
    "a layout of more stages": ("pipeline-layout", {**PIPELINE, "pipeline_layout": "1-1-2"}, ()),
    "a layout whose stages are all run again": ("layout-repeats", {**PIPELINE, "pipeline_layout": "1f-3f"}, ()),
    "a layout that offloads without sharding": ("offload-optimizer-stage", {**PIPELINE, "pipeline_layout": "1o-3"}, ()),
    "saved activations of stages that are recomputed selectively": (
        "offload-selective",
        {**PIPELINE, "pipeline_layout": "1s-3", "offload_activations": True},
        (),
    ),
    "saved activations of compiled blocks": ("offload-compiled", {"offload_activations": True, "compile_blocks": True}, ()),
    "token prediction beside a module of the user's": ("mtp-model", {"mtp_layers": 1}, ("factory:build",)),
    "loads of experts that padding would change": (
        "router-bias-padding",
        {"router_bias_update_rate": 0.001},
        ("deepseek.json", *DOCUMENTS),
    ),
    "token prediction with adapters": ("mtp-together", {"mtp_layers": 1, "lora_rank": 2}, ()),
    "token prediction whose backward is split": ("mtp-zero-bubble", {**ZBV, "mtp_layers": 1}, ()),
    "compiled blocks whose backward is split": ("compile-zero-bubble", {**ZBV, "compile_blocks": True}, ()),
    "sums beside products whose backward is split": (
        "async-tensor-zero-bubble",
        {**ZBV, "tensor_parallel_size": 2, "async_tensor_parallel": True},
        (),
    ),
    "sums beside products of integers": (
        "async-tensor-quantised",
        {"tensor_parallel_size": 2, "async_tensor_parallel": True, "lora_rank": 4, "frozen_dtype": "int8"},
        (),
    ),
    "fused kernels on CPUs": ("fused-kernels-device", {"fused_kernels": "liger"}, ()),
    "fused kernels of a module of the user's": ("fused-kernels-model", {"fused_kernels": "liger"}, ("factory:build",)),
    "fused kernels that no rank has": ("fused-kernels-package", {"fused_kernels": "liger"}, ("config.json", *BARE)),
    "fused kernels in fp16": ("fused-kernels-precision", {"fused_kernels": "liger", "precision": "fp16"}, LLAMA_ON_GPUS),
    "fused kernels whose backward is split": (
        "fused-kernels-zero-bubble",
        {**ZBV, "fused_kernels": "transformer_engine"},
        (*LLAMA_ON_GPUS, "--global-batch-size", "32"),
    ),
    "fused kernels that are recomputed selectively": (
        "fused-kernels-selective",
        {"fused_kernels": "liger", "activation_checkpointing": "selective"},
        LLAMA_ON_GPUS,
    ),
    "fused kernels in graphs": ("fused-kernels-beside", {"fused_kernels": "liger", **GRAPHED}, LLAMA_ON_GPUS),
    "gpipe with two stages a rank": ("virtual-stages", {**PIPELINE, "virtual_stages": 2, "pipeline_schedule": "gpipe"}, ()),
    "interleaved with one stage a rank": ("virtual-stages", {**PIPELINE, "pipeline_schedule": "interleaved_1f1b"}, ()),
    "looped bfs with one stage a rank": ("virtual-stages", {**PIPELINE, "pipeline_schedule": "looped_bfs"}, ()),
    "a fold with one stage a rank": ("virtual-stages", {**PIPELINE, "pipeline_schedule": "zbv"}, ()),
    "1f1b with too few micro-batches": ("pipeline-micro-batches", {"pipeline_parallel_size": 4, "micro_batch_size": 4}, EIGHT),
    "dualpipev with too few micro-batches": (
        "pipeline-micro-batches",
        {**ZBV, "pipeline_schedule": "dualpipev", "micro_batch_size": 2},
        (),
    ),
    "interleaved with an odd round": (
        "pipeline-micro-batches",
        {**ZBV, "pipeline_schedule": "interleaved_1f1b"},
        ("config.json", "--global-batch-size", "10"),
    ),
    "experts that do not divide": ("experts-divide", {"expert_parallel_size": 3}, ("experts.json",)),
    "hsdp below stage 3": ("hsdp-shards", {"hsdp_shard_size": 2, "zero_stage": 2}, ()),
    "hsdp groups that do not divide": ("hsdp-shards", {"hsdp_shard_size": 3, "zero_stage": 3}, ()),
    "offload of an optimizer that is not sharded": ("offload-optimizer-stage", {"offload_optimizer": "cpu"}, ()),
    "offload of parameters that are not sharded": ("offload-param-stage", {"offload_param": "cpu", "zero_stage": 2}, ()),
    "states in files without a folder": ("nvme-path", {"offload_optimizer": "nvme", "zero_stage": 1}, ()),
    "every layer that does not exist": (
        "checkpoint-layers",
        {"activation_checkpointing": "full", "checkpoint_every_k": 8},
        (),
    ),
    "a kernel of attention that the precision has not": ("attention-kernel", {"attention_backend": "cudnn"}, ()),
    "a precision that the device has not": (
        "precision-supported",
        {"precision": "bf16"},
        ("config.json", "--cluster", "dgx-1v", "--ranks", "8"),
    ),
    "float8 on a device without it": ("float8-device", {"precision": "fp8"}, ()),
    "float8 in blocks on a device without them": (
        "float8-recipe",
        {"precision": "fp8", "fp8_recipe": "mxfp8"},
        ("config.json", *FLOAT8),
    ),
    "float8 of slices that no product takes": (
        "float8-sizes",
        {"precision": "fp8", "tensor_parallel_size": 2},
        ("narrow.json", *FLOAT8),
    ),
    "float8 of a module of the user's": ("float8-model", {"precision": "fp8"}, ("factory:build", *FLOAT8)),
    "float8 of products in parts": (
        "float8-async-tensor",
        {"precision": "fp8", "tensor_parallel_size": 2, "async_tensor_parallel": "true"},
        ("config.json", *FLOAT8),
    ),
    "float8 of integers": (
        "float8-quantised",
        {"precision": "fp8", "lora_rank": 2, "frozen_dtype": "nf4"},
        ("config.json", *FLOAT8),
    ),
    "sums in another type than gradients": (
        "accumulation-type",
        {"precision": "bf16", "accumulation_dtype": "fp16", "micro_batch_size": 1},
        (),
    ),
    "Muon on the host": ("optimizer-on-device", {"zero_stage": 1, "optimizer": "muon", "offload_optimizer": "cpu"}, ()),
    "LAMB of a stage on the host": (
        "optimizer-on-device",
        {**PIPELINE, "zero_stage": 1, "optimizer": "lamb", "pipeline_layout": "2-2o"},
        (),
    ),
    "masters in bf16 of fp32": ("bf16-masters", {"optimizer": "adamw_bf16", "precision": "fp32"}, ()),
    "1-bit Adam above stage 0": ("onebit-stage", {"zero_stage": 1, "optimizer": "onebit_adam"}, ()),
    "1-bit Adam of slices": ("onebit-dimensions", {"tensor_parallel_size": 2, "optimizer": "onebit_adam"}, ()),
    "second copies that do not divide": ("secondary-shards", {"secondary_shard_size": 3, "zero_stage": 3}, ()),
    "integers of fsdp2": ("engine-honours", {"gather_dtype": "int8", "zero_stage": 3}, ("config.json", "--engine", "fsdp2")),
    "1-bit Adam of ddp": ("engine-honours", {"optimizer": "onebit_adam"}, ("config.json", "--engine", "ddp")),
    "reductions of deepspeed in integers": ("engine-honours", {"reduce_dtype": "int8", "zero_stage": 3}, DEEPSPEED),
    "a second copy of deepspeed": ("engine-honours", {"secondary_shard_size": 2, "zero_stage": 3}, DEEPSPEED),
    "adapters wider than their matrix": ("adapters", {"lora_rank": 4096}, ()),
    "adapters of a module of the user's": ("adapters", {"lora_rank": 4}, ("factory:build",)),
    "variables of other devices": ("environment-variables", {"environment": "NCCL_NVLS_ENABLE=0"}, ()),
    "bottlenecks wider than the model": ("adapters", {"adapter_size": 4096}, ()),
    "a prefix of a module of the user's": ("adapters", {"prefix_length": 4}, ("factory:build",)),
    "low-rank adapters and a prefix": ("adapters-together", {"lora_rank": 4, "prefix_length": 4}, ()),
    "bottlenecks and a prompt": ("adapters-together", {"adapter_size": 4, "prompt_length": 4}, ()),
    "a prompt longer than the samples": ("virtual-tokens", {"prompt_length": 129}, ()),
    "a prefix longer than the samples": ("virtual-tokens", {"prefix_length": 129}, ()),
    "a prompt that sequence parallelism does not divide": (
        "sequence-divides",
        {"prompt_length": 3, "tensor_parallel_size": 2, "sequence_parallel": "true"},
        (),
    ),
    "a prompt across context ranks": ("prompt-context", {"prompt_length": 4, "context_parallel_size": 2}, ()),
    "Muon of a prefix": ("virtual-tokens-muon", {"prefix_length": 4, "optimizer": "muon"}, ()),
    "a prompt of fsdp2": ("engine-honours", {"prompt_length": 4}, ("config.json", "--engine", "fsdp2")),
    "heads that ranks do not divide": (
        "ulysses-heads",
        {"context_parallel_size": 4, "context_parallel_method": "ulysses"},
        (),
    ),
    "a window of a module of the user's": ("attention-window", {"attention_window": 4}, ("factory:build",)),
    "a window and global tokens that hide nothing": (
        "attention-window",
        {"attention_window": 16, "attention_global_tokens": 16},
        ("config.json", "--sequence-length", "32"),
    ),
    "a window of deepspeed": ("engine-honours", {"attention_window": 4}, DEEPSPEED),
    "adapters of ddp": ("engine-honours", {"lora_rank": 4}, ("config.json", "--engine", "ddp")),
    "experts across ranks of ddp": ("engine-honours", {"expert_parallel_size": 2}, ("experts.json", "--engine", "ddp")),
    "experts across more ranks than hold copies": (
        "experts-divide",
        {"expert_parallel_size": 4, "tensor_parallel_size": 2},
        ("experts.json",),
    ),
    "experts of a dense model": ("experts-divide", {"expert_parallel_size": 2}, ()),
    "full experts across context ranks": ("experts-context", {"context_parallel_size": 2}, ("capped.json",)),
    "more ranks for each expert than tensor ranks": (
        "expert-slices",
        {"expert_tensor_parallel_size": 4, "tensor_parallel_size": 2},
        ("experts.json",),
    ),
    "full experts with a part of the tokens": (
        "expert-tokens",
        {"expert_tensor_parallel_size": 1, "tensor_parallel_size": 2},
        ("capped.json",),
    ),
    "copies of shards of whole experts": (
        "experts-copies",
        {"expert_tensor_parallel_size": 1, "tensor_parallel_size": 2, "zero_stage": 3, "hsdp_shard_size": 1},
        ("experts.json",),
    ),
    "adapters with whole experts beside tensor ranks": (
        "experts-adapters",
        {"expert_tensor_parallel_size": 1, "tensor_parallel_size": 2, "lora_rank": 4},
        ("experts.json",),
    ),
    "copies of shards of experts": (
        "experts-copies",
        {"expert_parallel_size": 2, "zero_stage": 3, "hsdp_shard_size": 2},
        ("experts.json",),
    ),
    "adapters with experts across ranks": (
        "experts-adapters",
        {"expert_parallel_size": 2, "lora_rank": 4},
        ("experts.json",),
    ),
    "a prompt with experts across ranks": (
        "experts-adapters",
        {"expert_parallel_size": 2, "prompt_length": 4},
        ("experts.json",),
    ),
    "modules of compiled blocks that are recomputed": (
        "recompute-modules-hooks",
        {"recompute_modules": "norms", "compile_blocks": True},
        (),
    ),
    "attention between context ranks that is recomputed": (
        "recompute-attention-context",
        {"recompute_modules": "attention", "context_parallel_size": 2},
        (),
    ),
    "compiled blocks with experts across ranks": (
        "experts-compiled",
        {"expert_parallel_size": 2, "compile_blocks": True, "precision": "fp8"},
        ("experts.json", *FLOAT8),
    ),
    "a curriculum longer than the samples": ("curriculum-length", {**CURRICULUM, "curriculum_start_length": 256}, RUN),
    "a curriculum that is no multiple of eight": ("curriculum-length", {**CURRICULUM, "curriculum_start_length": 60}, RUN),
    "a curriculum of a run of unknown length": ("curriculum-steps", CURRICULUM, ()),
    "a curriculum longer than the run": ("curriculum-steps", {**CURRICULUM, "curriculum_steps": 1000}, RUN),
    "a curriculum of no steps": ("curriculum-steps", {"curriculum_start_length": 64}, RUN),
    "lengths that context and tensor ranks do not divide": (
        "curriculum-divides",
        {**CURRICULUM, "tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 8},
        (*RUN, "--ranks", "16", "--global-batch-size", "16", "--cluster", "dgx-a100:2"),
    ),
    "a curriculum of a module of the user's": ("schedule-model", CURRICULUM, ("factory:build", *RUN[1:])),
    "a curriculum behind a prompt": ("schedule-tokens", {**CURRICULUM, "prompt_length": 4}, RUN),
    "a curriculum of compiled blocks": ("schedule-compiled", {**CURRICULUM, "compile_blocks": True}, RUN),
    "a curriculum of fsdp2": ("engine-honours", CURRICULUM, (*RUN, "--engine", "fsdp2")),
    "more tokens than samples have": ("random-ltd-tokens", {**RANDOM_LTD, "random_ltd_start_tokens": 128}, RUN),
    "tokens dropped in a run of unknown length": ("random-ltd-steps", RANDOM_LTD, ()),
    "tokens dropped before experts": ("random-ltd-layers", RANDOM_LTD, ("experts.json", *RUN[1:])),
    "tokens dropped of divided sequences": ("random-ltd-divided", {**RANDOM_LTD, "context_parallel_size": 2}, RUN),
    "tokens dropped of a growing sequence": ("random-ltd-curriculum", {**RANDOM_LTD, **CURRICULUM}, RUN),
    "documents of a module of the user's": ("documents-model", {}, ("factory:build", *DOCUMENTS)),
    "documents of deepspeed": ("documents-engine", {}, (*DEEPSPEED, *DOCUMENTS)),
    "documents before places of experts": ("documents-experts", PACKED, ("capped.json", *DOCUMENTS)),
    "documents of a growing length": ("documents-schedule", CURRICULUM, (*RUN, *DOCUMENTS)),
    "packed rows of context ranks": ("pack-context", {**PACKED, "context_parallel_size": 2}, ("config.json", *DOCUMENTS)),
    "a window over packed rows": ("pack-window", {**PACKED, "attention_window": 8}, ("config.json", *DOCUMENTS)),
    "a prompt before packed rows": ("pack-tokens", {**PACKED, "prompt_length": 4}, ("config.json", *DOCUMENTS)),
    "packed rows of compiled blocks": ("pack-compiled", {**PACKED, "compile_blocks": True}, ("config.json", *DOCUMENTS)),
    "graphs of gathered parameters": ("graphs-stage-3", {**GRAPHED, "zero_stage": 3}, GPUS),
    "graphs of tensor ranks": ("graphs-collectives", {**GRAPHED, "tensor_parallel_size": 2}, GPUS),
    "graphs of context ranks": ("graphs-collectives", {**GRAPHED, "context_parallel_size": 2}, GPUS),
    "graphs in a pipeline": ("graphs-pipeline", {**GRAPHED, **PIPELINE}, GPUS),
    "graphs of what runs again": ("graphs-checkpointing", {**GRAPHED, "activation_checkpointing": "full"}, GPUS),
    "graphs of what is offloaded": ("graphs-offloading", {**GRAPHED, "offload_activations": True}, GPUS),
    "graphs of compiled blocks": ("graphs-compiled", {**GRAPHED, "compile_blocks": True}, GPUS),
    "graphs of growing sequences": ("graphs-schedule", {**GRAPHED, **CURRICULUM}, (*RUN, *GPUS)),
    "graphs of experts": ("graphs-model", GRAPHED, ("experts.json", *GPUS)),
    "stages of ddp": ("engine-honours", {"zero_stage": 1}, ("config.json", "--engine", "ddp")),
    "a pipeline of ddp": ("engine-honours", PIPELINE, ("config.json", "--engine", "ddp")),
    "stage 0 of fsdp2": ("engine-honours", {"zero_stage": 1}, ("config.json", "--engine", "fsdp2")),
    "released parameters under zero-bubble": ("zero-bubble-reshard", {**ZBV, "zero_stage": 3}, ()),
    "released parameters under dualpipev": (
        "zero-bubble-reshard",
        {**ZBV, "pipeline_schedule": "dualpipev", "zero_stage": 3},
        (),
    ),
    "fsdp2 under zero-bubble": ("fsdp2-zero-bubble", {**ZBV, "zero_stage": 2}, ("config.json", "--engine", "fsdp2")),
    "fsdp2 under zero-bubble with context ranks": (
        "fsdp2-zero-bubble",
        {**ZBV, "zero_stage": 3, "context_parallel_size": 2},
        ("config.json", "--engine", "fsdp2"),
    ),
    "half an offload of fsdp2": (
        "fsdp2-offloads-both",
        {"offload_param": "cpu", "zero_stage": 3},
        ("config.json", "--engine", "fsdp2"),
    ),
    "shards of one rank of fsdp2": (
        "fsdp2-copies-alone",
        {"hsdp_shard_size": 1, "zero_stage": 3},
        ("config.json", "--engine", "fsdp2"),
    ),
    "bf16 of fsdp2 with nothing to shard": (
        "fsdp2-bf16-alone",
        {"precision": "bf16", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 3},
        ("config.json", "--engine", "fsdp2"),
    ),
    "stage 2 in a pipeline of deepspeed": ("deepspeed-pipeline-stage", {**PIPELINE, "zero_stage": 2}, DEEPSPEED),
    "AutoTP in a pipeline of deepspeed": ("deepspeed-pipeline-tensor", {**PIPELINE, "tensor_parallel_size": 2}, DEEPSPEED),
    "a pipeline of deepspeed that does not overlap": (
        "deepspeed-pipeline-overlap",
        {**PIPELINE, "zero_stage": 1, "overlap_comm": "false"},
        DEEPSPEED,
    ),
    "buckets of deepspeed at stage 0": ("deepspeed-stage-0-reduction", {"reduce_bucket_size": 100}, DEEPSPEED),
    "a norm of a part of the model": ("deepspeed-bf16-norm", {"precision": "bf16", "tensor_parallel_size": 2}, DEEPSPEED),
    "scattered gradients that deepspeed offloads": (
        "deepspeed-offload-contiguous",
        {"zero_stage": 2, "offload_optimizer": "cpu", "contiguous_gradients": "false"},
        DEEPSPEED,
    ),
    "hpZ of deepspeed over one rank": ("deepspeed-hpz-off", {"zero_stage": 3, "hsdp_shard_size": 1}, DEEPSPEED),
    "hpZ of deepspeed under AutoTP": (
        "deepspeed-hpz-tensor",
        {"zero_stage": 3, "hsdp_shard_size": 2, "tensor_parallel_size": 2},
        (*DEEPSPEED, "--ranks", "8"),
    ),
}
REMEDIES = {rule.name: rule.remedy for rule in RULES} | {
    item.rule: item.remedy for capability in CAPABILITIES.values() for item in capability.combinations
}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a rank process was started")

    monkeypatch.setattr(rank_process.RankProcess, "__init__", started)
    monkeypatch.setattr(one_process, "describe_factory", started)


@pytest.mark.prove(every=7)
@pytest.mark.parametrize("name", sampled(CASES, every=4))
def test_it_is_refused_by_its_rule_with_the_remedy(command: Command, folder: Path, name: str) -> None:
    rule, knobs, words = CASES[name]
    for file, content in MODELS.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "bare.toml").write_text(CLUSTER)
    pins = [word for knob, value in {**PLAIN, **knobs}.items() for word in ("--pin", f"{knob}={value}")]
    given = words if words and not words[0].startswith("--") else ("config.json", *words)
    ranks = () if "--ranks" in given else ("--ranks", "4")
    answer = command("sweep", "--runner", "local", "--out", "best.json", "--space", "3d", *given, *ranks, *pins)
    assert (answer.status, answer.out, len(answer.err.splitlines())) == (2, "", 1), answer.err
    assert rule in answer.err
    assert answer.err.rstrip().endswith(f"; {REMEDIES[rule]}"), answer.err
    assert not (folder / "best.json").exists()


def test_no_rule_is_left_out() -> None:
    of_modules = {"called-blocks"}  # found by the process that describes a module (tests/search_spaces/rules/test_table.py)
    assert {rule for rule, _, _ in CASES.values()} == set(REMEDIES) - of_modules
