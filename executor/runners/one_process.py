"""Runs in one short-lived process: a description of a factory, a profile, a dry run, a quick measurement; the runner `dry`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from executor.errors import EngineRefusalError, FactoryError, MemoryLimitError, RunnerError
from executor.measurement.flops import ModelProfile
from executor.runners.gang import Gang, assign_devices
from executor.runners.gang_runner import GangRunner
from executor.runners.local import LocalTransport
from executor.runners.rank_process import for_trials
from executor.runners.transport import LOOPBACK, NO_VARIABLES, Death, Message, MessageKind, thread_environment
from executor.runners.verdict import how_it_ended
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest, MicrobenchmarkResult
from search_spaces.environment import variables_of
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import DryRun, TrialRequest, Workload

NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
"""Hides the devices: they may be busy, and a dry run uses none."""


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
    variables = variables_of(request.config.environment)
    answer = _answer_of(transport, request, python_path, variables, device, "no profile", "that profiled")
    if answer["kind"] == MessageKind.RESULT:
        return from_plain(ModelProfile, answer["result"])
    if answer["outcome"] == Outcome.INFEASIBLE:
        remedy = "use a smaller micro_batch_size, a shorter --sequence-length or activation_checkpointing=full"
        raise MemoryLimitError(f"the step does not fit in memory ({answer['message']}); {remedy}")
    raise _error_of(request, answer)


def dry_run_model(request: TrialRequest, *, backend: str = "gloo", python_path: Sequence[str] = ()) -> DryRun:
    """Dry-run the request in its own process.

    Raises:
        EngineRefusalError: the engine refuses the configuration.
        FactoryError: the user's module or text cannot be used, or the module reads the value of a tensor.
        RunnerError: no process can be started, it died, or it took longer than the request's `timeout_seconds`.
    """
    transport = LocalTransport(1, environment=NO_DEVICE, trial_function=f"executor.runners.dry_trial:dry_{backend}")
    answer = _answer_of(transport, request, python_path, NO_VARIABLES, "cpu", "no dry run", "of the dry run")
    if answer["kind"] == MessageKind.RESULT:
        return from_plain(DryRun, answer["result"])
    raise _error_of(request, answer)


class DryRunner(GangRunner):
    """Answers trials of any world size with the predictions of a dry run: memory and collectives, but no times.

    One warm process serves all of them, so that torch's fake tensors and a user's module stay out of this process. `backend`
    (gloo or nccl) is the one whose memory is added to the engine's. A trial whose peak exceeds its limit is INFEASIBLE.
    """

    def __init__(self, *, backend: str = "gloo", python_path: Sequence[str] = (), trial_function: str | None = None) -> None:
        function = trial_function or f"executor.runners.dry_trial:trial_{backend}"
        transport = LocalTransport(1, environment=NO_DEVICE, trial_function=function)
        super().__init__(None, Gang(transport, python_path=python_path, device="cpu"))


def _answer_of(
    transport: LocalTransport,
    request: TrialRequest,
    python_path: Sequence[str],
    variables: Mapping[str, str],
    device: str,
    late: str,
    process: str,
) -> Message:
    """Run the request on the single process of `transport`, end the process and return its `result` or `failure`.

    Raises:
        RunnerError: no answer in time (the message begins with `late`), or the process (its description) died.
    """
    until = time.monotonic() + request.timeout_seconds
    try:
        transport.start(python_path, variables)
        while (remaining := until - time.monotonic()) > 0:
            for _, message in transport.receive(remaining):
                if isinstance(message, Death):
                    raise RunnerError(f"the process {process} {how_it_ended(message)}\n{message.output}".rstrip())
                match message["kind"]:
                    case MessageKind.READY:
                        world = {"rank": 0, "world_size": 1, "address": transport.address, "port": None}
                        transport.send(0, {"kind": MessageKind.JOIN, **world, **assign_devices([message], device)[0]})
                    case MessageKind.JOINED:
                        transport.send(0, {"kind": MessageKind.RUN, "request": to_plain(request)})
                    case MessageKind.RESULT | MessageKind.FAILURE:
                        return message
    finally:
        transport.close()
    raise RunnerError(f"{late} within {request.timeout_seconds:g} s; take a smaller model, or fewer or shorter samples")


def _error_of(request: TrialRequest, failure: Message) -> Exception:
    """The exception for a `failure`. Our own errors are described by the message; only other code's have a traceback."""
    if failure["outcome"] == Outcome.INVALID:
        return EngineRefusalError(failure["rule"], failure["message"])
    text = "\n".join(filter(None, (failure["message"], failure.get("traceback")))).rstrip()
    return (FactoryError if isinstance(request.model, FactoryModel) else RunnerError)(text)


