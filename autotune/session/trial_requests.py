"""What a runner is asked for, to measure a configuration of a job."""

import dataclasses

from autotune.session.script_files import rendered_files
from autotune.session.session import OPTIMIZER, Session
from search_spaces.adapters import VIRTUAL_TOKENS
from search_spaces.command import CommandModel
from search_spaces.compression import INT8
from search_spaces.packing_rules import PACK
from search_spaces.trial import TrialRequest
from search_spaces.trial_config import TrialConfig, Value

ADAPTERS = ("lora_rank", "lora_targets", "adapter_size")
"""Knobs that say what is trained beside a model that starts as it is."""
OTHER_MODELS = ("frozen_dtype", "gather_dtype", *VIRTUAL_TOKENS, "attention_window", "attention_global_tokens", PACK)
"""Knobs with which a model computes something else from the start."""


def trial_request(
    session: Session,
    attempt: str,
    config: TrialConfig,
    reference_losses: tuple[float, ...],
    excluded_nodes: tuple[str, ...] = (),
) -> TrialRequest:
    """What a runner is asked for to measure `config` in full under this job's workload and limits."""
    request = session.request
    return TrialRequest(
        attempt=attempt,
        model=session.model,
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
    )


def _comparable(session: Session, losses: tuple[float, ...]) -> tuple[float, ...]:
    """Of a job's reference those losses that hold for all of its trials.

    Whatever the optimizer, and with adapters of any size or none (their second matrices are zero), trials start from one
    loss, and are other models from the first update on. So they are where gradients are rounded to integers, in blocks that
    another layout cuts otherwise. Weights of fewer bits, or gathered in fewer, virtual tokens, or attention to fewer
    tokens, make another model from the start; of packed rows a step trains on other documents.
    """
    if any(_varies(session, name) for name in OTHER_MODELS):
        return ()
    others = any(_varies(session, name) for name in (OPTIMIZER, *ADAPTERS))
    return losses[:1] if others or INT8 in _values(session, "reduce_dtype") else losses


def _varies(session: Session, knob: str) -> bool:
    """Whether the job's trials have several values of a knob."""
    return len(_values(session, knob)) > 1


def _values(session: Session, knob: str) -> set[Value]:
    """Those that the job's trials have of a knob."""
    values = session.space.domains.get(knob, (getattr(session.space.base, knob),))
    return {*values, *(getattr(config, knob) for config in session.baselines)}


def _files(session: Session, config: TrialConfig) -> tuple[tuple[str, str], ...]:
    """What a user's command reads."""
    if not isinstance(session.model, CommandModel):
        return ()
    return rendered_files(session, config)
