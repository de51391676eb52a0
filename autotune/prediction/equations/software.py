"""What training software does to memory and time: a record, and the profiles of this project's engines."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Memory and compute behaviour of the training software, according to its source code. Arrays over cases; defaults: a stack
    in mixed precision with fused attention."""

    gradient_bytes: Array = field(default_factory=lambda: np.full(1, 2.0))
    """Bytes per gradient element held: 2 in the model's type, 4 if micro-batches are summed in fp32."""
    holds_gradients: Array = field(default_factory=lambda: np.full(1, 1.0))
    """1 if gradients have permanent buffers; 0: they are allocated as activations are freed, except for accumulation."""
    buckets: Array = field(default_factory=lambda: np.full(1, 1.0))
    """Reduce buckets that exist at once."""
    waits_for_bucket: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if a reduction begins when a bucket of `Layouts.reduce_bucket_size` is ready, so that the last one is never hidden; 0:
    in pieces of unknown size."""
    reduces_last: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if, with sharded states, gradients are reduced after the last backward, so that nothing hides it."""
    sends_matrices: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if, with sharded states, each matrix is reduced and gathered in a message of its own; 0: buckets are."""
    blocks_sends: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if the host waits for every message between pipeline stages, so that tensor ranks resume at different times."""
    sends_shapes: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if the host also waits for a message with the shape before every one of them."""
    state_bytes: Array = field(default_factory=lambda: np.full(1, 12.0))
    """Bytes of optimizer state per parameter: 12 for fp32 master and two moments."""
    kept_logit_bytes: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Bytes per logit that outlive a micro-batch, if there are several."""
    fragments: Array = field(default_factory=lambda: np.full(1, 1.01))
    """Memory that the allocator needs to avoid running out, as a multiple of the memory used: partly used segments cannot be
    released. Of ten messages of torch on full devices half report more than 1 % of the device in them, half less."""
    scores: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Bytes kept per element of the attention matrix; 0: the kernel does not keep it."""
    rms_extra: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Bytes kept per element beyond the inputs of an RMSNorm that is not a single kernel."""
    keeps_products: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if selective checkpointing keeps the result of every product and recomputes only what lies between them."""
    full_launches: Array = field(default_factory=lambda: np.full(1, 1.0))
    """What full checkpointing adds to the host's time of a layer, in launches of its forward."""
    selective_launches: Array = field(default_factory=lambda: np.full(1, 0.0))
    """What selective checkpointing adds to it."""
    host_work: Array = field(default_factory=lambda: np.full(1, 1.0))
    """Host's time of a layer without experts, as a multiple of that of a plain module of torch."""
    head_work: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Host's time of the output projection and the loss, as a share of a layer's."""
    stage_work: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Host's time of a stage of a pipeline for each micro-batch, besides its layers: schedule, messages and their waits."""
    untuned: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if its runs are not known to be those of people who tuned it: their times differ more. 0.5 of our engines."""
    separate_experts: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if the products of a rank's experts are launched one by one, or operators for each of them; 0: grouped products."""
    bias_bytes: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Bytes that adding the biases of experts to their results moves in forward and backward, per element."""
    pads_experts: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if the rows of each expert are copied to a number that products in 8 bits can have, and back."""
    expert_work: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Host's time of a layer's router and dispatcher, as a share of its other time."""
    captured: Array = field(default_factory=lambda: np.full(1, 0.0))
    """What CUDA graphs replay, so that the host does not launch it: 1 for layers without their experts, 2 for an iteration."""
    whole_experts: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if ranks that divide experts have whole ones where it is not stated; 0: tensor ranks divide each, if they can."""
    once_per_domain: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if a token goes once to each link domain that has experts of it, and from there to their ranks; 0: once to each."""
    exchange_hidden: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Share of the exchange of experts' rows that the computation of another micro-batch hides."""
    input_share: Array = field(default_factory=lambda: np.full(1, 1.0))
    """Bytes kept of the inputs of products, as a share of the compute type."""
    gated_bytes: Array = field(default_factory=lambda: np.full(1, 8.0))
    """Bytes kept per element of the hidden layer of a gated MLP."""
    plain_bytes: Array = field(default_factory=lambda: np.full(1, 4.0))
    """The same of an MLP without a gate."""
    frozen_outputs: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if outputs of frozen matrices are kept because a trained factor scales them."""
    quantised_extra: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Bytes per frozen parameter beyond its bits and their scales."""
    gathers_whole: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if frozen parameters are at some time unsharded on every rank, independent of the stage."""
    unpacks: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if quantised matrices are dequantised to the precision for each product, by operators of torch."""
    logit_bytes: Array = field(default_factory=lambda: np.full(1, 10.0))
    """Bytes per logit at the peak."""
    loss_bytes: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Bytes per logit that the loss moves in forward and backward; 0: as many passes over `logit_bytes` as products take."""
    summed_bytes: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Bytes per parameter that adding a micro-batch's gradients to the sum moves, by a kernel of its own."""
    fused_moments: Array = field(default_factory=lambda: np.full(1, 1.0))
    """1 if one kernel for each parameter updates its 8-bit moments; 0: operators of torch do, in pieces."""
    whole_logits: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if tensor parallelism does not divide the logits."""
    keeps_gathered: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if sequence parallelism keeps its gathered inputs for backward, 0 if it gathers them again; 2: 1 without pipelines."""
    scatters: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if tensor-parallel ranks each send a part over a pipeline's boundary and gather it there."""
    tensor_hidden: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Share of tensor-parallel communication hidden by the products."""
    attention_speed: Array = field(default_factory=lambda: np.full(1, 1.0))
    """Speed of the attention kernel as a multiple of the standard kernel's."""
    elementwise: Array = field(default_factory=lambda: np.full(1, 1.5))
    """Traffic of norms, residuals and activations as a multiple of that of fused kernels."""
    first_heavy: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if stages with an additional layer come first; 0: last."""
    measured_rank: Array = field(default_factory=lambda: np.full(1, 0.0))
    """The pipeline stage that memory refers to: index in `MEASURED_RANKS`."""
    reduce_bytes: Array = field(default_factory=lambda: np.full(1, 0.0))
    """Bytes sent per gradient element, where the configuration does not state them; 0: as many as are held."""
    reduce_bucket: Array = field(default_factory=lambda: np.full(1, 2e8))
    """Elements of a bucket of gradients, where the configuration does not state them."""
    balanced: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if stages are equal in FLOPs, where the configuration does not state it."""
    sequence_parallel: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if tensor-parallel ranks divide the sequence, where the configuration does not state it."""
    dropout: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if masks of dropout are kept."""
    adapts: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if recomputation and sharding are set as memory requires, where the configuration does not state them."""


MEASURED_RANKS = ("fullest", "first", "last")


def _scalar(value: float) -> Array:
    return np.array([value], dtype=np.float64)


MIB = 2.0**20


def _argument(*words: str, default: float = 0.0) -> Any:
    return field(default_factory=lambda: _scalar(default), metadata={"words": words})


EXCHANGE_HIDDEN = 0.44
"""`Software.exchange_hidden` with Megatron-Core's `overlap_moe_expert_parallel_comm`: it saves 3.64 of 8.25 s of exchange in a
step of 24.7 s, as both use the same multiprocessors [Megatron-Bridge (Apache-2.0), nemo-mbridge-perf-expert-parallel-overlap:
Qwen3 30B on 16 H100, a pair of runs and a profile]."""
MEGATRON_EXPERT_WORK = 0.7
"""`Software.expert_work` of Megatron-LM [its functional tests]."""
MEGATRON_HOST_WORK = 1.85
"""`Software.host_work` of Megatron-LM, as of nanotron: both take the host 4 ms or more of a layer, forward and backward,
however narrow it is. Deterministic tests take up to 6 ms."""
FLAG = ("false", "true")
RECOMPUTED_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""`recompute_modules` is encoded as the sum of 2 to the power of their indices here."""
FLASH, UNFUSED, NATIVE_LOSS, ENGINE_LOSS, ALL_GATHER, FLEX, BLOCK = 0.0, 2.0, 1.0, 2.0, 0.0, 2.0, 1.0
"""Indices of choices of `Megatron`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """Arguments of Megatron-LM beyond a model's shape and a layout, which decide what it keeps. Arrays over cases; flags are 0
    or 1, choices indices of the words of their field; defaults are Megatron-LM's."""

    states: Array = _argument(*FLAG)
    """Whether the case is one of Megatron-LM whose arguments are stated: only then the equations apply."""
    transformer_impl: Array = _argument("transformer_engine", "local")
    attention_backend: Array = _argument("flash", "fused", "unfused", "local")
    """`auto` is the one that Transformer Engine chooses on the device (`megatron_of`)."""
    deterministic: Array = _argument(*FLAG)
    attention_dropout: Array = _argument(default=0.1)
    hidden_dropout: Array = _argument(default=0.1)
    create_attention_mask: Array = _argument(*FLAG, default=1.0)
    """Whether the loader makes a mask of a byte for each pair of tokens, which Transformer Engine does not read."""
    bias_linear: Array = _argument(*FLAG, default=1.0)
    qk_layernorm: Array = _argument(*FLAG)
    bias_gelu_fusion: Array = _argument(*FLAG, default=1.0)
    """Whether the activation of an MLP is one kernel."""
    persist_layer_norm: Array = _argument(*FLAG, default=1.0)
    """Without it and without Transformer Engine Apex is missing, which has the fused softmax too."""
    gradient_accumulation_fusion: Array = _argument(*FLAG, default=1.0)
    cross_entropy_fusion: Array = _argument("none", "native", "te")
    defer_embedding_wgrad: Array = _argument(*FLAG)
    """Whether gradients of the output projection are computed after the last micro-batch."""
    wgrad_deferral_limit: Array = _argument(default=2.0)
    """Micro-batches that wait for it; 0: all. Two in all of NVIDIA's tests, though Megatron-LM's default is 0."""
    dist_optimizer_instances: Array = _argument(default=1.0)
    dispatcher: Array = _argument("allgather", "alltoall", "flex")
    moe_comm_overlap: Array = _argument(*FLAG)
    """Whether tokens travel to experts and back behind the computation of another micro-batch."""
    grouped_gemm: Array = _argument(*FLAG)
    permute_fusion: Array = _argument(*FLAG)
    recompute_modules: Array = field(default_factory=lambda: _scalar(0.0), metadata={"parts": RECOMPUTED_MODULES})
    """What selective recomputation recomputes; 0: `core_attn`."""
    recompute_method: Array = _argument("uniform", "block")
    recompute_num_layers: Array = _argument(default=1.0)
    """Layers of each recomputed unit, or of a stage that are recomputed (`block`)."""
    activation_offload: Array = _argument(*FLAG)
    """Whether the inputs of all modules that can be offloaded are, but those of the last layer."""
    fp8_param_gather: Array = _argument(*FLAG)
    """Whether matrices exist in fp8 only, besides the optimizer's copy."""
    fp8_recipe: Array = _argument("none", "tensorwise", "delayed", "blockwise", "mxfp8")
    stream_workspace: Array = _argument(default=32 * MIB)
    """Bytes that cuBLAS has for each stream and thread: `CUBLAS_WORKSPACE_CONFIG`, else torch's default for the device."""
    engine_workspace: Array = _argument(default=32 * MIB)
    """Bytes that Transformer Engine has for its products: 32 MiB since Hopper, 4 MiB before."""
    rank_layers: Array = field(default_factory=lambda: np.full((1, 2, 2), np.nan))
    """(n, 2, 2) All layers, and those with experts, of the first and of the last pipeline rank; NaN: as divided evenly."""
    kept_layers: Array = field(default_factory=lambda: np.full((1, 2, 2), np.nan))
    """(n, 2, 2) The same of layers whose activations the rank keeps at its peak, of all micro-batches in flight."""


