"""Starts dry runs: the runner `dry`, and a single dry run in its own process."""

from collections.abc import Sequence

from executor.dry.result import DryRun
from executor.errors import EngineRefusalError, FactoryError, RunnerError
from executor.runners.gang import Gang
from executor.runners.gang_runner import GangsRunner, OneGang
from executor.runners.local import LocalTransport
from executor.runners.messages import MessageKind
from executor.runners.profile import answer_of
from executor.runners.transport import Death
from executor.runners.verdict import how_it_ended
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.trial import TrialRequest

NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}
"""Hides the devices: they may be busy, and a dry run uses none."""


class DryRunner(GangsRunner):
    """Answers trials of any world size with the predictions of a dry run: memory and collectives, but no times.

    One warm process serves all of them, so that torch's fake tensors and a user's module stay out of this process. `backend`
    (gloo or nccl) is the one whose memory is added to the engine's. A trial whose peak exceeds its limit is INFEASIBLE.
    """

    def __init__(self, *, backend: str = "gloo", python_path: Sequence[str] = (), trial_function: str | None = None) -> None:
        function = trial_function or f"executor.runners.dry_trial:trial_{backend}"
        transport = LocalTransport(1, environment=NO_DEVICE, trial_function=function)
        super().__init__(OneGang(None, Gang(transport, python_path=python_path, device="cpu")))


def dry_run_model(request: TrialRequest, *, backend: str = "gloo", python_path: Sequence[str] = ()) -> DryRun:
    """Dry-run the request in its own process.

    Raises:
        EngineRefusalError: the engine refuses the configuration.
        FactoryError: the user's module or text cannot be used, or the module reads the value of a tensor.
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
    if answer["kind"] == MessageKind.RESULT:
        return from_plain(DryRun, answer["result"])
    if answer["outcome"] == Outcome.INVALID:
        raise EngineRefusalError(answer["rule"], answer["message"])
    text = "\n".join(filter(None, (answer["message"], answer.get("traceback")))).rstrip()
    raise (FactoryError if isinstance(request.model, FactoryModel) else RunnerError)(text)
