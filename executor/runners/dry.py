"""Dry runs from outside: the runner `dry`, and one dry run in a process of its own."""

from collections.abc import Sequence

from executor.dry.result import DryRun
from executor.errors import EngineRefusalError, FactoryError, RunnerError
from executor.runners.gang import Gang
from executor.runners.gang_runner import GangsRunner
from executor.runners.gangs import OneGang
from executor.runners.local import LocalTransport
from executor.runners.messages import Kind
from executor.runners.profile import answer_of
from executor.runners.transport import Death
from executor.runners.verdict import how_it_ended
from search_spaces.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.trial import TrialRequest

NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
"""The devices may be busy, and none is used."""


class DryRunner(GangsRunner):
    """Answers trials of any world size with what a dry run foretells: memory and collectives, no times.

    One warm process serves them all, so that neither torch's fakes nor a user's module touch this one. `backend` is gloo or
    nccl: whose memory is counted beside the engine's. A trial whose peak is beyond its limit is INFEASIBLE.
    """

    def __init__(self, *, backend: str = "gloo", python_path: Sequence[str] = (), trial_function: str | None = None) -> None:
        function = trial_function or f"executor.runners.dry_trial:trial_{backend}"
        transport = LocalTransport(1, environment=NO_DEVICE, trial_function=function)
        super().__init__(OneGang(None, Gang(transport, python_path=python_path, device="cpu")))


def dry_run_model(request: TrialRequest, *, backend: str = "gloo", python_path: Sequence[str] = ()) -> DryRun:
    """Dry-run the request in a process of its own.

    Raises:
        EngineRefusalError: the engine refuses the configuration.
        FactoryError: the user's module or text cannot be used, or the module asks for values.
        RunnerError: no process can be started, it died, or it took longer than the request's `timeout_seconds`.
    """
    transport = LocalTransport(1, environment=NO_DEVICE, trial_function=f"executor.runners.dry_trial:dry_{backend}")
    try:
        transport.start(python_path)
        answer = answer_of(transport, request, "cpu", "no dry run")
    finally:
        transport.close()
    if isinstance(answer, Death):
        raise RunnerError(f"the process of the dry run {how_it_ended(answer)}\n{answer.output}".rstrip())
    if answer["kind"] == Kind.RESULT:
        return from_plain(DryRun, answer["result"])
    if answer["outcome"] == Outcome.INVALID:
        raise EngineRefusalError(answer["rule"], answer["message"])
    told = "\n".join(filter(None, (answer["message"], answer.get("traceback")))).rstrip()
    raise (FactoryError if isinstance(request.model, FactoryModel) else RunnerError)(told)