def megatron_of(words: Mapping[str, str], device: str) -> Megatron:
    """The arguments that `words` state, by the names of the record's fields; others have Megatron-LM's defaults.

    Args:
        words: field -> its number, `true` or `false`, or one of its choices.
        device: family of the device, such as h100.
    """
    recent = not device.startswith(("v100", "a100", "a800", "a40", "a10"))
    # Transformer Engine takes cuDNN's kernel since Hopper (deterministic: on Hopper only), else flash-attn's.
    fused = device.startswith(("h", "gh")) or (recent and words.get("deterministic", "").lower() != "true")
    stated = {name: word for name, word in words.items() if word not in ("", "auto")}
    chosen = {"attention_backend": "fused" if fused else "flash", **stated}
    if words.get("transformer_impl") == "local":
        chosen["attention_backend"] = "local"
    pools = re.findall(r":(\d+):(\d+)", words.get("cublas_workspace", ""))  # KiB of each chunk, and chunks
    workspace = sum(int(size) * int(chunks) for size, chunks in pools) * 1024
    values = {
        "states": _scalar(1.0),
        "stream_workspace": _scalar(workspace or (32 if recent else 8.125) * MIB),
        "engine_workspace": _scalar((32 if recent else 4) * MIB),
    }
    return Megatron(**{**_arguments(Megatron, chosen), **values})


