"""Runners by name, and their requests to measure a job's configurations, with the files that a script reads in a trial."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.best_config import SCHEMA_VERSION, stated_of
from autotune.frameworks.exporters import EXPORTERS
from autotune.frameworks.launch import FILE_FORMATS
from autotune.question.assumption import assumed_lines
from autotune.ray_cluster import address_of
from autotune.request.request import JobRequest
from autotune.request.rows import request_to_row
from autotune.session.placement import launch_of
from autotune.session.session import OPTIMIZER, Session
from executor.runners.gang_runner import GangsRunner
from executor.runners.runner import Runner
from search_spaces.communication import INT8
from search_spaces.knob import VIRTUAL_TOKENS, Value
from search_spaces.knob_values import value_text
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, without_profile
from search_spaces.models.module_profile import LossTrait
from search_spaces.outcome import Outcome
from search_spaces.placeholders import FILES, files_read, follows_micro_batch, is_trainer
from search_spaces.plain import from_plain, to_plain
from search_spaces.rules.training import PACK
from search_spaces.trial import REFERENCE_STEPS, UNDIVIDED, TrialRequest, TrialResult, reference_name
from search_spaces.trial_config import TrialConfig


def trial_request(
    session: Session,
    attempt: str,
    config: TrialConfig,
    reference_losses: tuple[float, ...],
    excluded_nodes: tuple[str, ...] = (),
) -> TrialRequest:
    """Build the request to measure `config` in full under this job's workload and limits.

    `reference_losses`: those that the job has for this configuration (`reference_name`).
    """
    request = session.request
    compared = _compared_steps(session)
    return TrialRequest(
        attempt=attempt,
        model=without_profile(session.model),
        config=config,
        workload=request.workload,
        world_size=session.world_size,
        engine=request.engine,
        fidelity=dataclasses.replace(request.fidelity, most_micro_batches=None, most_layers=None),
        memory_limit_bytes=request.memory_limit,
        timeout_seconds=request.trial_timeout,
        reference_losses=reference_losses[:compared],
        plain_steps=0 if reference_losses else min(compared, _plain_steps(session, config)),
        peak_flops_per_device=session.cluster.device.peak_flops.get(config.precision),
        excluded_nodes=excluded_nodes,
        node_kinds=session.cluster.node_kinds,
        device_kind=session.cluster.device.kind,
        failures=request.failures,
        files=_files(session, config),
        checkpoint_path=request.checkpoint_path,
    )


CHANGED_FROM_START = ("frozen_dtype", "gather_dtype", *VIRTUAL_TOKENS, "attention_window", "attention_global_tokens", PACK)
"""Quantised weights or gathers, virtual tokens and attention windows change the model from the start; packed rows change the
documents of a step."""
CHANGED_BY_UPDATES = (OPTIMIZER, "lora_rank", "lora_targets", "adapter_size")
"""Adapters do not change the model's output before the first update: their second matrices are zero."""


def _compared_steps(session: Session) -> int:
    """The first steps whose losses are comparable in all trials of the job.

    With different optimizers or adapter sizes, trials have the same first loss and differ from the first update on. The same
    holds if gradients are rounded to integers, because blocks depend on the layout.
    """
    if any(_varies(session, name) for name in CHANGED_FROM_START) or LossTrait.IRREPRODUCIBLE in _traits(session):
        return 0
    updates_differ = any(_varies(session, name) for name in CHANGED_BY_UPDATES) or INT8 in _values(session, "reduce_dtype")
    return 1 if updates_differ else REFERENCE_STEPS


def _plain_steps(session: Session, config: TrialConfig) -> int:
    """The first steps in which a user's module without an engine, with AdamW, has the losses of this configuration."""
    # A layout that divides the module, or compiled code, draws other random numbers and changes other states.
    is_alike = reference_name(session.model, config) == reference_name(session.model, config.replace(UNDIVIDED))
    if not isinstance(session.model, FactoryModel) or not is_alike or _differs(config, CHANGED_FROM_START):
        return 0
    # Narrow gradients need a loss scale.
    updates_differ = _differs(config, CHANGED_BY_UPDATES) or config.reduce_dtype == INT8 or config.precision == "fp16"
    return 1 if updates_differ else REFERENCE_STEPS


def _differs(config: TrialConfig, names: Sequence[str]) -> bool:
    """Whether a knob does not have its default."""
    return any(getattr(config, name) != getattr(TrialConfig(), name) for name in names)


def _traits(session: Session) -> tuple[LossTrait, ...]:
    return session.model.loss_traits if isinstance(session.model, FactoryModel) else ()


def _varies(session: Session, knob: str) -> bool:
    """Whether the job's trials use several values of a knob."""
    return len(_values(session, knob)) > 1


def _values(session: Session, knob: str) -> set[Value]:
    """The values of a knob in the job's trials."""
    values = session.space.domains.get(knob, (getattr(session.space.base, knob),))
    return {*values, *(getattr(config, knob) for config in session.baselines)}


def _files(session: Session, config: TrialConfig) -> tuple[tuple[str, str], ...]:
    """Name and content of the files that a user's command reads in a trial of this configuration."""
    command = session.model
    if not isinstance(command, CommandModel):
        return ()
    # If the user states no hyperparameters, a file has those of trials, because the script may use them.
    workload = session.request.workload
    request = dataclasses.replace(
        session.request, lr=workload.learning_rate, weight_decay=workload.weight_decay, clip=workload.gradient_clipping,
        optimizer=session.request.optimizer or config.optimizer,
    )  # fmt: skip
    document = unmeasured_document(session, config, request)
    exported = {name: EXPORTERS[FILE_FORMATS[name]](document) for name in files_read(command)}
    return tuple((FILES[name], export.text) for name, export in exported.items())


