"""Model, cluster and batch of a group of a table, for procedures that compute with them."""

from collections.abc import Sequence

from autotune.knowledge.row import TableRow
from autotune.knowledge.row_names import row_hardware
from search_spaces.capability import SpaceContext
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload

_SHARED = (
    "num_layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn_hidden",
    "vocab",
    "seq_len",
    "num_gpus",
    "gpu_type",
    "global_batch",
)
_VOCABULARY = 50_000
"""Default if a table names none."""
_HOST_MEMORY_BYTES = 2**40
_CORES = 64


def table_context(rows: Sequence[TableRow]) -> SpaceContext | None:
    """The context common to all rows; None: they differ in it, or a required cell is blank."""
    first = rows[0]
    if any(getattr(row, name) != getattr(first, name) for row in rows for name in _SHARED):
        return None
    if not (first.num_layers and first.hidden and first.heads and first.seq_len and first.num_gpus and first.global_batch):
        return None
    cluster = _cluster(first, first.num_gpus)
    if cluster is None or first.hidden % first.heads:
        return None
    try:
        model = ModelSpec(
            name=first.model_name or "table", family="llama", num_layers=first.num_layers, hidden_size=first.hidden,
            num_attention_heads=first.heads, num_key_value_heads=first.kv_heads or first.heads,
            head_dim=first.hidden // first.heads, ffn_hidden_size=first.ffn_hidden or 4 * first.hidden,
            vocab_size=first.vocab or _VOCABULARY, sequence_length=first.seq_len,
        )  # fmt: skip
    except SearchSpaceError:
        return None
    workload = Workload(global_batch_size=first.global_batch, sequence_length=first.seq_len)
    return SpaceContext(model=model, cluster=cluster, workload=workload, world_size=first.num_gpus)


def _cluster(row: TableRow, world: int) -> ClusterSpec | None:
    hardware = row_hardware(row.gpu_type or "", row.gpus_per_node, world, row.intra_bw, row.inter_bw)
    if hardware is None:
        return None
    per_node = min(hardware.devices_per_node, world)
    return ClusterSpec(
        name="table", nodes=max(world // per_node, 1), devices_per_node=per_node, device=hardware.device,
        intra_node_bandwidth=hardware.intra, inter_node_bandwidth=hardware.inter, host_memory_bytes=_HOST_MEMORY_BYTES,
        cores_per_node=_CORES,
    )  # fmt: skip
