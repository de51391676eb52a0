"""`autotune models` and `autotune clusters`: the names of models, machines and devices that other commands take."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from autotune.cli.status import Status, write_document
from autotune.text.console import Console
from search_spaces.clusters.devices import device_preset, link_of
from search_spaces.clusters.presets import cluster_preset_names, cluster_source, resolve_cluster
from search_spaces.errors import SearchSpaceError
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.named import cached_ids, model_names
from search_spaces.preset_files import preset_tables
from search_spaces.quantities import count_text


def models_command(as_json: bool) -> Status:
    """Print the known models and those in the hub's cache."""
    rows = list(_model_rows())
    if as_json:
        write_document({"models": rows})
        return Status.OK
    table = _table("name", "size", "active", "layers", "experts", "tokens")
    for row in rows:
        if "problem" in row:
            continue
        sizes = (row["parameters"], row["active_parameters"] if row["num_experts"] else 0)
        table.add_row(
            row["name"], *(count_text(size) if size else "-" for size in sizes), str(row["num_layers"]),
            str(row["num_experts"] or "-"), f"{row['sequence_length']:,}",
        )  # fmt: skip
    console = Console()
    console.print_table(table, "experts", "active", "layers", "tokens")
    for row in rows:
        if "problem" in row:
            console.print(f"  {row['name']} ({row['source']}) was not read: {row['problem']}", soft_wrap=True)
    console.print(
        "  size: parameters; active: those that a token meets; tokens: most of a sample. Ids of the Hugging Face hub are names "
        "too (meta-llama/Llama-3.1-8B-Instruct); its cache on this machine comes first. --json: whole shapes and sources",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
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
        fields = (
            "devices_per_node", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node",
            "link_domain_size",
        )  # fmt: skip
        document = {
            "clusters": [
                {
                    "name": name, "device": cluster.device.name, **{field: getattr(cluster, field) for field in fields},
                    "source": cluster_source(name),
                }
                for name, cluster in clusters
            ],
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
    machines = _table("machine", "devices", "GiB", "GB/s", "Gbit/s", "host")
    for name, cluster in clusters:
        machines.add_row(
            name, f"{cluster.devices_per_node:>2} x {cluster.device.name}", _gib(cluster.device.memory_bytes),
            f"{cluster.intra_node_bandwidth / 1e9:g}", f"{cluster.inter_node_bandwidth * 8 / 1e9:g}",
            _gib(cluster.host_memory_bytes),
        )  # fmt: skip
    cards = _table("device", "link in a machine", "GiB", "bf16 TFLOP/s")
    for name, device, (link, rate, _) in devices:
        peak = device.peak_flops.get("bf16")
        cards.add_row(name, f"{link}, {rate / 1e9:g} GB/s", _gib(device.memory_bytes), f"{peak / 1e12:g}" if peak else "-")
    console = Console()
    console.print_table(machines, "host", "Gbit/s", "GB/s")
    console.print(
        "  GiB: memory of a device; GB/s: from a device to the others of its machine; Gbit/s: from a machine to others; "
        "host: GiB of main memory. NAME:NODES for several machines. --json: cores and sources\n",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    console.print_table(cards, "GiB", "link in a machine")
    console.print(
        "  machines of a number of them: 8xh100, 4x8xh100 or 8xh100:4 for four; 2x24GB by memory alone",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    return Status.OK


def _table(*columns: str) -> Table:
    """A table of figures beside a name, and beside a text in the second column; a row fits into 80 characters."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        is_text = not index or column in ("devices", "link in a machine")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    return table


def _gib(size: float) -> str:
    return f"{size / 2**30:,.0f}"
