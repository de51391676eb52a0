"""`autotune models` and `autotune clusters`: the names of models, machines and devices that other commands take."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from autotune.cli.status import Status, write_document
from autotune.text.console import Console
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.devices import device_preset, link_of
from search_spaces.clusters.presets import cluster_preset_names, cluster_source, resolve_cluster
from search_spaces.errors import SearchSpaceError
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.named import cached_ids, model_names
from search_spaces.preset_files import preset_tables


def models_command(as_json: bool) -> Status:
    """Print the known models and those in the hub's cache."""
    rows = list(_model_rows())
    if as_json:
        write_document({"models": rows})
        return Status.OK
    table = _table("name", "parameters", "active", "layers", "hidden", "heads", "experts", "vocabulary", "tokens", "source")
    for row in rows:
        if "problem" in row:
            table.add_row(row["name"], *[""] * 8, f"{row['source']}, not read: {row['problem']}")
            continue
        heads = f"{row['num_attention_heads']}/{row['num_key_value_heads']}"
        table.add_row(
            row["name"], f"{row['parameters'] / 1e9:.3g} B", f"{row['active_parameters'] / 1e9:.3g} B", str(row["num_layers"]),
            str(row["hidden_size"]), heads, str(row["num_experts"] or "-"), f"{row['vocab_size']:,}",
            f"{row['sequence_length']:,}", row["source"],
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(
        "  also by ids of the Hugging Face hub: meta-llama/Llama-3.1-8B-Instruct; its cache on this machine comes first"
    )
    return Status.OK


def _model_rows() -> Iterator[dict[str, Any]]:
    fields = ("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts", "vocab_size")
    sources = [(name, "preset" if name in preset_tables("models") else "known name") for name in model_names()]
    for name, source in [*sources, *((name, "hub's cache") for name in cached_ids())]:
        try:
            model = resolve_model(name)
        except SearchSpaceError as error:
            yield {"name": name, "source": source, "problem": str(error)}
            continue
        yield {
            "name": name, "source": source, "family": model.family, "parameters": model.parameter_count,
            "active_parameters": model.active_parameter_count, "sequence_length": model.sequence_length,
            **{field: getattr(model, field) for field in fields},
        }  # fmt: skip


def clusters_command(as_json: bool) -> Status:
    """Print the known machines and devices."""
    clusters = [(name, resolve_cluster(name)) for name in cluster_preset_names()]
    devices = [(name, device_preset(name), link_of(name)) for name in preset_tables("devices")]
    if as_json:
        document = {
            "clusters": [_cluster_row(name, cluster) for name, cluster in clusters],
            "devices": [
                {
                    "name": name, "memory_bytes": device.memory_bytes, "peak_flops": device.peak_flops, "link": link,
                    "intra_node_bandwidth": rate, "source": device.source,
                }
                for name, device, (link, rate, _) in devices
            ],
        }  # fmt: skip
        write_document(document)
        return Status.OK
    machines = _table("machine", "devices", "memory each", "link GB/s", "network Gbit/s", "main memory", "source")
    for name, cluster in clusters:
        machines.add_row(
            name, f"{cluster.devices_per_node} x {cluster.device.name}", _gib(cluster.device.memory_bytes),
            f"{cluster.intra_node_bandwidth / 1e9:g}", f"{cluster.inter_node_bandwidth * 8 / 1e9:g}",
            _gib(cluster.host_memory_bytes), cluster_source(name),
        )  # fmt: skip
    cards = _table("device", "memory", "bf16 TFLOP/s", "link in a machine", "source")
    for name, device, (link, rate, _) in devices:
        peak = device.peak_flops.get("bf16")
        cards.add_row(
            name, _gib(device.memory_bytes), f"{peak / 1e12:g}" if peak else "-", f"{link}, {rate / 1e9:g} GB/s", device.source
        )
    console = Console()
    console.print(machines)
    console.print("  NAME:NODES for several of them\n")
    console.print(cards)
    console.print("  machines of a number of them: 8xh100, 4x8xh100 or 8xh100:4 for four; 2x24GB by memory alone")
    return Status.OK


def _cluster_row(name: str, cluster: ClusterSpec) -> dict[str, Any]:
    fields = ("devices_per_node", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node")
    figures = {field: getattr(cluster, field) for field in (*fields, "link_domain_size")}
    return {"name": name, "device": cluster.device.name, **figures, "source": cluster_source(name)}


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(
            column, overflow="fold", no_wrap=not index, justify="left" if index in (0, len(columns) - 1) else "right"
        )
    return table


def _gib(size: float) -> str:
    return f"{size / 2**30:,.0f} GiB"