def notes_of(session: Session) -> list[str]:
    """Return notes for the user before the first trial, one line each."""
    command = session.model
    assumed = assumed_lines(session.request.resolved_assumed)
    notes = ["\n".join(assumed)] if assumed else []
    is_stated = session.request.loss_depends_on_batch
    notes += [trait.note for trait in _traits(session) if not (is_stated and trait.varies_with_size)]
    if not isinstance(command, CommandModel):
        return notes
    space = session.space
    carried = space.capability.knobs if space.capability else {}
    fixed_knobs = [name for name, values in space.domains.items() if name not in carried and len(values) > 1]
    if fixed_knobs:
        stays = ", ".join(f"{name}={value_text(getattr(space.base, name))}" for name in fixed_knobs)
        notes.append(f"no placeholder of the command carries {', '.join(fixed_knobs)}: left at {stays}")
    if follows_micro_batch(command):
        notes.append("the command does not receive {gradient_accumulation_steps}: its global batch follows micro_batch_size")
    missing = stated_of(session.request, space.base).missing("optimizer", "lr", "weight_decay", "clip")
    if "config" in files_read(command) and missing and not (is_trainer(command) or command.plugin == "deepspeed"):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        notes.append(f"the DeepSpeed file has the trials' own {', '.join(missing)}, as nobody stated yours ({options})")
    return notes


def unmeasured_document(session: Session, config: TrialConfig, request: JobRequest) -> dict[str, Any]:
    """Return a best-config document as exporters read it, for a configuration that was not measured yet; `request`: its own."""
    return {
        "schema_version": SCHEMA_VERSION,
        "job": {"id": "", "request": request_to_row(request)},
        "model": {
            "name": session.model.name,
            "parameter_count": session.model.parameter_count,
            "spec": to_plain(session.model),
        },
        "cluster": to_plain(session.cluster),
        "engine": session.request.engine,
        "best": {"trial": 0, "config": config.values(), "measured": None, "predicted": None},
        "baseline": None,
        "alternatives": [],
        "launch": launch_of(config, session),
        "verified": "native-only",
        "provenance": {},
    }


def make_runner(session: Session) -> Runner:
    """Return the runner that the session's request names, with the ranks of one trial, which are already starting.

    Raises:
        RequestError: no runner has that name.
        RunnerError: Ray does not start, or has no room for the ranks.
    """
    request = session.request
    ray_address = address_of(request)
    kind = session.cluster.device.kind
    if request.command is not None:
        runner = _start_watchers(request.runner, session.world_size, kind, ray_address)
    else:
        # Ray does not know the link domains; if all nodes are in one, tensor-parallel ranks may lie on several of them.
        linked = session.cluster.nodes > 1 and session.cluster.linked_devices == session.cluster.world_size
        runner = start_ranks(
            request.runner, session.world_size, kind, request.python_path, ray_address, tensor_across_nodes=linked
        )
    if not session.environment:  # else its first trial starts new processes
        # The imports take seconds; meanwhile the job is opened and its first trial chosen.
        runner.warm_up(session.model)
    return runner


def start_ranks(
    runner: str,
    ranks: int,
    kind: str,
    python_path: Sequence[str] = (),
    ray_address: str | None = None,
    *,
    tensor_across_nodes: bool = False,
) -> GangsRunner:
    """Return the runner with this name, with this many ranks on devices of this kind.

    Args:
        tensor_across_nodes: whether a tensor-parallel group may lie on several nodes of Ray, because the fast link joins them.

    Raises:
        RequestError: no runner has that name.
        RunnerError: Ray does not start, or has no room for the ranks.
    """
    # The device kind is explicit, not `auto`: measurements on CPUs are useless for a job for GPUs.
    # Runners are imported on demand: Ray takes seconds to load, and the local runner must work without Ray.
    if runner == "ray":
        from executor.runners.ray.runner import RayRunner

        return RayRunner(
            ranks, address=ray_address, python_path=python_path, device=kind, tensor_across_nodes=tensor_across_nodes
        )
    if runner == "local":
        from executor.runners.local import LocalRunner

        return LocalRunner(ranks, python_path=python_path, device=kind)
    raise RequestError("runner", f"{runner!r} is not known", "use ray or local")


def _start_watchers(runner: str, ranks: int, kind: str, ray_address: str | None) -> GangsRunner:
    """Start ranks that each run a user's script and use no device themselves: the devices belong to the script."""
    if runner == "ray":
        from executor.runners.ray.runner import RayRunner

        return RayRunner(ranks, address=ray_address, device="cpu", gpus_per_rank=0.0 if kind == "cpu" else 1.0)
    return start_ranks(runner, ranks, "cpu")


def make_replay_runner(path: Path) -> Callable[[Session], Runner]:
    """Return a factory of runners that replay a file of measurements: a JSON object {config hash: result}. The key "*" has
    a result for every other configuration; "seconds_per_trial" is the duration of each trial.

    Raises:
        RequestError: the file cannot be read.
    """
    from executor.runners.replay import ReplayRunner

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        seconds = float(content.pop("seconds_per_trial", 0.0))
        every = content.pop("*", None)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RequestError("replay", f"{path} cannot be read ({error})", "give {config hash: result} as JSON") from error
    results = {name: from_plain(TrialResult, {"attempt": "", **result}) for name, result in content.items()}
    other = None if every is None else from_plain(TrialResult, {"attempt": "", **every})

    def look_up(config: TrialConfig) -> TrialResult:
        missing = f"configuration {config.hash} is not in {path}"
        return results.get(config.hash) or other or TrialResult(attempt="", outcome=Outcome.FAILED, message=missing)

    return lambda _session: ReplayRunner(look_up, seconds_per_trial=seconds)
