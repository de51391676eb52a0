"""A cluster's own micro-benchmark: what is asked of its ranks and what they measured, as plain data."""

from dataclasses import dataclass
from enum import StrEnum

from search_spaces.models.model import ModelSpec
from search_spaces.trial import TrialResult


class Operation(StrEnum):
    """What a row measures, and what its `shape` holds. The values are stored: never rename one."""

    PRODUCT = "product"
    """rows, inner, outer: the product of (rows, inner) and (inner, outer)."""
    PRODUCT_BACKWARD = "product_backward"
    """rows, inner, outer: both products of its backward."""
    ATTENTION = "attention"
    """samples, tokens, heads, head dimension: fused causal attention."""
    ATTENTION_BACKWARD = "attention_backward"
    LAYER = "layer"
    """samples, tokens, hidden, heads, ffn: forward and backward of a layer of our engines' transformer, gated and rotary."""
    HEAD = "head"
    """samples, tokens, hidden, vocabulary: forward and backward of the output projection and the loss."""
    COPY = "copy"
    """elements of fp32, each read once and written once."""
    UPDATE = "update"
    """elements: gradient norm, clipping and fused AdamW over fp32 states."""
    HOST_UPDATE = "host_update"
    """elements: the same in host memory; where the device is not the host."""
    LAUNCH = "launch"
    """elements: the host's seconds to launch one small kernel."""
    TO_HOST = "to_host"
    """bytes, from the device to pinned host memory."""
    TO_DEVICE = "to_device"
    FILE_READ = "file_read"
    """bytes of a file, each read once."""
    FILE_UPDATE = "file_update"
    """bytes of a file, each read once and written once, both at a time."""
    ALL_REDUCE = "all_reduce"
    """bytes of the whole message; so for all collectives."""
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    """bytes, from one rank to its neighbour."""


COLLECTIVES = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL, Operation.SEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The ranks that take part together, as they lie on the nodes."""

    ranks: int = 1
    in_node: int = 1
    """Those of them that share a node."""
    sharing: int = 1
    """Such groups that use a node's network at the same time."""


ALONE = GroupShape()
"""What needs no other rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row: seconds of one run, every rank of the gang at work at the same time, the slowest counting."""

    operation: Operation
    precision: str
    shape: tuple[int, ...]
    """See `Operation`."""
    group: GroupShape = ALONE
    seconds: float
    """Median over the samples."""
    low: float
    """A quarter of the samples is below."""
    high: float
    """A quarter is above."""
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobenchmarkRequest:
    """What a runner is asked to measure."""

    attempt: str
    world_size: int
    seconds: float = 20.0
    """About what the measurement may take; larger shapes and messages are left out where it does not reach."""
    timeout_seconds: float = 300.0
    """Seconds after which every rank is killed."""
    precisions: tuple[str, ...] = ("fp32", "bf16")
    largest_message_bytes: int = 64 * 2**20
    nvme_path: str | None = None
    """The folder whose file system is measured too; None: none is."""
    quick: bool = False
    """Measure a few shapes that say most of a step on processors, and none beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobenchmarkResult(TrialResult):
    """A micro-benchmark ends as a trial does: with an outcome, and its rows where that is OK."""

    rows: tuple[Measured, ...] = ()
    hosts: tuple[str, ...] = ()
    """The host of each rank."""
    context_bytes: int | None = None
    """CUDA: device memory outside of torch's allocator."""
    workspace_bytes: int | None = None
    """Bytes that the allocator still holds when everything that was measured is gone: workspaces of libraries."""


def layer_model(tokens: int, hidden: int, heads: int, ffn: int, vocabulary: int = 8) -> ModelSpec:
    """The model of which a row measures a layer or the head."""
    return ModelSpec(
        name="microbenchmark",
        family="llama",
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden_size=ffn,
        vocab_size=vocabulary,
        sequence_length=tokens,
    )