def describe_factory(
    reference: str,
    workload: Workload,
    python_path: Sequence[str] = (),
    precisions: Sequence[str] = ("fp32", "bf16"),
    without_data: bool = False,
    device_kind: str = "cpu",
) -> FactoryModel:
    """Build `module:factory` once on the CPU, in its own process, and return its description, with `python_path`.

    Args:
        reference: `module:factory` or `hf:CONFIG`.
        workload: the workload whose batches `hf:CONFIG` gets.
        python_path: folders that are prepended to the process's `sys.path`.
        precisions: those of the profile's traces.
        without_data: build it without memory for its parameters, and refuse it if it has no profile.
        device_kind: of the devices that the profile is for.

    Raises:
        FactoryError: the factory violates the Protocol, or raises; in that case its traceback follows the message.
        RunnerError: no process can be started.
    """
    # Without an accelerator: the devices may be busy, and the parameters are only counted.
    transport = LocalTransport(1, environment=NO_DEVICE)
    # Time for a fresh process to import its code and the user's, and to build the module.
    probe_seconds = 300.0
    try:
        transport.start(python_path)
        transport.send(0, {"kind": MessageKind.DESCRIBE, "reference": reference, "workload": to_plain(workload),
                           "precisions": [*precisions], "without_data": without_data,
                           "device_kind": device_kind})  # fmt: skip
        until, ready = time.monotonic() + probe_seconds, False
        while (remaining := until - time.monotonic()) > 0:
            for _, message in transport.receive(remaining):
                if isinstance(message, Death):
                    ended = f"{reference}: its process {how_it_ended(message)}; fix the factory"
                    raise FactoryError(f"{ended}\n{message.output}".rstrip())
                match message["kind"]:
                    case MessageKind.READY:
                        ready = True
                    case MessageKind.DESCRIBED:
                        return replace(from_plain(FactoryModel, message["model"]), python_path=tuple(python_path))
                    case MessageKind.FAILURE if not ready:
                        raise RunnerError(f"a rank process did not start: {message['message']}\n{message['traceback']}")
                    case MessageKind.FAILURE:
                        # Our own errors are described by the message; there is a traceback only if the user's code raised.
                        raise FactoryError("\n".join(filter(None, (message["message"], message["traceback"]))).rstrip())
    finally:
        transport.close()
    raise FactoryError(f"{reference} did not return within {probe_seconds:g} s; build a smaller module, or a faster way")


TIMEOUT_SECONDS = 15.0
"""On a machine that takes longer, the measurement would be meaningless."""


def measure_processors(world_size: int) -> MicrobenchmarkResult:
    """Measure with `world_size` ranks on this machine's CPUs, each with its share of the cores, as trials are run.

    Raises:
        RunnerError: the ranks did not start, failed, or took too long.
    """
    request = MicrobenchmarkRequest(attempt="quick", world_size=world_size, precisions=("fp32",), quick=True)
    threads = thread_environment(len(os.sched_getaffinity(0)), world_size)
    # As in rank_main, no module of the user is imported, whatever the working directory contains.
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from executor.measurement.microbenchmark import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**for_trials(os.environ), **LOOPBACK, **threads},
        text=True,
        process_group=0,
    )
    try:
        output, errors = process.communicate(json.dumps(to_plain(request)), timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RunnerError(
            f"the quick micro-benchmark took more than {TIMEOUT_SECONDS:g} s; run `autotune calibrate`"
        ) from error
    finally:
        # The other ranks are in its process group; none may outlive it, however it ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        raise RunnerError(f"the quick micro-benchmark failed: {last}; run `autotune calibrate`")
    return from_plain(MicrobenchmarkResult, json.loads(output))
