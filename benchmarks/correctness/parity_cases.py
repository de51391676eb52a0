"""A case of the parity matrix: engine, ranks, model and configuration, with its bounds."""

import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common import wheel_project
from benchmarks.correctness import branch_model, user_model
from executor.engines.capabilities import DDP, FSDP2, NATIVE
from search_spaces.capability import SpaceContext
from search_spaces.clusters.cluster import ClusterSpec, DeviceSpec
from search_spaces.communication import INT8
from search_spaces.models.config_keys import RopeKind, RopeScaling
from search_spaces.models.model import CLAMPED, FactoryModel, HeadNorm, Latent, Model, ModelSpec, Norm, NormPlace, Position
from search_spaces.rules.computation import FLOAT8
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

CAPABILITIES = {capability.engine: capability for capability in (NATIVE, DDP, FSDP2)}
FLOAT64_BOUND = 1e-9
"""Absolute bound of losses, gradient norms and weights."""
FLOAT32_LOSS_BOUND = 2.0**-20
"""Relative. Each rounding is off by at most 2^-24; a mean loss near 4 after three updates gathers some of them."""
BF16_LOSS_BOUND = 2.0**-9
"""Relative. bf16 rounds to 8 bits of mantissa, so one rounding is off by at most 2^-9 of the value."""

FP16_LOSS_BOUND = 2.0**-11
"""Relative. fp16 rounds to 11 bits of mantissa."""
INT8_LOSS_BOUND = 2.0**-6
"""Relative. An integer of 8 bits is off by at most 2^-8 of its block's largest number, of which it may be a small part."""
FP8_LOSS_BOUND = 2.0**-6
"""Relative. e4m3 rounds to 4 bits of mantissa, off by at most 2^-4 of a value, of which a product sums many."""
NARROW = ("bf16", "fp16")

FP16_LEAST = 3e-7
"""Relative. As below; fp16 is eight times closer to float64 than bf16."""
BF16_LEAST = 1e-6
"""Relative. A bf16 loss differs from float64 by 1e-5 to 1e-3 here; float32 stays within 2e-7."""

GLOBAL_BATCH, SEQUENCE = 16, 16
TRAINING_STEPS = 10
"""Length of the run that data schedules refer to; three of its steps are trained."""
DOCUMENTS = (16, 9, 5, 3, 2, 7, 1, 12, 4, 11, 6, 8)
"""Tokens of the documents, for cases on documents: packed, they fill some rows completely, and others only partly."""
MOST_LAYERS = 9

