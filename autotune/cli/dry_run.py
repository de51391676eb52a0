"""`autotune dry-run`: the memory and communication of a configuration on a cluster that need not be available."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.cli.documents import write_document
from autotune.cli.dry_run_table import print_dry_run
from autotune.cli.fields import import_folders
from autotune.cli.profile import configuration, single_values
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.request.rows import request_from_fields
from autotune.session.resolve import resolve
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from autotune.text.console import Console
from executor.dry.result import DryRun
from executor.runners.dry import dry_run_model
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob import Value
from search_spaces.models.huggingface import is_factory_reference, resolve_model
from search_spaces.trial_config import TrialConfig

LOCAL_RANKS = 2
LOCAL_TOKENS = 128


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
    """Tokens per sample; None: the model's maximum, at most 128 for `local`."""
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
        found = dry_run_model(request, backend=backend, python_path=session.request.python_path)
    if options.json:
        write_document(_document(session, config, found))
    else:
        print_dry_run(session, config, found, Console())
    return Status.OK if found.peak_memory_bytes <= session.cluster.device.memory_bytes else Status.NOTHING_FEASIBLE


def _fields(options: DryRunOptions, values: Mapping[str, Value]) -> dict[str, Any]:
    if not options.model:
        raise RequestError("model", "is missing", "give a preset, a config.json or module:factory")
    local, factory = options.cluster == "local", is_factory_reference(options.model)
    ranks = options.ranks or (LOCAL_RANKS if local else None)
    tokens = options.sequence_length
    if tokens is None and not factory:
        longest = resolve_model(options.model).sequence_length
        tokens = min(longest, LOCAL_TOKENS) if local else longest
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


def _document(session: Session, config: TrialConfig, found: DryRun) -> dict[str, Any]:
    memory = session.cluster.device.memory_bytes
    return {
        "model": session.model.name,
        "cluster": session.cluster.name,
        "world_size": session.world_size,
        "engine": session.request.engine,
        "backend": found.backend,
        "config": config.values(),
        "global_batch_size": session.request.global_batch_size,
        "sequence_length": session.request.sequence_length,
        "device_memory_bytes": memory,
        "peak_memory_bytes": found.peak_memory_bytes,
        "fits": found.peak_memory_bytes <= memory,
        "ranks": [dataclasses.asdict(rank) for rank in found.ranks],
        "seconds": found.seconds,
    }
