"""Build the runner's request to measure a configuration of a job."""

import dataclasses

from autotune.session.script_files import rendered_files
from autotune.session.session import OPTIMIZER, Session
from search_spaces.communication import INT8
from search_spaces.knob import Value
from search_spaces.knobs.conditions import VIRTUAL_TOKENS
from search_spaces.models.command import CommandModel
from search_spaces.models.model import without_profile
from search_spaces.rules.packing import PACK
from search_spaces.trial import TrialRequest
from search_spaces.trial_config import TrialConfig

ADAPTERS = ("lora_rank", "lora_targets", "adapter_size")
"""Knobs of adapters, which do not change the model's output before the first update."""
OTHER_MODELS = ("frozen_dtype", "gather_dtype", *VIRTUAL_TOKENS, "attention_window", "attention_global_tokens", PACK)
"""Knobs that change the model's output from the start."""


def trial_request(
    session: Session,
    attempt: str,
    config: TrialConfig,
    reference_losses: tuple[float, ...],
    excluded_nodes: tuple[str, ...] = (),
) -> TrialRequest:
    """Build the request to measure `config` in full under this job's workload and limits."""
    request = session.request
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
        reference_losses=_comparable(session, reference_losses),
        peak_flops_per_device=session.cluster.device.peak_flops.get(config.precision),
        excluded_nodes=excluded_nodes,
        node_kinds=session.cluster.node_kinds,
        device_kind=session.cluster.device.kind,
        failures=request.failures,
        files=_files(session, config),
        checkpoint_path=request.checkpoint_path,
    )


def _comparable(session: Session, losses: tuple[float, ...]) -> tuple[float, ...]:
    """Return the reference losses that are comparable in all trials of the job.

    With different optimizers or adapter sizes (second adapter matrices are zero), trials have the same first loss and differ
    from the first update on. The same holds if gradients are rounded to integers, because blocks depend on the layout.
    Quantised weights or gathers, virtual tokens and attention windows change the model from the start; packed rows change the
    documents of a step.
    """
    if any(_varies(session, name) for name in OTHER_MODELS):
        return ()
    others = any(_varies(session, name) for name in (OPTIMIZER, *ADAPTERS))
    return losses[:1] if others or INT8 in _values(session, "reduce_dtype") else losses


def _varies(session: Session, knob: str) -> bool:
    """Whether the job's trials use several values of a knob."""
    return len(_values(session, knob)) > 1


def _values(session: Session, knob: str) -> set[Value]:
    """The values of a knob in the job's trials."""
    values = session.space.domains.get(knob, (getattr(session.space.base, knob),))
    return {*values, *(getattr(config, knob) for config in session.baselines)}


def _files(session: Session, config: TrialConfig) -> tuple[tuple[str, str], ...]:
    """The files that a user's command reads."""
    if not isinstance(session.model, CommandModel):
        return ()
    return rendered_files(session, config)
