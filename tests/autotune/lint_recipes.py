"""Configurations in the shapes of published recipes, good and with planted faults, and what lint must say of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import read_written
from autotune.recipes.lint import Linted, lint
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model

RECIPES = Path(__file__).parent / "recipes" / "files"
TITAN = "torchtitan v0.2.2, models/{}"
TITAN_3 = "torchtitan 0.3.0, models/{}"
LM = "Megatron-LM d98e8a64, examples/{}"
BRIDGE = "Megatron-Bridge 067f987d, perf_recipes/{}"
HUB = "accelerate 1.15.0, examples/config_yaml_templates/{}"
TRL = "trl, examples/accelerate_configs/{}"
DEEP = "DeepSpeed 0.19.8, {}"


@dataclass(frozen=True, kw_only=True)
class RecipeCase:
    """One configuration of a file."""

    file: str
    source: str
    """Whose shape it has."""
    function: str = ""
    """Of a Python file, which recipe."""
    fault: str = ""
    """What was changed; empty: nothing."""
    cluster: str = ""
    model: str = ""
    ranks: int | None = None
    expected: Mapping[str, Mapping[str, Any]] | None = None
    """Rule -> its fix, for every finding; None: a good one."""
    refusal: str = ""
    """The one line about a file that cannot be read."""

    def linted(self) -> Linted:
        """The findings."""
        around = Surroundings(
            model=resolve_model(self.model) if self.model else None,
            cluster=resolve_cluster(self.cluster, self.ranks) if self.cluster else None,
            ranks=self.ranks,
        )
        found = read_written(RECIPES / self.file)
        one = next(one for one in found if not self.function or one.name.endswith(f":{self.function}"))
        return lint(one, around)

    @property
    def name(self) -> str:
        """The file and the function."""
        return self.file + (f":{self.function}" if self.function else "")


def said(case: RecipeCase) -> str:
    """Everything that lint says of a case, in one text."""
    try:
        found = case.linted()
    except AutotuneError as error:
        return f"unreadable: {error}"
    return "; ".join(f"{finding.rule}: {finding}" for finding in found.findings) or "nothing"


def _titan(file: str, shape: str, cluster: str, **more: Any) -> RecipeCase:
    return RecipeCase(file=f"titan-{file}.toml", source=TITAN.format(shape), cluster=cluster, **more)


def _megatron(file: str, shape: str, cluster: str = "", **more: Any) -> RecipeCase:
    return RecipeCase(file=f"megatron-{file}", source=LM.format(shape), cluster=cluster, **more)


TP, PP, EP = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree", "model.expert_model_parallel_size"
MESH = "parallelism_config.parallelism_config_{}_size"
LLAMA_8B, LLAMA_70B = "llama3/train_configs/llama3_8b.toml", "llama3/train_configs/llama3_70b.toml"
TITAN_CASES = (
    _titan("llama3-8b", LLAMA_8B, "dgx-h100:1"),
    _titan("llama3-70b", LLAMA_70B, "dgx-h100:8"),
    _titan("llama3-405b", "llama3/train_configs/llama3_405b.toml", "dgx-h100:16"),
    _titan("qwen3-32b", "qwen3/train_configs/qwen3_32b.toml", "dgx-h100:4"),
    _titan("deepseek-16b", "deepseek_v3/train_configs/deepseek_v3_16b.toml", "dgx-h100:2"),
    RecipeCase(
        file="titan_4016_fixed.py", function="deepseek_v3_671b", cluster="gb200-nvl72:64",
        source="torchtitan #4016, as it corrects the recipe",
    ),
    RecipeCase(
        file="titan_4016.py", function="deepseek_v3_671b", cluster="gb200-nvl72:64", source="torchtitan #4016",
        fault="no pipeline, EP 2, local batch 4: over 276 GiB", expected={"memory": {"activation_checkpoint.mode": "full"}},
    ),
    RecipeCase(
        file="titan_4016.py", function="qwen35_122b_a10b", cluster="gb200-nvl72:16", source="torchtitan #4016",
        fault="TP 4 for 2 key-value heads", expected={"kv-heads": {TP: 2}},
    ),
    RecipeCase(
        file="titan_4016.py", function="qwen35_397b_a17b", cluster="gb200-nvl72:16", source="torchtitan #4016",
        fault="TP 8 for 2 key-value heads", expected={"kv-heads": {TP: 2}},
    ),
    _titan(
        "kv-heads", LLAMA_8B, "dgx-h100:4", fault="TP 16 for 8 key-value heads, on nodes of 8",
        expected={"tensor-divides": {TP: 8}, "tensor-in-node": {TP: 8}},
    ),
    _titan(
        "global-batch", LLAMA_8B, "dgx-h100:1", fault="a global batch of 100 for 8 x 4 samples",
        expected={"global-batch": {"training.global_batch_size": 96}},
    ),
    _titan(
        "micro-batch", LLAMA_70B, "dgx-h100:4", fault="micro-batches of 4 in a local batch of 10",
        expected={"local-batch": {"parallelism.pipeline_parallel_microbatch_size": 2}},
    ),
    _titan(
        "few-micro-batches", LLAMA_70B, "dgx-h100:8", fault="2 micro-batches for 4 stages of 1F1B",
        expected={"pipeline-micro-batches": {PP: 2}},
    ),
    _titan(
        "misspelled", LLAMA_8B, "dgx-h100:1", fault="tensor_paralel_degree",
        expected={"unknown-key": {"parallelism.tensor_paralel_degree": None, TP: 2}},
    ),
    _titan(
        "async-uncompiled", LLAMA_70B, "dgx-h100:8", fault="asynchronous tensor parallelism without compile",
        expected={"async-tensor-compiled": {"compile.enable": True}},
    ),
    _titan(
        "ranks", LLAMA_8B, "dgx-h100:8", fault="degrees of 32 ranks on 64",
        expected={"ranks-product": {"parallelism.data_parallel_shard_degree": -1}},
    ),
    _titan(
        "expert-tensor", "deepseek_v3/train_configs/deepseek_v3_16b.toml", "dgx-h100:2", fault="ETP 2 beside TP 4",
        expected={"expert-tensor": {"parallelism.expert_tensor_parallel_degree": 1}},
    ),
    _titan(
        "selective-option", LLAMA_8B, "dgx-h100:1", fault="an unknown selective_ac_option",
        expected={"selective-option": {"activation_checkpoint.selective_ac_option": "op"}},
    ),
    _titan(
        "stage-layers", LLAMA_70B, "dgx-h100:8", fault="14 layers a stage make 6 stages for 4 ranks",
        expected={"stage-layers": {"parallelism.pipeline_parallel_layers_per_stage": 11}},
    ),
    _titan(
        "sequence", LLAMA_8B, "dgx-h100:1", fault="8,184 tokens for CP 8",
        expected={"sequence-product": {"training.seq_len": 8192}},
    ),
    _titan(
        "older", "llama3/train_configs/llama3_8b.toml, before 0.1", "dgx-h100:1", fault="a file of a version before 0.1",
        refusal="training.batch_size: titan-older.toml is for a torchtitan before 0.1; "
        "rename the key to training.local_batch_size",
    ),
    RecipeCase(
        file="titan-flags.sh", source=TITAN_3.format("llama3/config_registry.py"), model="llama-3-70b", cluster="dgx-h100:8",
        fault="a pipeline with CUDA graphs", expected={"graphs-in-a-pipeline": {"training.disable_cuda_graphs": True}},
    ),
)  # fmt: skip
GPT, LLAMA, MIXTRAL = (
    "gpt3/train_gpt3_175b_distributed.sh", "llama/train_llama3_8b_h100_fp8.sh", "mixtral/train_mixtral_8x7b_distributed.sh",
)  # fmt: skip
MEGATRON_CASES = (
    _megatron("gpt3-175b.sh", GPT, "dgx-a100:16"),
    _megatron("llama3-8b.sh", LLAMA, "dgx-h100:1"),
    _megatron("mixtral.sh", MIXTRAL, "dgx-h100:4"),
    _megatron("kv-replicated.sh", f"{LLAMA}, 4 key-value heads on TP 8, which Megatron replicates", "dgx-h100:2"),
    _megatron(
        "gpt3-175b-one-node.sh", GPT, "dgx-a100:1", fault="128 ranks a replica on one node, as published",
        expected={"world-divides": {"--pipeline-model-parallel-size": 1}},
    ),
    _megatron(
        "mixtral-one-node.sh", MIXTRAL, "dgx-h100:1", fault="EP 8 on 2 ranks a stage",
        expected={"experts-divide": {"--expert-model-parallel-size": 2}},
    ),
    _megatron(
        "heads.sh", LLAMA, fault="TP 6 for 32 heads", expected={"tensor-divides": {"--tensor-model-parallel-size": 8}}
    ),
    _megatron(
        "layers.sh", LLAMA, fault="PP 5 for 36 layers", expected={"layers-divide": {"--pipeline-model-parallel-size": 4}}
    ),
    _megatron(
        "interleaved.sh", LLAMA, "dgx-h100:4", fault="10 micro-batches for interleaved stages on 4 ranks",
        expected={"interleaved-micro-batches": {"--global-batch-size": 16}},
    ),
    _megatron(
        "queues.sh", LLAMA, "dgx-h100:1", fault="no CUDA_DEVICE_MAX_CONNECTIONS",
        expected={"hardware-queues": {"env.CUDA_DEVICE_MAX_CONNECTIONS": 1}},
    ),
    _megatron(
        "recompute.sh", LLAMA, "dgx-h100:1", fault="full recomputation without a method",
        expected={"full-recompute-method": {"--recompute-method": "uniform", "--recompute-num-layers": 1}},
    ),
    _megatron(
        "gather.sh", LLAMA, "dgx-h100:1", fault="overlapped gathers without overlapped reductions",
        expected={"gather-needs-reduce": {"--overlap-grad-reduce": True}},
    ),
    _megatron(
        "experts-sequence.sh", MIXTRAL, "dgx-h100:4", fault="experts with TP and without sequence parallelism",
        expected={"experts-need-sequence": {"--sequence-parallel": True}},
    ),
    _megatron(
        "misspelled.sh", LLAMA, "dgx-h100:1", fault="--tensor-model-paralel-size",
        expected={"unknown-key": {"--tensor-model-paralel-size": None, "--tensor-model-parallel-size": 2}},
    ),
    _megatron(
        "fsdp.sh", "megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh", "dgx-h100:1",
        fault="Megatron-FSDP with torch's checkpoints",
        expected={"fsdp-checkpoints": {"--ckpt-format": "fsdp_dtensor"}},
    ),
    _megatron(
        "batch.sh", LLAMA, "dgx-h100:1", fault="a global batch of 30 for 4 replicas",
        expected={"batch-divides": {"--global-batch-size": 32}},
    ),
    _megatron(
        "older.args", "bert/train_bert_340m_distributed.sh, before core", fault="options that were removed",
        refusal="--model-parallel-size: megatron-older.args is for a Megatron-LM before Megatron-core; "
        "use --tensor-model-parallel-size",
    ),
)  # fmt: skip
BRIDGE_CASES = (
    RecipeCase(file="bridge-llama3-70b.yaml", source=BRIDGE.format("llama/h100/llama3.py"), cluster="dgx-h100:8"),
    RecipeCase(file="bridge-949-shipped.args", source="Megatron-Bridge #949, as shipped", cluster="dgx-h100:2"),
    RecipeCase(file="bridge-949-proposed.args", source="Megatron-Bridge #949, as its author prefers", cluster="dgx-h100:2"),
    RecipeCase(
        file="bridge_deepseek_h100.py", function="deepseek_v3_pretrain_1024gpu_h100_bf16_config", cluster="dgx-h100:128",
        source=BRIDGE.format("deepseek/h100/deepseek_v3.py"),
    ),
    RecipeCase(
        file="bridge_nemotronh.py", function="nemotronh_56b_pretrain_64gpu_b200_fp8cs_config",
        source=BRIDGE.format("nemotronh/b200/nemotronh.py"),
    ),
    RecipeCase(
        file="bridge_6043.py", function="nemotron_3_super_pretrain_64gpu_b200_bf16_config", source="Megatron-Bridge #6043",
        fault="EP 64 by HybridEP on nodes of 8 B200", expected={"experts-beyond-links": {EP: 8}},
    ),
    RecipeCase(
        file="bridge_6043.py", function="nemotron_3_super_pretrain_64gpu_b200_bf16_config", source="Megatron-Bridge #6043",
        cluster="dgx-b200:8", fault="the same, with the cluster", expected={"experts-beyond-links": {EP: 8}},
    ),
    RecipeCase(
        file="bridge-experts-links.args", source=BRIDGE.format("qwen/h100/qwen3_moe.py"), cluster="gcp-a3-high:4",
        fault="EP 16 on nodes of 8, by all-to-all", expected={"experts-beyond-links": {EP: 8}},
    ),
    RecipeCase(
        file="bridge_deepseek_h100.py", function="deepseek_v3_pretrain_64gpu_h100_bf16_config",
        source=BRIDGE.format("deepseek/h100/deepseek_v3.py"), fault="EP 64 on 8 ranks a stage, as published",
        expected={"experts-divide": {EP: 8}},
    ),
    RecipeCase(
        file="bridge_nemotronh.py", function="nemotronh_56b_pretrain_256gpu_b200_bf16_config",
        source=BRIDGE.format("nemotronh/b200/nemotronh.py"), fault="a global batch of 192 for 128 replicas, as published",
        expected={"batch-divides": {"train.global_batch_size": 256}},
    ),
    RecipeCase(
        file="bridge-sequence.yaml", source=BRIDGE.format("llama/h100/llama3.py"), ranks=8,
        fault="sequence parallelism without TP", expected={"sequence-without-tensor": {"model.sequence_parallel": None}},
    ),
    RecipeCase(
        file="bridge-misspelled.yaml", source=BRIDGE.format("llama/h100/llama3.py"), ranks=8,
        fault="tensor_model_parallel_sizes",
        expected={"unknown-key": {"model.tensor_model_parallel_sizes": None, "model.tensor_model_parallel_size": 2}},
    ),
)  # fmt: skip
ACCELERATE_CASES = (
    RecipeCase(file="accelerate-fsdp1.yaml", source=HUB.format("fsdp.yaml"), model="llama-3-8b", cluster="dgx-h100:1"),
    RecipeCase(file="accelerate-fsdp2.yaml", source=TRL.format("fsdp2.yaml"), model="llama-3-8b", cluster="dgx-h100:1"),
    RecipeCase(
        file="accelerate-zero3.yaml", source=TRL.format("deepspeed_zero3.yaml"), model="llama-3-8b", cluster="dgx-h100:1"
    ),
    RecipeCase(
        file="accelerate-nd.yaml", source="accelerate 1.15.0, examples/torch_native_parallelism/nd_parallel.py",
        model="llama-3-8b", cluster="dgx-h100:1",
    ),
    RecipeCase(
        file="accelerate-nd-product.yaml", source="nd_parallel.py", fault="2 x 4 x 2 ranks for 8 processes",
        expected={"mesh-product": {MESH.format("dp_shard"): 2}},
    ),
    RecipeCase(
        file="accelerate-nd-replicas.yaml", source="nd_parallel.py", fault="TP with whole replicas",
        expected={"replicas-of-a-mesh": {MESH.format("dp_replicate"): 1, MESH.format("dp_shard"): 4}},
    ),
    RecipeCase(
        file="accelerate-nd-version.yaml", source="nd_parallel.py", fault="a mesh with FSDP1",
        expected={"mesh-needs-fsdp2": {"fsdp_config.fsdp_version": 2}},
    ),
    RecipeCase(
        file="accelerate-fsdp2-reshard.yaml", source=TRL.format("fsdp2.yaml"), fault="FSDP1's word for FSDP2",
        expected={"reshard-word": {"fsdp_config.fsdp_reshard_after_forward": True}},
    ),
    RecipeCase(
        file="accelerate-fsdp2-strategy.yaml", source=TRL.format("fsdp2.yaml"), fault="a sharding strategy for FSDP2",
        expected={"version-1-sharding-strategy": {"fsdp_config.fsdp_sharding_strategy": None}},
    ),
    RecipeCase(
        file="accelerate-unknown.yaml", source=TRL.format("fsdp2.yaml"), fault="an unknown field",
        expected={"unknown-key": {"gradient_accumulation_steps": None}},
    ),
    RecipeCase(
        file="accelerate-zero2-init.yaml", source=TRL.format("deepspeed_zero2.yaml"), fault="settings of stage 3 at stage 2",
        expected={
            "init-flag-stage": {"deepspeed_config.zero3_init_flag": False},
            "offload-param-stage": {"deepspeed_config.offload_param_device": "none"},
        },
    ),
    RecipeCase(
        file="accelerate-file.yaml", source=HUB.format("deepspeed.yaml"), fault="settings beside a DeepSpeed file",
        expected={"settings-beside-a-file": {"deepspeed_config.zero_stage": None, "mixed_precision": None}},
    ),
)  # fmt: skip
DEEPSPEED_CASES = (
    RecipeCase(file="deepspeed-zero2.json", source=DEEP.format("docs/_pages/config-json.md"), ranks=8),
    RecipeCase(file="deepspeed-zero3.json", source="transformers 5.23, docs/source/en/deepspeed.md", ranks=8),
    RecipeCase(
        file="deepspeed-batch.json", source=DEEP.format("docs/_pages/config-json.md"), ranks=8,
        fault="100 samples for 4 x 2 x 8", expected={"batch-product": {"train_batch_size": 64}},
    ),
    RecipeCase(
        file="deepspeed-offload.json", source=DEEP.format("docs/_pages/config-json.md"), ranks=8,
        fault="a typo, and parameters offloaded at stage 2",
        expected={
            "unknown-key": {"gradient_cliping": None, "gradient_clipping": 1.0},
            "offload-param-stage": {"zero_optimization.offload_param": None, "zero_optimization.offload_param.device": None},
        },
    ),
)  # fmt: skip
CASES = (*TITAN_CASES, *MEGATRON_CASES, *BRIDGE_CASES, *ACCELERATE_CASES, *DEEPSPEED_CASES)
