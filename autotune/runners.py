"""Runners by name."""

from autotune.errors import RequestError
from autotune.jobs.session import Session
from executor.runners.runner import Runner


def make_runner(session: Session, ray_address: str | None = None) -> Runner:
    """Return the runner that the session's request names, with as many ranks as a trial has.

    Raises:
        RequestError: there is no runner of that name.
        RunnerError: Ray does not start, or has no room for the ranks.
    """
    request = session.request
    device = "cpu" if session.cluster.device.kind == "cpu" else "auto"
    # Imported where it is asked for: Ray takes seconds to load, and the local runner must work where it is not installed.
    if request.runner == "ray":
        from executor.runners.ray.runner import RayRunner

        return RayRunner(session.world_size, address=ray_address, python_path=request.python_path, device=device)
    if request.runner == "local":
        from executor.runners.local import LocalRunner

        return LocalRunner(session.world_size, python_path=request.python_path, device=device)
    raise RequestError("runner", f"{request.runner!r} is not known", "use ray or local")
