"""`autotune dry-run`: the memory and communication of a configuration on a cluster that need not be available."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autotune.cli.fields import import_folders
from autotune.cli.profile import configuration, single_values
from autotune.cli.status import Status, write_document
from autotune.errors import AutotuneError, RequestError
from autotune.prediction.planning.conditional import Conditions, predicted
from autotune.prediction.planning.question import WORKLOAD, Question, assumptions, default_length
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from autotune.text.console import Console
from autotune.text.rows import bytes_text
from executor.runners.one_process import dry_run_model
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import SearchSpaceError
from search_spaces.knob import Value
from search_spaces.models.huggingface import is_factory_reference, resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.trial import DryRank, DryRun
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunOptions:
    """Parsed options of the command."""

    model: str | None
    cluster: str
    ranks: int | None
    pins: tuple[str, ...]
    engine: str
    global_batch_size: int | None
    """Samples per step; None: one micro-batch per replica, in a pipeline two for each of its ranks."""
    sequence_length: int | None
    """Tokens per sample; None: `default_length`."""
    timeout: float
    json: bool


def dry_run_command(options: DryRunOptions) -> Status:
    """Validate, then run one rank of each pipeline stage in a separate process."""
    values = single_values(options.pins, "a dry run has one configuration")
    session = resolve(request_from_fields(_fields(options, values)))
    config = configuration(session, values)
    request = dataclasses.replace(trial_request(session, "dry run", config, ()), timeout_seconds=options.timeout)
    backend = "gloo" if session.cluster.device.kind == "cpu" else "nccl"
    with Console(stderr=True).status(f"dry run of {session.model.name} on {session.world_size} ranks"):
        dry_run = dry_run_model(request, backend=backend, python_path=session.request.python_path)
    assumed_length = options.sequence_length is None and isinstance(session.model, ModelSpec)
    conditions = _conditions(session, options, values)
    if options.json:
        write_document({**_document(session, config, dry_run), "assumed": conditions.document()})
    else:
        for line in conditions.lines():
            Console().print(line, soft_wrap=True, highlight=False)
        print_dry_run(session, config, dry_run, Console(), assumed_length)
    return (
        Status.OK if _least_bytes(dry_run, assumed_length) <= session.cluster.device.memory_bytes else Status.NOTHING_FEASIBLE
    )


def _conditions(session: Session, options: DryRunOptions, values: Mapping[str, Value]) -> Conditions:
    """What was assumed, and what is predicted at the alternatives if the equations know the model."""
    unstated = [name for name in WORKLOAD if getattr(options, name) is None]
    workload = {name: getattr(session.request, name) for name in WORKLOAD}
    assumed = assumptions(session.model, session.cluster, unstated, workload)
    pins = {name: (value,) for name, value in values.items()}
    try:
        question = Question(
            model=session.model, cluster=session.cluster, **workload, pins=pins, assumed=assumed,  # type: ignore[arg-type]
        )  # fmt: skip
        return predicted(question).conditions
    except (AutotuneError, SearchSpaceError):
        return Conditions(assumed=assumed, results=())


def _least_bytes(dry_run: DryRun, assumed_length: bool) -> int:
    """Bytes that are needed in any case: the peak, or if nobody stated the length of samples, the model's states."""
    if not assumed_length:
        return dry_run.peak_memory_bytes
    states = ("parameters", "gradients", "optimizer_state")
    return max(sum(rank.memory_by_tag[tag] for tag in states) for rank in dry_run.ranks)


def _fields(options: DryRunOptions, values: Mapping[str, Value]) -> dict[str, Any]:
    if not options.model:
        raise RequestError("model", "is missing", "give a preset, a config.json or module:factory")
    factory = is_factory_reference(options.model)
    ranks = options.ranks or (2 if options.cluster == "local" else None)
    tokens = options.sequence_length
    if tokens is None and not factory:
        tokens = default_length(resolve_model(options.model), resolve_cluster(options.cluster, ranks))
    fields: dict[str, Any] = {
        "model": options.model,
        "cluster": options.cluster,
        "ranks": ranks,
        "engine": options.engine,
        "runner": "local",
        "pins": {name: [value] for name, value in values.items()},
        "global_batch_size": options.global_batch_size or _least_batch(options.cluster, ranks, values),
        "sequence_length": tokens,
        "trial_timeout": options.timeout,
    }
    if factory:
        fields["python_path"] = import_folders()
    return {name: value for name, value in fields.items() if value is not None}


