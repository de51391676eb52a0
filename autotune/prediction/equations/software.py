"""What training software does to memory and time: a record, and the profiles of this project's engines."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

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
    fragments: Array = field(default_factory=lambda: np.full(1, 1.0))
    """Memory that the allocator needs to avoid running out, as a multiple of the memory used."""
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
    separate_experts: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if the products of a rank's experts are launched one by one, or operators for each of them; 0: grouped products."""
    once_per_domain: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if a token goes once to each link domain that has experts of it, and from there to their ranks; 0: once to each."""
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
    first_rank: Array = field(default_factory=lambda: np.full(1, 0.0))
    """1 if memory refers to the first pipeline stage; 0: to the fullest."""
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


def with_numbers(software: Software, numbers: Mapping[str, float]) -> Software:
    """The software with other values of some fields, for one case."""
    return dataclasses.replace(software, **{name: np.array([value], dtype=np.float64) for name, value in numbers.items()})


# Python hooks for every saved tensor, and for selective checkpointing a mode that every operator passes: CPU seconds of a deep,
# tiny model on torch 2.11 and 2.13, and two points on an H200 (docs/results/gpu.md).
ENGINE = with_numbers(Software(), {"full_launches": 3.0, "selective_launches": 7.5})
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
    return with_numbers(software, numbers)
