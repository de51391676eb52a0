"""Verify a best configuration on another engine: run it and its baseline there, and compare with the document."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import RequestError
from autotune.frameworks.best_config import request_of
from autotune.objective.intervals import Repeat
from autotune.outcome.job_snapshot import repeat_of
from autotune.ray_cluster import run_by
from autotune.request.engines import capability_of, carriers_of
from autotune.request.field_forms import with_command
from autotune.request.request import JobRequest
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.session.trial_requests import trial_request
from executor.engines.capabilities import COMMAND
from executor.runners.runner import Runner
from search_spaces.capability import Capability
from search_spaces.knob import Value
from search_spaces.models.command import CommandModel
from search_spaces.plain import to_plain
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig

LAYOUT = frozenset({
    "zero_stage", "micro_batch_size", "tensor_parallel_size", "sequence_parallel", "pipeline_parallel_size", "virtual_stages",
    "pipeline_schedule", "context_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size", "hsdp_shard_size",
    "offload_optimizer", "offload_param", "activation_checkpointing", "checkpoint_every_k", "precision", "pipeline_layout",
    "attention_window", "attention_global_tokens",
})  # fmt: skip
"""Knobs that define the answer: an engine that does not honour them cannot verify it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A configuration, adapted to another engine."""

    config: TrialConfig
    left_out: tuple[str, ...] = ()
    """`knob=value` pairs that the engine does not support; `config` has the engine's own value instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The measurements on another engine."""

    engine: str
    promised: Interval
    """Samples/s that the document states."""
    delivered: Interval
    promised_gain: Interval | None
    """Gain over the document's baseline; None: it has none."""
    delivered_gain: Interval | None
    """None: the baseline does not run there."""
    left_out: tuple[str, ...] = ()
    message: str = ""
    """Why there is no gain; empty: there is one."""

    @property
    def holds(self) -> bool:
        """Whether the interval does not show the best to be slower than the baseline there."""
        return self.delivered_gain is None or self.delivered_gain.high >= 1.0

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        plain: dict[str, Any] = to_plain(self)
        return plain


def translate(config: TrialConfig, capability: Capability, world_size: int) -> Translation:
    """Adapt the configuration to the engine: knobs that it does not honour get the engine's own value.

    Raises:
        RequestError: a layout knob is not honoured, or a combination is refused; the message names the remedy.
    """
    left_out, changes = [], {}
    for name, value in config.values().items():
        if capability.honours(name, value):
            continue
        if name in LAYOUT:
            raise _without(capability.engine, name, value)
        honoured = capability.honoured(name)
        assert honoured is not None
        changes[name] = honoured[0]
        if name in config.differences(TrialConfig()):
            left_out.append(f"{name}={value}")
    adapted = config.replace(changes)
    refusals = capability.refusals(adapted, world_size)
    if refusals:
        raise RequestError("engine", refusals[0].message, refusals[0].remedy)
    return Translation(config=adapted, left_out=tuple(left_out))


def target_session(
    document: dict[str, Any],
    engine: str,
    runner: str | None = None,
    command: Mapping[str, Any] | None = None,
    ray_address: str | None = None,
) -> tuple[Session, Translation]:
    """Prepare a session that runs the document's best configuration on the engine.

    Args:
        document: a best-config document.
        engine: the engine's name.
        runner: ray or local; None: the runner of the document's job.
        ray_address: address of the Ray cluster; None: the environment's, else that of the document's job.
        command: the script for the engine `command`, as in a request; None: the tuned script.

    Raises:
        RequestError, AutotuneError, SearchSpaceError: the engine is unknown, or cannot run the configuration here.
    """
    request = _on_engine(run_by(request_of(document), runner, ray_address), engine, command)
    capability = capability_of(engine, request.command)
    best = translate(TrialConfig().replace(document["best"]["config"]), capability, document["launch"]["world_size"])
    target = dataclasses.replace(request, resolved_domains={}, resolved_base=best.config, baseline=None)
    return prepare(target), best