def _arguments(record: type[Any], words: Mapping[str, str]) -> dict[str, Array]:
    """The fields of a record that `words` state, as numbers."""
    values = {}
    for item in fields(record):
        word, choices = words.get(item.name, "").lower(), item.metadata.get("words", ())
        index = next((float(number) for number, choice in enumerate(choices) if word.startswith(choice)), None)
        if parts := item.metadata.get("parts"):
            index = float(sum(2 ** parts.index(name) for name in set(word.split()) if name in parts)) if word else None
        elif not choices and re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", word):
            index = float(word)
        if index is not None:
            values[item.name] = _scalar(index)
    return values


ADAPTED = ("query", "key", "value", "output", "gate", "up", "down")
"""`Transformers.adapted` is encoded as the sum of 2 to the power of their indices here."""
EAGER, WHOLE_LOSS, KERNEL_LOSS, PROJECTION_LOSS, HALF_LOSS = 0.0, 0.0, 1.0, 2.0, 3.0
CHUNKED_LOSS, CUT_LOSS, SPLIT_LOSS, COMPILED_LOSS = 4.0, 5.0, 6.0, 7.0
TORCH_MOMENTS, BNB32, BNB8, AO8, AO4, COPY = 0.0, 1.0, 2.0, 3.0, 4.0, 1.0
NO_BITS, NF4, GPTQ, INT8, FSDP1, FSDP2, ZERO, EAGER_ATTENTION = 0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 2.0
"""Indices of choices of `Transformers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformers:
    """What a program on Transformers, PEFT, TRL, Accelerate and bitsandbytes uses, beyond a model's shape and a layout, which
    decides what it keeps. Arrays over cases; flags are 0 or 1, choices indices of the words of their field."""

    states: Array = _argument(*FLAG)
    """Whether the case is one of these libraries: only then the equations apply."""
    release: Array = _argument(default=457.0)
    """Of Transformers: 100 times the major version and the minor one."""
    autocast: Array = _argument(*FLAG, default=1.0)
    """Whether products are cast to 16 bits (`bf16` or `fp16` of the Trainer)."""
    parameter_width: Array = _argument(default=2.0)
    """Bytes of a trained parameter and of each of its moments and gradients, of parameters that are no adapters."""
    adapter_width: Array = _argument(default=4.0)
    """The same of adapters: PEFT casts them to fp32 unless `autocast_adapter_dtype` is off."""
    adapter_dropout: Array = _argument(*FLAG)
    adapted: Array = field(default_factory=lambda: _scalar(15.0), metadata={"parts": ADAPTED})
    """The matrices with adapters: sum of `ADAPTED`."""
    fused_adapters: Array = _argument(*FLAG)
    """Whether products and their adapters are one function, which keeps inputs in 16 bits (unsloth's)."""
    trained_tables: Array = _argument(*FLAG)
    """Whether embedding and output projection are trained beside adapters: PEFT keeps the frozen ones, too."""
    whole_norms: Array = _argument(*FLAG)
    """Whether norms of a quantised model are in fp32, so that what passes between layers is, too."""
    whole_tables: Array = _argument(*FLAG)
    """Whether frozen tables of a quantised model are in fp32."""
    packed_head: Array = _argument(*FLAG)
    """Whether the output projection of a quantised model is quantised, too (Fabric)."""
    norms: Array = _argument("eager", "fused")
    gates: Array = _argument("eager", "fused")
    """The activation of a gated MLP."""
    loss: Array = _argument("whole", "kernel", "projection", "half", "chunked", "cut", "split", "compiled")
    """All logits in fp32; those, but in a kernel that overwrites them with their gradient; pieces of logits (Liger); logits as
    they are, in models with code of their own; pieces that backward computes again (TRL 1); none (cut cross-entropy); all
    logits in fp32, whose loss is computed piece by piece (LitGPT); the same compiled, which keeps 16 bits (torchtune)."""
    keeps_logits: Array = _argument(*FLAG)
    """Whether the caller holds the model's outputs until backward has ended, as loops of one's own do and the Trainer not."""
    attention: Array = _argument("flash", "sdpa", "eager")
    repeats_keys: Array = _argument(*FLAG)
    """Whether keys and values are repeated for each query head: of Mistral and Mixtral before release 4.48."""
    reentrant: Array = _argument(*FLAG, default=1.0)
    """Whether checkpoints are the reentrant ones, the Trainer's default."""
    bits: Array = _argument("none", "nf4", "gptq", "int8")
    """Format of a frozen matrix."""
    double_quantised: Array = _argument(*FLAG)
    group_size: Array = _argument(default=128.0)
    """Rows that share a scale of GPTQ."""
    torch_unpacking: Array = _argument(*FLAG)
    """Whether operators of torch dequantise matrices, and keep them for backward: AutoGPTQ without Triton and ExLlama."""
    update: Array = _argument("foreach", "fused", "loop")
    """Implementation of the optimizer: the first makes a temporary copy of a moment of all parameters."""
    moments: Array = _argument("torch", "bnb32", "bnb8", "ao8", "ao4")
    """Whose moments: torch's have the type of their parameter, bitsandbytes' 32 bits or 8, torchao's 8 bits or 4."""
    paged: Array = _argument(*FLAG)
    """Whether moments of at least 100,000 elements are in pages that move to the host (bitsandbytes' paged optimizers)."""
    updates_in_backward: Array = _argument(*FLAG)
    """Whether each parameter is updated as soon as its gradient exists, which is then freed (torchtune)."""
    reference: Array = _argument("none", "copy", "adapter")
    """The reference model of preference training: none, or precomputed; a second copy in 16 bits; the model without its
    adapter."""
    sequences: Array = _argument(default=1.0)
    """Sequences of each sample of a micro-batch: 2 of DPO, whose samples are pairs."""
    tower: Array = _argument()
    """Parameters of frozen modules beside the model, in 16 bits, such as a vision tower that is not trained."""
    sharding: Array = _argument("none", "fsdp1", "fsdp2", "zero")
    mixed_units: Array = _argument(*FLAG)
    """Whether FSDP1's units have frozen parameters beside trained ones: their flat parameter has gradients of all of them.
    LitGPT wraps whole blocks; PEFT's policy wraps adapters apart."""
    loading: Array = _argument("shards", "whole")
    """Whether a rank has the whole model on its device while it loads, beside its share, or only what it divides next:
    Fabric, torchtune and Accelerate load unit by unit, and DeepSpeed under `zero.Init`."""
    varying_lengths: Array = _argument(*FLAG)
    """Whether micro-batches have as many tokens as their longest sample, neither packed nor padded to the full length."""
    stream_workspace: Array = _argument(default=32 * MIB)
    """Bytes that cuBLAS has for each stream and thread."""


def unknown_words(words: Mapping[str, str]) -> str | None:
    """What of `words` no field of `Transformers` has, and what it may be; None: all is known."""
    known = {item.name: item for item in fields(Transformers) if item.metadata and item.name != "states"}
    for name, word in words.items():
        if name not in known:
            return f"{name!r} is not known; use some of {', '.join(known)}"
        choices, parts = (known[name].metadata.get(kind, ()) for kind in ("words", "parts"))
        if parts and not set(word.split()) <= {*parts}:
            return f"{name}={word} is not known; use some of {' '.join(parts)}"
        if choices and word.lower() not in choices:
            return f"{name}={word} is not known; use one of {', '.join(choices)}"
        if not parts and not choices and not re.fullmatch(r"\d+(\.\d+)?(e\d+)?", word):
            return f"{name}={word} is not a number; give one"
    return None


def transformers_of(words: Mapping[str, str], device: str) -> Transformers:
    """As `words` state, by the names of the record's fields; `release`: such as 4.48.1.

    Args:
        words: field -> its number, `true` or `false`, or one of its choices, or several of its parts.
        device: family of the device, such as h100.
    """
    major, minor = (int(part) for part in f"{words.get('release') or '4.57'}.0".split(".")[:2])
    recent = not device.startswith(("v100", "a100", "a800", "a40", "a10"))
    values = {
        "states": _scalar(1.0), "release": _scalar(100 * major + minor),
        "stream_workspace": _scalar((32 if recent else 8.125) * MIB),
    }  # fmt: skip
    return Transformers(**{**_arguments(Transformers, words), **values})


def with_numbers(software: Software, numbers: Mapping[str, float]) -> Software:
    """The software with other values of some fields, for one case."""
    return dataclasses.replace(software, **{name: np.array([value], dtype=np.float64) for name, value in numbers.items()})


# Python hooks for every saved tensor, and for selective checkpointing a mode that every operator passes: CPU seconds of a deep,
# tiny model on torch 2.11 and 2.13, and two points on an H200 (docs/results/gpu.md).
ENGINE = with_numbers(Software(), {"full_launches": 3.0, "selective_launches": 7.5, "untuned": 0.5})
"""Any engine of this project."""
# fp32 gradients at rest, eager norms and rotary embeddings.
NATIVE = with_numbers(
    ENGINE,
    {
        "gradient_bytes": 4.0, "holds_gradients": 0.0, "buckets": 3.0, "waits_for_bucket": 1.0, "rms_extra": 8.0,
        "keeps_products": 1.0, "logit_bytes": 12.0, "elementwise": 3.0, "unpacks": 1.0, "balanced": 1.0,
    },
)  # fmt: skip
NATIVE_FRAMEWORK_CHECKPOINTING = "native-framework-checkpointing"
"""The native engine with the selective checkpointing of other frameworks, which keeps less."""
PROFILES: Mapping[str, Software] = {
    "native": NATIVE,
    NATIVE_FRAMEWORK_CHECKPOINTING: with_numbers(
        NATIVE, {"keeps_products": 0.0, "full_launches": 1.0, "selective_launches": 0.0}
    ),
}
"""Name -> profile; other engines have `ENGINE`."""


def software_of(profile: str, device_kind: str, score_bytes: float = 0.0) -> Software:
    """The software of an engine, or of another name of `PROFILES`.

    Args:
        profile: the name.
        device_kind: cpu or cuda.
        score_bytes: kept by the attention kernel per element of its matrix; if any, nothing between products is fused.
    """
    software = PROFILES.get(profile, ENGINE)
    numbers: dict[str, float] = {}
    if score_bytes:
        unfused = max(float(software.elementwise[0]), 2.5)
        numbers |= {"scores": score_bytes, "elementwise": unfused}
    if device_kind == "cuda":  # RMSNorm is one kernel; measured on an H200 with torch 2.11, docs/results/gpu.md
        numbers["rms_extra"] = 0.0
    if device_kind == "cpu":  # the kernel is Triton's, which comes with torch for CUDA
        numbers["fused_moments"] = 0.0
    return with_numbers(software, numbers)
