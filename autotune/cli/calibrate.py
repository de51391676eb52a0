"""`autotune calibrate`: measure the cluster, or reuse a measurement, and show the resulting prediction coefficients."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.measure import Measurement
from rich.table import Table

from autotune.cli.status import Status, write_document
from autotune.prediction.equations.coefficients import Coefficients, shipped_rates
from autotune.prediction.fitting.calibration import default_precision, link_volume, predicted_rows
from autotune.prediction.planning.calibrated import Calibrated, calibrated, processor
from autotune.ray_cluster import with_address
from autotune.session.calibrate import Calibration, CalibrationRequest, measure_cluster, prepare_calibration
from autotune.text.console import Console
from autotune.text.rows import bytes_text
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import COLLECTIVES, GroupShape, MeasuredRow, Operation, ranks_in_domain
from search_spaces.plain import to_plain
from storage.address import default_database_url
from storage.store import open_store


def calibrate_command(database: str | None, as_json: bool, **fields: Any) -> Status:
    """Reuse or measure, then print. All checks come before anything is started.

    `fields`: of `CalibrationRequest`. Without a cluster, it is the one at the Ray address, or local without an address.
    """
    fields = with_address(fields)
    fields["cluster"] = fields["cluster"] or ("ray" if fields["ray_address"] else "local")
    fields["nvme_path"] = str(Path(fields["nvme_path"]).expanduser().absolute()) if fields["nvme_path"] else None
    request = CalibrationRequest(**fields)
    console = Console(stderr=True)
    shipped = shipped_rates()
    with open_store(database or default_database_url()) as store:
        cluster, calibration, reason = prepare_calibration(store, request)
        if calibration is None:
            with console.status(f"measuring {cluster.world_size} ranks for about {request.seconds:g} s"):
                calibration = measure_cluster(store, request, cluster, reason)
        coefficients = calibrated(store, cluster, request.engine, shipped)
    if as_json:
        write_document(_document(calibration, coefficients, shipped, request.engine))
    else:
        print_calibration(calibration, coefficients, shipped, request.engine, Console())
    return Status.OK


def _document(calibration: Calibration, coefficients: Calibrated, shipped: Coefficients, engine: str) -> dict[str, Any]:
    record = calibration.record
    before, after = dataclasses.asdict(shipped), dataclasses.asdict(coefficients.rates)
    return {
        "id": record.id,
        "fingerprint": record.fingerprint,
        "created": record.created.isoformat(),
        "reused": calibration.reused,
        "reason": calibration.reason,
        "seconds": record.seconds,
        "cluster": to_plain(calibration.cluster),
        "environment": dict(record.environment),
        "hosts": list(record.hosts),
        "context_bytes": record.context_bytes,
        "workspace_bytes": record.workspace_bytes,
        "rows": to_plain(record.rows),
        "engine": engine,
        "trials": coefficients.trials,
        "source": coefficients.source,
        "coefficients": {name: {"shipped": before[name], "calibrated": after[name]} for name in before},
    }


COEFFICIENT_TEXTS = {
    "matrix_efficiency": "of the stated peak that the largest products reach",
    "rows_half": "rows at which products reach half of that",
    "width_half": "width at which products reach half of that",
    "attention_efficiency": "of the stated peak that attention reaches",
    "backward_ratio": "backward / forward",
    "traffic": "x the minimum traffic of norms, residuals, activations",
    "kernel_seconds": "s to launch the kernels of a layer's forward",
    "collective_launch": "s more with tensor parallelism",
    "link_efficiency": "of the stated bandwidth in a node that collectives reach",
    "network_efficiency": "of the stated bandwidth between nodes",
    "link_seconds": "s latency in a node",
    "chunk_seconds": "s for which messages in a node travel in chunks",
    "network_seconds": "s latency across nodes",
    "half_message": "bytes at which half of the network is reached",
    "crossed_seconds": "s of wait per rank if stages cross nodes",
    "blocked_seconds": "s per micro-batch and pair of nodes if sends block",
    "data_exposed": "of the data-parallel communication is not hidden",
    "hop_seconds": "s at a boundary of pipeline stages",
    "update_efficiency": "of the stated memory bandwidth in updates",
    "host_update_efficiency": "of the host's in updates there",
    "step_seconds": "s of other overhead per step",
    "overlap_slowdown": "remaining cost of overlapped communication",
    "file_read_bandwidth": "bytes/s that a node reads from files",
    "file_update_bandwidth": "bytes/s of a node's files in updates",
    "time_spread": "spread of measured / predicted time",
    "time_tail": "90 % band of time, over that of its spread",
    "time_doubt": "of the doubts about kinds of cases is left",
    "context_bytes": "bytes outside torch's allocator",
    "workspace_bytes": "bytes of workspaces",
    "fragmentation": "reserved / allocated",
    "activation_scale": "x the modelled activations",
    "working_layers": "layers of working activations in backward",
    "memory_spread": "spread of measured / predicted memory",
    "memory_tail": "90 % band of memory, over that of its spread",
}
"""Coefficient -> short description."""


def print_calibration(
    calibration: Calibration, coefficients: Calibrated, shipped: Coefficients, engine: str, console: Console
) -> None:
    """Print the measurements, the resulting coefficients, and where they are used."""
    for line in _heading(calibration):
        console.print(line, soft_wrap=True)
    rows = calibration.record.rows
    for precision in dict.fromkeys(row.precision for row in rows if row.operation is Operation.PRODUCT):
        _print_products(rows, precision, calibration.cluster, console)
    _print_steps(rows, calibration.cluster, engine, shipped, coefficients.rates, console)
    for group in dict.fromkeys(row.group for row in rows if row.operation in COLLECTIVES):
        _print_group(rows, group, calibration.cluster, console)
    _print_coefficients(shipped, coefficients.rates, console)
    console.print()
    for line in _ending(calibration, coefficients):
        console.print(line, soft_wrap=True)


def _heading(calibration: Calibration) -> list[str]:
    record, cluster = calibration.record, calibration.cluster
    name = processor() if cluster.device.kind == "cpu" else cluster.device.name
    nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    versions = f"torch {record.environment.get('torch', '?')}, {record.environment.get('backend', '?')}"
    when = f"{record.created:%Y-%m-%d %H:%M} UTC"
    origin = f"reused: measured {when}" if calibration.reused else f"measured {when} in {record.seconds:.0f} s, start included"
    return [
        f"{cluster.name}: {cluster.world_size} ranks{nodes}, {name or 'CPU'}, {versions}",
        f"{origin} ({calibration.reason})",
    ]


def _ending(calibration: Calibration, coefficients: Calibrated) -> list[str]:
    refined = (
        f"{coefficients.trials} trials on this hardware refine it"
        if coefficients.trials
        else "trials on this hardware will refine it"
    )
    return [
        f"Predictions for this hardware from this database now use calibration {calibration.record.id}; {refined}.",
        "Shares are of what the cluster's description states; a spread is the standard deviation of a logarithm.",
    ]


def _print_products(rows: Sequence[MeasuredRow], precision: str, cluster: ClusterSpec, console: Console) -> None:
    """GFLOP/s and the share of the stated peak by shape: one line per matrix, one column per number of rows."""
    products = [row for row in rows if row.operation is Operation.PRODUCT and row.precision == precision]
    counts = sorted({row.shape[0] for row in products})
    peak = cluster.device.peak_flops.get(precision)
    share = f" (% of {peak / 1e9:,.0f})" if peak else ""
    table = _table(f"Matrix products, {precision}, GFLOP/s per rank{share}", "inner x outer", *(f"{n} rows" for n in counts))
    for shape in sorted({row.shape[1:] for row in products}, key=lambda shape: (shape[0] * shape[1], shape)):
        row_by_count = {row.shape[0]: row for row in products if row.shape[1:] == shape}
        table.add_row(f"{shape[0]} x {shape[1]}", *(_speed(row_by_count.get(count), peak) for count in counts))
    _show(console, table)


def _speed(row: MeasuredRow | None, peak: float | None) -> str:
    if row is None:
        return "-"
    flops = 2.0 * row.shape[0] * row.shape[1] * row.shape[2] / row.seconds
    return f"{flops / 1e9:,.1f}" + (f" ({flops / peak:.0%})" if peak else "")


def _print_steps(
    rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str, shipped: Coefficients, rates: Coefficients, console: Console
) -> None:
    """Measured and predicted times, with the shipped and the calibrated coefficients."""
    parts = {
        Operation.LAYER: ("layer", "samples x tokens, hidden, heads, ffn"),
        Operation.HEAD: ("output and loss", "samples x tokens, hidden, vocabulary"),
        Operation.UPDATE: ("optimizer update", "parameters"),
    }
    title = f"Parts of a step, forward and backward, {default_precision(cluster)}, ms"
    table = _table(title, "", "measured", "quartiles", "shipped predicts", "calibrated predicts")
    relevant = [row for row in rows if row.operation is Operation.UPDATE or row.precision == default_precision(cluster)]
    for operation, (name, axes) in parts.items():
        measured = [row for row in relevant if row.operation is operation]
        if not measured:
            continue
        table.add_row(f"{name} ({axes})")
        predicted = predicted_rows(measured, cluster, engine)
        for row, before, after in zip(measured, predicted(shipped), predicted(rates), strict=True):
            quartiles = f"{_ms(row.low)} - {_ms(row.high)}"
            table.add_row(f"  {_shape(row)}", _ms(row.seconds), quartiles, _ms(before), _ms(after))
    _show(console, table)
    moved = {Operation.COPY: 8, Operation.TO_HOST: 1, Operation.TO_DEVICE: 1, Operation.FILE_READ: 1, Operation.FILE_UPDATE: 2}
    ordered = sorted((row for row in rows if row.operation in moved), key=lambda row: (row.operation, row.shape))
    for operation, row in {row.operation: row for row in ordered}.items():  # the largest of each
        console.print(
            f"{operation.replace('_', ' ')}: {row.shape[0] * moved[operation] / row.seconds / 1e9:.2f} GB/s", soft_wrap=True
        )
    for row in rows:
        if row.operation is Operation.LAUNCH:
            console.print(f"launch of a small kernel: {row.seconds * 1e6:.1f} us", soft_wrap=True)


def _print_group(rows: Sequence[MeasuredRow], group: GroupShape, cluster: ClusterSpec, console: Console) -> None:
    """Time and bandwidth by payload: one line per payload, one column per operation."""
    mine = [row for row in rows if row.group == group and row.operation in COLLECTIVES]
    group_text = (
        f"{group.ranks} ranks of a node" if group.ranks == group.in_node else f"{group.ranks} ranks, {group.in_node} per node"
    )
    linked = group.ranks == ranks_in_domain(group, cluster)
    stated_bandwidth = cluster.intra_node_bandwidth if linked else cluster.inter_node_bandwidth
    title = f"Collectives, {group_text}: ms and GB/s through a rank's link (stated: {stated_bandwidth / 1e9:.2f})"
    table = _table(title, "message", *(operation.replace("_", " ") for operation in COLLECTIVES))
    for size in sorted({row.shape[0] for row in mine}):
        row_by_operation = {row.operation: row for row in mine if row.shape[0] == size}
        in_order = [row_by_operation.get(operation) for operation in COLLECTIVES]
        cells = ["-" if row is None else f"{_ms(row.seconds)}  {link_volume(row) / row.seconds / 1e9:.2f}" for row in in_order]
        table.add_row(bytes_text(size), *cells)
    _show(console, table)


def _print_coefficients(shipped: Coefficients, rates: Coefficients, console: Console) -> None:
    table = _table("Coefficients that changed", "", "shipped", "calibrated", "")
    before, after = dataclasses.asdict(shipped), dataclasses.asdict(rates)
    for name, value in after.items():
        if abs(value / before[name] - 1) > 0.005:
            table.add_row(name, f"{before[name]:.4g}", f"{value:.4g}", COEFFICIENT_TEXTS[name])
    table.columns[-1].justify = "left"
    _show(console, table)


def _shape(row: MeasuredRow) -> str:
    if row.operation is Operation.UPDATE:
        return f"{row.shape[0]:,}"
    return f"{row.shape[0]} x {row.shape[1]}, " + ", ".join(map(str, row.shape[2:]))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _table(title: str, first: str, *columns: str) -> Table:
    style = "bold"
    table = Table(
        box=None, pad_edge=False, header_style=style, title=title, title_justify="left", title_style=style, padding=(0, 2, 0, 0)
    )
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _show(console: Console, table: Table) -> None:
    """Print the table in full width, because truncated figures are useless."""
    if table.row_count:
        console.print()
        console.print(str(table.title), soft_wrap=True)
        table.title = None
        wide = console.options.update(max_width=1_000)
        console.width = max(console.width, Measurement.get(console, wide, table).maximum)
        console.print(table)
