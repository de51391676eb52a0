"""Print a dry run as tables."""

from rich.table import Table

from autotune.session.session import Session
from autotune.text.console import Console
from autotune.text.sizes import bytes_text
from executor.dry.result import DryRank, DryRun
from search_spaces.trial_config import TrialConfig


def print_dry_run(session: Session, config: TrialConfig, found: DryRun, console: Console) -> None:
    """Print the configuration, and memory, FLOPs and communication of each pipeline rank."""
    for line in (_heading(session, config, found), "Figures are per optimizer step and rank."):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    memory = session.cluster.device.memory_bytes
    console.width = max(console.width, 120)
    console.print(_memory_table(found, memory), highlight=False, markup=False)
    console.print(_traffic_table(found), highlight=False, markup=False)
    for line in _verdict(session, found, memory):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(session: Session, config: TrialConfig, found: DryRun) -> str:
    steps = found.ranks[0].micro_batches
    size = f"{config.micro_batch_size} x {session.request.sequence_length} tokens"
    batches = f"{steps} micro-batch{'es' if steps != 1 else ''} of {size}"
    where = f"{session.world_size} ranks of {session.cluster.name}"
    return f"{session.model.name}: {session.model.parameter_count:,} parameters, {config.precision}, {batches}, on {where}"


def _memory_table(found: DryRun, memory: int) -> Table:
    tags = list(found.ranks[0].memory_by_tag)
    hosts = any(rank.host_memory_bytes for rank in found.ranks)
    titles = ["rank", "stages", "peak", "of device", *(tag.replace("_", " ") for tag in tags), *["host"] * hosts, "TFLOP"]
    table = _table(titles)
    for rank in found.ranks:
        cells = [
            str(rank.rank),
            ", ".join(map(str, rank.stages)),
            bytes_text(rank.peak_memory_bytes),
            f"{rank.peak_memory_bytes / memory:.1%}",
            *(bytes_text(rank.memory_by_tag[tag]) for tag in tags),
            *[bytes_text(rank.host_memory_bytes)] * hosts,
            _flops(rank),
        ]
        table.add_row(*cells)
    return table


def _traffic_table(found: DryRun) -> Table:
    table = _table(["rank", "dimension", "collective", "count", "bytes"], left=3)
    for rank in found.ranks:
        for at, sent in enumerate(rank.collectives):
            name = "" if at else str(rank.rank)
            table.add_row(name, sent.mesh_dimension, sent.operation, f"{sent.count:,}", bytes_text(sent.bytes))
    return table


def _table(titles: list[str], left: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for at, title in enumerate(titles):
        table.add_column(title, justify="left" if at < left else "right", no_wrap=True)
    return table


def _flops(rank: DryRank) -> str:
    return "-" if rank.flops_per_step is None else f"{rank.flops_per_step / 1e12:,.4g}"


def _verdict(session: Session, found: DryRun, memory: int) -> list[str]:
    fits = "fits" if found.peak_memory_bytes <= memory else "does not fit"
    peak = f"peak {found.peak_memory_bytes:,} bytes {fits} in {memory:,} of {session.cluster.device.name}"
    return [f"{peak}; dry run of {len(found.ranks)} of {session.world_size} ranks in {found.seconds:.1f} s"]
