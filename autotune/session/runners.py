"""Create runners by name."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.cluster.ray_cluster import address_of
from autotune.errors import RequestError
from autotune.session.session import Session
from executor.runners.gang_runner import GangsRunner
from executor.runners.runner import Runner
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig


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
            ranks,
            address=ray_address,
            python_path=python_path,
            device=kind,
            tensor_across_nodes=tensor_across_nodes,
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