# Heads divisible by 8 ranks (gpt2) or 4 (the others); widths that are not divisible, so that shares are padded.
_COMMON = {"hidden_size": 18, "num_attention_heads": 8, "head_dim": 4, "vocab_size": 64, "sequence_length": SEQUENCE}
MODELS: Mapping[str, Mapping[str, object]] = {
    "llama": {"family": "llama", "num_key_value_heads": 4, "ffn_hidden_size": 24},
    "gpt2": {
        "family": "gpt2", "num_key_value_heads": 8, "ffn_hidden_size": 40, "norm": Norm.LAYERNORM, "position": Position.LEARNED,
        "activation": "gelu_tanh", "gated_mlp": False, "qkv_bias": True, "attention_output_bias": True, "mlp_bias": True,
        "tied_embeddings": True,
    },
    "experts": {
        "family": "mixtral", "num_key_value_heads": 4, "ffn_hidden_size": 24, "num_experts": 4, "experts_per_token": 2,
        "sliding_window": 6,
    },
}  # fmt: skip
WIDE = "wide"
"""A llama whose matrices are large enough to be quantised."""
WIDE_SHAPE = {
    **MODELS["llama"], "hidden_size": 66, "head_dim": 8, "ffn_hidden_size": 70, "vocab_size": 64,
}  # fmt: skip
ROUTED = "routed"
"""Experts without an attention window, which packed rows do not support."""
ROUTED_SHAPE = {**MODELS["experts"], "sliding_window": 0}
EXPERTS: Mapping[str, Mapping[str, object]] = {
    "experts": MODELS["experts"],
    "capped": {
        "family": "mixtral", "num_key_value_heads": 4, "ffn_hidden_size": 24, "num_experts": 4, "experts_per_token": 2,
        "capacity_factor": 1.25, "load_balance": 0.5, "norm": Norm.LAYERNORM, "gated_mlp": False, "activation": "gelu",
        "mlp_bias": True,
    },
    "balanced": {
        "family": "mixtral", "num_key_value_heads": 8, "ffn_hidden_size": 24, "num_experts": 8, "experts_per_token": 2,
        "load_balance": 0.5, "mlp_bias": True, "router_bias": True, "shared_expert_size": 16,
    },
}  # fmt: skip
"""Models for expert parallelism: without a capacity limit; with full experts, a balance loss and biases; with shared experts
too."""
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "gemma": {
        "family": "gemma3_text", "num_key_value_heads": 4, "ffn_hidden_size": 24, "norm_place": NormPlace.BOTH,
        "zero_centered_norms": True, "head_norm": HeadNorm.HEAD, "activation": "gelu_tanh", "tied_embeddings": True,
        "attention_scale": 0.4, "attention_softcap": 2.0, "output_softcap": 3.0, "embedding_scale": 4.2, "sliding_window": 6,
        "whole_layers": (False, True), "window_rope_theta": 100.0,
    },
    "olmo": {
        "family": "olmo3", "num_key_value_heads": 4, "ffn_hidden_size": 24, "norm_place": NormPlace.OUTPUT,
        "head_norm": HeadNorm.WIDTH, "sliding_window": 6, "whole_layers": (False, False, True),
        "rope_scaling": RopeScaling(kind=RopeKind.YARN, factor=4.0, original_length=8),
    },
    "granite": {
        "family": "granite", "num_key_value_heads": 8, "ffn_hidden_size": 24, "attention_scale": 0.3, "embedding_scale": 6.0,
        "residual_scale": 0.3, "output_scale": 0.25, "rotated_layers": (True, False),
    },
    "sinks": {
        "family": "gpt_oss", "num_key_value_heads": 4, "ffn_hidden_size": 24, "attention_sinks": True, "num_experts": 4,
        "experts_per_token": 2, "router_bias": True, "mlp_bias": True, "qkv_bias": True, "attention_output_bias": True,
        "activation": CLAMPED, "sliding_window": 6, "whole_layers": (False, True),
    },
    "qwen": {
        "family": "qwen3_moe", "num_key_value_heads": 4, "ffn_hidden_size": 24, "head_norm": HeadNorm.HEAD, "num_experts": 4,
        "experts_per_token": 2, "normalised_routing": False, "load_balance": 0.5,
    },
    "loads": {
        "family": "mixtral", "num_key_value_heads": 4, "ffn_hidden_size": 24, "num_experts": 4, "experts_per_token": 2,
        "expert_loads": ((5.0, 2.0, 4.0, 1.0),),
    },
    "latent": {
        "family": "deepseek_v3", "num_key_value_heads": 8, "head_dim": 8, "ffn_hidden_size": 12, "attention_scale": 0.4,
        "latent": Latent(key_value_rank=5, rotated=4, value_size=6, query_rank=7), "num_experts": 8, "experts_per_token": 3,
        "sigmoid_routing": True, "router_correction": True, "router_groups": 4, "router_groups_kept": 2, "routing_scale": 2.5,
        "shared_expert_size": 12, "dense_layers": (True, False), "dense_ffn_size": 24,
    },
    "latent keys": {
        "family": "deepseek_v2", "num_key_value_heads": 8, "head_dim": 8, "ffn_hidden_size": 12, "num_experts": 4,
        "latent": Latent(key_value_rank=5, rotated=4, value_size=6), "experts_per_token": 2, "normalised_routing": False,
        "router_groups": 2, "shared_expert_size": 8,
    },
    "chunks": {
        "family": "llama4_text", "num_key_value_heads": 4, "ffn_hidden_size": 24, "head_norm": HeadNorm.ROTATED,
        "chunked_attention": True, "sliding_window": 4, "whole_layers": (False, True), "rotated_layers": (True, False),
        "query_temperature": 0.5, "temperature_span": 3, "num_experts": 4, "experts_per_token": 1, "sigmoid_routing": True,
        "normalised_routing": False, "weighted_inputs": True, "shared_expert_size": 24, "dense_layers": (True, False),
        "dense_ffn_size": 32,
    },
    "cut chunks": {
        "family": "llama4_text", "num_key_value_heads": 4, "ffn_hidden_size": 24, "chunked_attention": True,
        "sliding_window": 6, "num_experts": 4, "experts_per_token": 2, "sigmoid_routing": True, "normalised_routing": False,
        "weighted_inputs": True, "rotated_layers": (False, True), "query_temperature": 0.5, "temperature_span": 3,
    },
}  # fmt: skip
"""Models that have what families do besides Llama: norms in other places and of heads, limits and factors of scores, windows
and rotations in some layers, sinks, weights of experts that are shares of all, latent attention, shared experts, dense layers
beside those with experts, sigmoid routing, groups of experts, attention within chunks that ranks divide, factors of queries."""
HUGGING_FACE: Mapping[str, FactoryModel] = {
    f"hf-{name}": FactoryModel(
        reference=f"hf:benchmarks/huggingface/{name}", parameter_count=count, frozen_parameter_count=frozen,
        tensor_divisor=divisor, pipeline_stages=4,
    )
    for name, count, frozen, divisor in (
        ("llama", 45_344, 0, 2), ("opt", 40_448, 0, 0), ("bert", 41_696, 0, 0), ("mixtral", 119_584, 0, 2),
        ("lora", 47_136, 45_344, 0), ("gemma3", 41_568, 0, 2), ("qwen2-vl", 45_600, 0, 2),
    )
}  # fmt: skip
"""Hugging Face's own modules, tiny, from a config.json."""
HUGGING_FACE_BOUND = 1e-5
"""Absolute. Their norms and softmaxes always compute in fp32."""
BRANCH = "branch"
"""A user's module of which some ranks skip a part (`benchmarks.correctness.branch_model`)."""
USER = "user"
"""A user's module with a plan for tensor and pipeline parallelism (`benchmarks.correctness.user_model`)."""
PROJECT = "project"
"""A module of a project with packages of our names (`benchmarks.common.wheel_project`): importable only inside that project."""
USER_PARAMETERS = 64 * 16 + 16 * 16 + 4 * (32 + 272 + 256 + 4 + 272 + 1088 + 1040) + 32
BRANCH_PARAMETERS = 61 * 16 + 3 * 2 * (16 * 16 + 16) + 16 + 16 * 61 + 61


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of the matrix."""

    engine: str
    ranks: int
    model: str
    config: TrialConfig
    clipping: float = 0.05
    documents: bool = False
    """Whether samples are documents of `DOCUMENTS`, packed or padded."""
    refused: bool = False
    """Built although the engine refuses it, to show that the refusal is right."""

    @property
    def integers(self) -> bool:
        """Whether ranks send 8-bit integers."""
        return INT8 in (self.config.reduce_dtype, self.config.gather_dtype)

    @property
    def exact(self) -> bool:
        """Whether everything is computed in float64, so that weights can be compared."""
        return self.config.precision == "fp64" and self.config.reduce_dtype not in NARROW and not self.integers

    @property
    def bound(self) -> float:
        """Largest allowed difference."""
        if self.exact:
            return HUGGING_FACE_BOUND if self.model in HUGGING_FACE else FLOAT64_BOUND
        if self.integers:
            return INT8_LOSS_BOUND
        if self.config.precision == FLOAT8:
            return FP8_LOSS_BOUND
        if "bf16" in (self.config.precision, self.config.reduce_dtype):
            return BF16_LOSS_BOUND
        return FLOAT32_LOSS_BOUND if self.config.precision == "fp32" else FP16_LOSS_BOUND

    @property
    def least(self) -> float:
        """Smallest allowed difference: a bf16 loss equal to float64's shows that bf16 was not used."""
        if self.integers:
            return FLOAT64_BOUND
        if self.config.precision == FLOAT8:
            return BF16_LEAST
        if self.config.precision in NARROW:
            return BF16_LEAST if self.config.precision == "bf16" else FP16_LEAST
        reduced = self.config.reduce_dtype in NARROW and self.config.zero_ranks(self.ranks) > 1
        return FLOAT64_BOUND if reduced and self.config.precision == "fp64" else -1.0

    @property
    def schedule(self) -> str:
        """Schedule and stages a rank; empty without a pipeline."""
        config = self.config
        return f"{config.pipeline_schedule} x{config.virtual_stages}" if config.pipeline_parallel_size > 1 else ""

    @property
    def layout(self) -> str:
        """The parallel dimensions that have more than one rank."""
        config = self.config
        sizes = {
            "tp": config.tensor_parallel_size,
            "cp": config.context_parallel_size,
            "pp": config.pipeline_parallel_size,
            "dp": config.data_parallel_size(self.ranks),
        }
        names = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if config.sequence_parallel:
            names[0] += "+sp"
        if config.expert_parallel_size > 1:
            names.append(f"ep{config.expert_parallel_size}")
        if config.expert_tensor_parallel_size:
            names.append(f"etp{config.expert_tensor_parallel_size}")
        if config.secondary_shard_size:
            names.append(f"near{config.secondary_shard_size}")
        if config.hsdp_shard_size:
            names.append(f"hsdp{config.hsdp_shard_size}")
        return " ".join(names)

    @property
    def checkpointing(self) -> str:
        """The recomputation, as text."""
        every = self.config.checkpoint_every_k
        return f"{self.config.activation_checkpointing}{f', every {every}nd block' if every > 1 else ''}"

    @property
    def offload(self) -> str:
        """The offloaded states, as text; empty: none."""
        config = self.config
        where = {"none": "", "cpu": "", "nvme": " in files"}
        optimizer = f"{config.offload_ratio:g} of the optimizer state{where[config.offload_optimizer]}"
        parts = (
            optimizer if config.offload_optimizer != "none" else "",
            f"parameters{where[config.offload_param]}" if config.offload_param != "none" else "",
        )
        return " and ".join(filter(None, parts))

    def label(self) -> str:
        """Text that identifies the case."""
        knobs = " ".join(f"{name}={value}" for name, value in self.config.differences(TrialConfig()).items())
        model = f"{self.model} on documents" if self.documents else self.model
        return f"{self.engine}, {self.ranks} ranks, {model}, clipping {self.clipping}: {knobs}"

    def model_of(self) -> Model:
        return make_model(self.model, _layers(self.config))

    def workload(self) -> Workload:
        return _workload(self.clipping, self.documents)

    def context(self) -> SpaceContext:
        return _context(self.engine, self.ranks, self.model, _layers(self.config), self.documents)


