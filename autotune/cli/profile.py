"""`autotune profile`: the cost of every module of a model in an optimizer step."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cli.documents import write_document
from autotune.cli.fields import import_folders
from autotune.cli.profile_table import print_profile
from autotune.cli.profile_tree import OWN, Row, rows_of
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.request.rows import request_from_fields
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from autotune.text.console import Console
from executor.measurement.flops import flops_utilization
from executor.measurement.module_profile import ModelProfile, Phases
from executor.runners.profile import profile_model
from search_spaces.domains import parse_domain
from search_spaces.errors import IllegalConfigError
from search_spaces.knob import Value
from search_spaces.models.huggingface import is_factory_reference
from search_spaces.spaces import parse_pins
from search_spaces.trial import Fidelity
from search_spaces.trial_config import TrialConfig

FIDELITY = Fidelity(min_steps=5, max_steps=50, max_seconds=2.0)
"""Steps with and without hooks: at least five of each, more until two seconds have passed."""

DIVIDES_THE_MODEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Parsed options of the command."""

    model: str | None
    pins: tuple[str, ...]
    depth: int | None
    """Levels of modules to show; None: all."""
    every_block: bool
    """Whether identical blocks get one row each."""
    global_batch_size: int | None
    """Samples per step; None: one micro-batch."""
    sequence_length: int | None
    data_path: Path | None
    timeout: float
    json: bool


def profile_command(options: ProfileOptions) -> Status:
    """Validate, then profile in one rank process. Nothing is stored."""
    values = single_values(options.pins, "a profile has one configuration")
    _require_whole_model(values)
    session = prepare(request_from_fields(_fields(options, values)))
    config = configuration(session, values)
    request = dataclasses.replace(
        trial_request(session, "profile", config, ()), fidelity=FIDELITY, timeout_seconds=options.timeout
    )
    console = Console(stderr=True)
    with console.status(f"profiling {session.model.name}"):
        profile = profile_model(request, python_path=session.request.python_path, device=session.cluster.device.kind)
    rows = rows_of(profile, depth=options.depth, merge=not options.every_block)
    peak = request.peak_flops_per_device
    if options.json:
        write_document(_document(session, config, profile, rows, peak))
    else:
        print_profile(session, config, profile, rows, hfu(profile, peak), Console())
    return Status.OK


def hfu(profile: ModelProfile, peak_flops: float | None) -> float | None:
    """Hardware FLOPs utilization of the step; None if no peak is stated."""
    return flops_utilization(profile.flops / profile.step_seconds / 1e12, peak_flops)


def single_values(texts: tuple[str, ...], why: str) -> dict[str, Value]:
    """Knob -> its single value, from `KNOB=VALUE`.

    Raises:
        RequestError: several values are given; `why` explains why only one is allowed.
        SearchSpaceError: a knob or a value does not exist.
    """
    found: dict[str, Value] = {}
    for name, text in parse_pins(texts).items():
        value = parse_domain(name, text)
        if isinstance(value, str) or len(value) != 1:
            raise RequestError(name, f"{text} is not one value", f"{why}: write {name}=VALUE")
        found[name] = value[0]
    return found


def _require_whole_model(values: Mapping[str, Value]) -> None:
    for name in DIVIDES_THE_MODEL:
        if values.get(name, 1) != 1:
            problem = f"{values[name]} ranks would divide the model"
            raise RequestError(name, problem, "a profile covers the whole model on one rank: leave it at 1")


def _fields(options: ProfileOptions, values: Mapping[str, Value]) -> dict[str, Any]:
    if not options.model:
        raise RequestError("model", "is missing", "give a preset, a config.json or module:factory")
    fields = {
        "model": options.model,
        "ranks": 1,
        "runner": "local",
        "pins": {name: [value] for name, value in values.items()},
        "global_batch_size": options.global_batch_size or values.get("micro_batch_size", TrialConfig().micro_batch_size),
        "sequence_length": options.sequence_length,
        "data_path": str(options.data_path) if options.data_path else None,
        "trial_timeout": options.timeout,
    }
    if is_factory_reference(options.model):
        fields["python_path"] = import_folders()
    return {name: value for name, value in fields.items() if value is not None}


def configuration(session: Session, values: Mapping[str, Value]) -> TrialConfig:
    """The space's defaults with these values.

    Raises:
        IllegalConfigError: a rule refuses it.
    """
    config = session.space.canonical(session.space.base.replace(values))
    if refusals := session.space.check(config):
        raise IllegalConfigError(refusals[0].rule, refusals[0].message, refusals[0].remedy)
    return config


def _document(
    session: Session, config: TrialConfig, profile: ModelProfile, rows: list[Row], peak_flops: float | None
) -> dict[str, Any]:
    return {
        "model": session.model.name,
        "config": config.values(),
        "global_batch_size": session.request.global_batch_size,
        "sequence_length": session.request.sequence_length,
        "micro_batches": profile.micro_batches,
        "step_seconds": profile.step_seconds,
        "hooked_seconds": profile.hooked_seconds,
        "repeats": profile.repeats,
        "flops": int(profile.flops),
        "hardware_tflops_per_device": profile.flops / profile.step_seconds / 1e12,
        "hfu": hfu(profile, peak_flops),
        "modules": [_row_document(row, profile) for row in rows],
        "outside": {"flops": int(profile.outside_flops), "seconds": profile.outside_seconds},
        "environment": profile.environment,
    }


def _row_document(row: Row, profile: ModelProfile) -> dict[str, Any]:
    return {
        "name": row.name,
        "own": row.label == OWN,
        "kind": row.kind,
        "depth": row.depth,
        "count": row.count,
        "calls": row.calls,
        "parameters": row.parameters,
        "flops": {name: int(value) for name, value in _phases(row.flops).items()},
        "seconds": _phases(row.seconds),
        "share": row.seconds.total / profile.hooked_seconds,
    }


def _phases(phases: Phases) -> dict[str, float]:
    return dataclasses.asdict(phases)