def verify(document: dict[str, Any], session: Session, best: Translation, runner: Runner, rounds: int) -> Verification:
    """Run the best configuration and the baseline alternately for `rounds` rounds.

    Raises:
        RequestError: the best configuration does not run there; the message has its outcome.
    """
    baseline, why = _baseline(document, session, best)
    mine, theirs = list[Repeat](), list[Repeat]()
    losses: tuple[float, ...] = ()
    for number in range(rounds):
        result = runner.run(trial_request(session, f"verify-{number}", best.config, losses))
        mine.append(_measured(result))
        losses = losses or result.losses
        rival = None if baseline is None else runner.run(trial_request(session, f"verify-baseline-{number}", baseline, losses))
        repeat = None if rival is None else repeat_of(rival)
        if rival is not None and repeat is None:
            baseline, why = None, f"the baseline ends {rival.outcome.value} there: {rival.message}"
        elif repeat is not None:
            theirs.append(repeat)
    gain = session.prior.ratio(mine, theirs) if baseline is not None and theirs else None
    promised = (document.get("baseline") or {}).get("gain")
    promised_gain = _interval(promised) if promised and promised.get("of") == "samples_per_second" else None
    return Verification(
        engine=session.request.engine, promised=_interval(document["best"]["measured"]["samples_per_second"]),
        delivered=session.prior.combined(mine), promised_gain=promised_gain, delivered_gain=gain,
        left_out=best.left_out, message=why if gain is None else "",
    )  # fmt: skip


def verified(document: dict[str, Any], verification: Verification) -> dict[str, Any]:
    """Return the document with the verification added. `verified` becomes `target` if the best runs there and is not slower,
    else `native-only`, regardless of earlier verifications."""
    return {**document, "verified": "target" if verification.holds else "native-only", "verification": verification.document()}


def _on_engine(request: JobRequest, engine: str, command: Mapping[str, Any] | None) -> JobRequest:
    if engine != COMMAND and request.command is not None:
        raise RequestError("engine", f"{engine} does not run the script that was tuned", "use command")
    if command is None:
        return dataclasses.replace(request, engine=engine)
    script = CommandModel(**with_command({"engine": engine, "command": command})["command"])
    cluster = request.resolved_cluster
    on_cpu = cluster is not None and cluster.device.kind == "cpu"
    # On CPU, a script's memory is that of whole processes; a limit for tensors does not apply to it.
    limit = None if on_cpu and request.command is None else request.memory_limit
    return dataclasses.replace(
        request, engine=engine, command=script, model=script.name, resolved_model=None, memory_limit=limit
    )


def _without(engine: str, name: str, value: Value) -> RequestError:
    if engine == COMMAND:
        return RequestError("command", f"no placeholder of it carries {name}={value}", f"write {carriers_of(name)} in it")
    problem = f"the {engine} engine does not honour {name}={value}"
    return RequestError("engine", problem, "sweep with --engine of the target, or pin that knob to a value that it honours")


def _baseline(document: dict[str, Any], session: Session, best: Translation) -> tuple[TrialConfig | None, str]:
    baseline_entry = document.get("baseline")
    if not baseline_entry:
        return None, "the document has no baseline"
    config = TrialConfig().replace(baseline_entry["config"])
    try:
        translated = translate(
            config, capability_of(session.request.engine, session.request.command), session.world_size
        ).config
    except RequestError as error:
        return None, f"the baseline does not run there: {error.problem}"
    return (None, "the baseline is the best configuration") if translated == best.config else (translated, "")


def _measured(result: TrialResult) -> Repeat:
    repeat = repeat_of(result)
    if repeat is None:
        problem = f"the best configuration ends {result.outcome.value} there: {result.message}"
        raise RequestError("engine", problem, "sweep with --engine of the target instead")
    return repeat


def _interval(plain: dict[str, Any]) -> Interval:
    return Interval(mean=plain["mean"], low=plain["low"], high=plain["high"])