def make_model(name: str, layers: int) -> Model:
    """A model of the matrix."""
    if name in HUGGING_FACE:
        return HUGGING_FACE[name]
    if name == BRANCH:
        return FactoryModel(reference=branch_model.REFERENCE, parameter_count=BRANCH_PARAMETERS, pipeline_stages=3)
    if name == PROJECT:
        return FactoryModel(reference=wheel_project.REFERENCE, parameter_count=wheel_project.PARAMETERS)
    if name == USER:
        return FactoryModel(
            reference=user_model.REFERENCE, parameter_count=USER_PARAMETERS, frozen_parameter_count=user_model.WIDTH,
            tensor_divisor=user_model.HEADS, pipeline_stages=user_model.BLOCKS,
        )  # fmt: skip
    shape = WIDE_SHAPE if name == WIDE else {**MODELS, **EXPERTS, **FAMILIES, ROUTED: ROUTED_SHAPE}[name]
    return ModelSpec(name=name, num_layers=layers, **{**_COMMON, **shape})  # type: ignore[arg-type]


def _layers(config: TrialConfig) -> int:
    """One layer more than stages, so that the stages are uneven."""
    stages = config.pipeline_parallel_size * config.virtual_stages
    return min(max(3, stages + 1), MOST_LAYERS)


@functools.cache
def _workload(clipping: float, documents: bool) -> Workload:
    return Workload(
        global_batch_size=GLOBAL_BATCH, sequence_length=SEQUENCE, learning_rate=1e-2, gradient_clipping=clipping,
        nvme_path=tempfile.gettempdir(), training_steps=TRAINING_STEPS, document_lengths=DOCUMENTS if documents else (),
    )  # fmt: skip


@functools.cache
def _context(engine: str, ranks: int, model: str, layers: int, documents: bool) -> SpaceContext:
    device = DeviceSpec(name="cpu", kind="cpu", memory_bytes=2**30, peak_flops={"fp64": 1e9, "fp32": 1e9, "bf16": 1e9})
    cluster = ClusterSpec(
        name="local", nodes=1, devices_per_node=ranks, device=device, intra_node_bandwidth=1e9, inter_node_bandwidth=1e9,
        host_memory_bytes=2**34, cores_per_node=ranks,
    )  # fmt: skip
    return SpaceContext(
        model=make_model(model, layers), cluster=cluster, workload=_workload(0.0, documents), world_size=ranks,
        capability=CAPABILITIES[engine],
    )  # fmt: skip
