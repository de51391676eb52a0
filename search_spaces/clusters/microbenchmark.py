"""The micro-benchmark of a cluster: the request to its ranks and their measurements, as plain data."""

from dataclasses import dataclass
from enum import StrEnum

from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import ModelSpec
from search_spaces.trial import TrialResult


class Operation(StrEnum):
    """What a row measures, and the contents of its `shape`. The values are stored: never rename one."""

    PRODUCT = "product"
    """rows, inner, outer: the product of (rows, inner) and (inner, outer)."""
    PRODUCT_BACKWARD = "product_backward"
    """rows, inner, outer: both products of its backward."""
    ATTENTION = "attention"
    """samples, tokens, heads, head dimension: fused causal attention."""
    ATTENTION_BACKWARD = "attention_backward"
    LAYER = "layer"
    """samples, tokens, hidden, heads, ffn: forward and backward of one layer of our transformer, gated and rotary."""
    HEAD = "head"
    """samples, tokens, hidden, vocabulary: forward and backward of the output projection and the loss."""
    COPY = "copy"
    """elements of fp32, each read once and written once."""
    UPDATE = "update"
    """elements: gradient norm, clipping and fused AdamW over fp32 states."""
    HOST_UPDATE = "host_update"
    """elements: the same in host memory, if the device is not the host."""
    LAUNCH = "launch"
    """elements: host time to launch one small kernel, in seconds."""
    TO_HOST = "to_host"
    """bytes, from the device to pinned host memory."""
    TO_DEVICE = "to_device"
    FILE_READ = "file_read"
    """bytes of a file, each read once."""
    FILE_UPDATE = "file_update"
    """bytes of a file, each read once and written once, concurrently."""
    ALL_REDUCE = "all_reduce"
    """bytes of the whole message; likewise for all collectives."""
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    """bytes, from one rank to its neighbour."""


COLLECTIVES = (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL, Operation.SEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The ranks that take part together, and their placement on the nodes."""

    ranks: int = 1
    in_node: int = 1
    """Ranks of the group on one node."""
    sharing: int = 1
    """Number of such groups that use a node's network at the same time."""


def ranks_in_domain(group: GroupShape, cluster: ClusterSpec) -> int:
    """Ranks of the group in one link domain: those of its nodes."""
    return min(group.ranks, group.in_node * cluster.nodes_per_link_domain)


def network_sharing(group: GroupShape, cluster: ClusterSpec) -> float:
    """Number of such groups that share a node's network; less than 1: each uses several nodes' networks."""
    return group.sharing * group.in_node / ranks_in_domain(group, cluster)


SINGLE_RANK = GroupShape()
"""Operations that involve no other rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One row: seconds of one run on all ranks at the same time, measured at the slowest rank."""

    operation: Operation
    precision: str
    shape: tuple[int, ...]
    """See `Operation`."""
    group: GroupShape = SINGLE_RANK
    seconds: float
    """Median over the samples."""
    low: float
    """First quartile of the samples."""
    high: float
    """Third quartile of the samples."""
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobenchmarkRequest:
    """What a runner is to measure."""

    attempt: str
    world_size: int
    seconds: float = 20.0
    """Approximate time limit of the measurement; larger shapes and messages are omitted if it is too short."""
    timeout_seconds: float = 300.0
    """Seconds after which every rank is killed."""
    precisions: tuple[str, ...] = ("fp32", "bf16")
    largest_message_bytes: int = 64 * 2**20
    nvme_path: str | None = None
    """Folder whose file system is measured too; None: no file system is measured."""
    quick: bool = False
    """Measure only the few shapes that account for most of a step on CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobenchmarkResult(TrialResult):
    """Result of a micro-benchmark: like a trial, it has an outcome; it has rows if the outcome is OK."""

    rows: tuple[MeasuredRow, ...] = ()
    hosts: tuple[str, ...] = ()
    """The host of each rank."""
    context_bytes: int | None = None
    """CUDA: device memory outside of torch's allocator."""
    workspace_bytes: int | None = None
    """Bytes that the allocator still holds after all measured tensors are freed: library workspaces."""


def layer_model(tokens: int, hidden: int, heads: int, ffn: int, vocabulary: int = 8) -> ModelSpec:
    """The model whose layer or head a row measures."""
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
