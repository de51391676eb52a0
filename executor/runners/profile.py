"""Runs one rank process that describes a user's factory, or profiles a model, and ends."""

import time
from collections.abc import Sequence
from dataclasses import replace

from executor.errors import EngineRefusalError, FactoryError, MemoryLimitError, RunnerError
from executor.measurement.module_profile import ModelProfile
from executor.runners import devices
from executor.runners.local import LocalTransport
from executor.runners.messages import Message, MessageKind
from executor.runners.transport import Death
from executor.runners.verdict import Report, how_it_ended
from search_spaces.environment import variables_of
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import TrialRequest, Workload


def profile_model(request: TrialRequest, *, python_path: Sequence[str] = (), device: str = "auto") -> ModelProfile:
    """Profile the request's model with its configuration, in its own process, with all cores of this machine.

    `device` is `auto` (an accelerator if available), `cpu` or `cuda`.

    Raises:
        EngineRefusalError: the engine refuses the configuration.
        MemoryLimitError: the step does not fit in memory.
        FactoryError: the user's module or text cannot be used.
        RunnerError: no process can be started, it died, or it took longer than the request's `timeout_seconds`.
    """
    transport = LocalTransport(1, environment={}, trial_function="executor.profile:run_profile")
    try:
        transport.start(python_path, variables_of(request.config.environment))
        return _profile_of(request, answer_of(transport, request, device, "no profile"))
    finally:
        transport.close()


def answer_of(transport: LocalTransport, request: TrialRequest, device: str, late: str) -> Report:
    """Run the request on the single process of `transport` and return the answer.

    Raises:
        RunnerError: no answer in time; the message begins with `late`.
    """
    until = time.monotonic() + request.timeout_seconds
    while (remaining := until - time.monotonic()) > 0:
        for _, message in transport.receive(remaining):
            if isinstance(message, Death):
                return message
            match message["kind"]:
                case MessageKind.READY:
                    transport.send(0, _joining(transport, message, device))
                case MessageKind.JOINED:
                    transport.send(0, {"kind": MessageKind.RUN, "request": to_plain(request)})
                case MessageKind.RESULT | MessageKind.FAILURE:
                    return message
    raise RunnerError(f"{late} within {request.timeout_seconds:g} s; take a smaller model, or fewer or shorter samples")


def _joining(transport: LocalTransport, ready: Message, device: str) -> Message:
    (assignment,) = devices.assign([ready], device)
    return {"kind": MessageKind.JOIN, "rank": 0, "world_size": 1, "address": transport.address, "port": None, **assignment}


def _profile_of(request: TrialRequest, answer: Report) -> ModelProfile:
    if isinstance(answer, Death):
        raise RunnerError(f"the process that profiled {how_it_ended(answer)}\n{answer.output}".rstrip())
    if answer["kind"] == MessageKind.RESULT:
        return from_plain(ModelProfile, answer["result"])
    match answer["outcome"]:
        case Outcome.INVALID:
            raise EngineRefusalError(answer["rule"], answer["message"])
        case Outcome.INFEASIBLE:
            remedy = "use a smaller micro_batch_size, a shorter --sequence-length or activation_checkpointing=full"
            raise MemoryLimitError(f"the step does not fit in memory ({answer['message']}); {remedy}")
        case _:
            # Our own errors are described by the message; there is a traceback only if other code raised.
            text = "\n".join(filter(None, (answer["message"], answer.get("traceback")))).rstrip()
            raise (FactoryError if isinstance(request.model, FactoryModel) else RunnerError)(text)


PROBE_SECONDS = 300.0
"""Time for a fresh process to import its code and the user's, and to build the module."""


def describe_factory(
    reference: str,
    workload: Workload,
    python_path: Sequence[str] = (),
    precisions: Sequence[str] = ("fp32", "bf16"),
    without_data: bool = False,
) -> FactoryModel:
    """Build `module:factory` once on the CPU, in its own process, and return its description, with `python_path`.

    Args:
        reference: `module:factory` or `hf:CONFIG`.
        workload: the workload whose batches `hf:CONFIG` gets.
        python_path: folders that are prepended to the process's `sys.path`.
        precisions: those of the profile's traces.
        without_data: build it without memory for its parameters, and refuse it if it has no profile.

    Raises:
        FactoryError: the factory violates the Protocol, or raises; in that case its traceback follows the message.
        RunnerError: no process can be started.
    """
    # Without an accelerator: the devices may be busy, and the parameters are only counted.
    transport = LocalTransport(1, environment={"CUDA_VISIBLE_DEVICES": ""})
    try:
        transport.start(python_path)
        transport.send(0, {"kind": MessageKind.DESCRIBE, "reference": reference, "workload": to_plain(workload),
                           "precisions": [*precisions], "without_data": without_data})  # fmt: skip
        return replace(_model(reference, _answer(transport)), python_path=tuple(python_path))
    finally:
        transport.close()


def _answer(transport: LocalTransport) -> Report | None:
    until = time.monotonic() + PROBE_SECONDS
    ready = False
    while (remaining := until - time.monotonic()) > 0:
        for _, message in transport.receive(remaining):
            if not isinstance(message, Death) and message["kind"] == MessageKind.OUTPUT:
                continue
            if isinstance(message, Death) or message["kind"] != MessageKind.READY:
                if not ready and not isinstance(message, Death):
                    raise RunnerError(f"a rank process did not start: {message['message']}\n{message['traceback']}")
                return message
            ready = True
    return None


def _model(reference: str, answer: Report | None) -> FactoryModel:
    if answer is None:
        raise FactoryError(f"{reference} did not return within {PROBE_SECONDS:g} s; build a smaller module, or a faster way")
    if isinstance(answer, Death):
        raise FactoryError(f"{reference}: its process {how_it_ended(answer)}; fix the factory\n{answer.output}".rstrip())
    if answer["kind"] == MessageKind.FAILURE:
        # Our own errors are described by the message; there is a traceback only if the user's code raised.
        raise FactoryError("\n".join(filter(None, (answer["message"], answer["traceback"]))).rstrip())
    return from_plain(FactoryModel, answer["model"])