def _least_batch(cluster: str, ranks: int | None, values: Mapping[str, Value]) -> int:
    """One micro-batch per replica of the model; in a pipeline enough to keep all its ranks busy."""
    config = TrialConfig().replace(values)
    replicas = max(config.data_parallel_size(resolve_cluster(cluster, ranks).world_size), 1)
    stages = config.pipeline_parallel_size
    return config.micro_batch_size * replicas * (2 * stages if stages > 1 else 1)


def _document(session: Session, config: TrialConfig, dry_run: DryRun) -> dict[str, Any]:
    memory = session.cluster.device.memory_bytes
    return {
        "model": session.model.name,
        "cluster": session.cluster.name,
        "world_size": session.world_size,
        "engine": session.request.engine,
        "backend": dry_run.backend,
        "config": config.values(),
        "global_batch_size": session.request.global_batch_size,
        "sequence_length": session.request.sequence_length,
        "device_memory_bytes": memory,
        "peak_memory_bytes": dry_run.peak_memory_bytes,
        "fits": dry_run.peak_memory_bytes <= memory,
        "ranks": [dataclasses.asdict(rank) for rank in dry_run.ranks],
        "seconds": dry_run.seconds,
    }


def print_dry_run(
    session: Session, config: TrialConfig, dry_run: DryRun, console: Console, assumed_length: bool = False
) -> None:
    """Print the configuration, and memory, FLOPs and communication of each pipeline rank."""
    for line in (_heading(session, config, dry_run), "Figures are per optimizer step and rank."):
        console.print(line, soft_wrap=True)
    memory = session.cluster.device.memory_bytes
    console.width = max(console.width, 120)
    console.print(_memory_table(dry_run, memory))
    console.print(_traffic_table(dry_run))
    for line in _verdict(session, dry_run, memory, assumed_length):
        console.print(line, soft_wrap=True)


def _heading(session: Session, config: TrialConfig, dry_run: DryRun) -> str:
    steps = dry_run.ranks[0].micro_batches
    size = f"{config.micro_batch_size} x {session.request.sequence_length} tokens"
    batches = f"{steps} micro-batch{'es' if steps != 1 else ''} of {size}"
    rank_text = f"{session.world_size} ranks of {session.cluster.name}"
    return f"{session.model.name}: {session.model.parameter_count:,} parameters, {config.precision}, {batches}, on {rank_text}"


def _memory_table(dry_run: DryRun, memory: int) -> Table:
    tags = list(dry_run.ranks[0].memory_by_tag)
    hosts = any(rank.host_memory_bytes for rank in dry_run.ranks)
    titles = ["rank", "stages", "peak", "of device", *(tag.replace("_", " ") for tag in tags), *["host"] * hosts, "TFLOP"]
    table = _table(titles)
    for rank in dry_run.ranks:
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


def _traffic_table(dry_run: DryRun) -> Table:
    table = _table(["rank", "dimension", "collective", "count", "bytes"], left_aligned=3)
    for rank in dry_run.ranks:
        for at, sent in enumerate(rank.collectives):
            name = "" if at else str(rank.rank)
            table.add_row(name, sent.mesh_dimension, sent.operation, f"{sent.count:,}", bytes_text(sent.bytes))
    return table


def _table(titles: list[str], left_aligned: int = 2) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for at, title in enumerate(titles):
        table.add_column(title, justify="left" if at < left_aligned else "right", no_wrap=True)
    return table


def _flops(rank: DryRank) -> str:
    return "-" if rank.flops_per_step is None else f"{rank.flops_per_step / 1e12:,.4g}"


def _verdict(session: Session, dry_run: DryRun, memory: int, assumed_length: bool) -> list[str]:
    fits = "fits" if dry_run.peak_memory_bytes <= memory else "does not fit"
    if _least_bytes(dry_run, assumed_length) <= memory < dry_run.peak_memory_bytes:
        fits = "with samples of the assumed length does not fit"
    peak = (
        f"peak of {bytes_text(dry_run.peak_memory_bytes)} {fits} into the {bytes_text(memory)} of {session.cluster.device.name}"
    )
    return [f"{peak}; dry run of {len(dry_run.ranks)} of {session.world_size} ranks in {dry_run.seconds:.1f} s"]
