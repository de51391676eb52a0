"""Probes a user's factory before the first trial: checks the Protocol and measures the size of its module."""

import time
from collections.abc import Sequence
from dataclasses import replace

from executor.errors import FactoryError, RunnerError
from executor.runners.local import LocalTransport
from executor.runners.messages import Kind
from executor.runners.transport import Death
from executor.runners.verdict import Report, how_it_ended
from search_spaces.models.model import FactoryModel
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Workload

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
        transport.send(0, {"kind": Kind.DESCRIBE, "reference": reference, "workload": to_plain(workload),
                           "precisions": [*precisions], "without_data": without_data})  # fmt: skip
        return replace(_model(reference, _answer(transport)), python_path=tuple(python_path))
    finally:
        transport.close()


def _answer(transport: LocalTransport) -> Report | None:
    until = time.monotonic() + PROBE_SECONDS
    ready = False
    while (left := until - time.monotonic()) > 0:
        for _, message in transport.receive(left):
            if not isinstance(message, Death) and message["kind"] == Kind.OUTPUT:
                continue
            if isinstance(message, Death) or message["kind"] != Kind.READY:
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
    if answer["kind"] == Kind.FAILURE:
        # Our own errors are described by the message; there is a traceback only if the user's code raised.
        raise FactoryError("\n".join(filter(None, (answer["message"], answer["traceback"]))).rstrip())
    return from_plain(FactoryModel, answer["model"])
