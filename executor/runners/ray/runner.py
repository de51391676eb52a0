"""The runner on Ray."""

import os
from collections.abc import Mapping, Sequence

import ray

from executor.runners.gang import Gang
from executor.runners.gang_runner import GangRunner
from executor.runners.ray.cluster import RayCluster
from executor.runners.ray.transport import RayTransport
from executor.runners.transport import RUN_TRIAL


class RayRunner(GangRunner):
    """Runs trials on `world_size` ranks of a Ray cluster, one trial at a time; ranks and actors stay warm between trials.

    Without `address` a Ray on this machine is started, with as many CPU slots as ranks where there are fewer cores, and
    ended by `close`. Where the process is connected to Ray already, that connection is used and left alone.
    A rank takes `cpus_per_rank` and `gpus_per_rank`: None is one GPU each where the cluster has that many, else none.
    `resources` are further Ray resources for each rank; `environment` is added to the ranks'.

    Raises:
        RunnerError: Ray does not start or answer, or has no room for the ranks within `placement_seconds`.
    """

    startup_seconds: float
    """What it took to start Ray, or to connect."""

    def __init__(
        self,
        world_size: int,
        *,
        address: str | None = None,
        python_path: Sequence[str] = (),
        cpus_per_rank: float = 1.0,
        gpus_per_rank: float | None = None,
        resources: Mapping[str, float] | None = None,
        placement_seconds: float = 60.0,
        device: str = "auto",
        environment: Mapping[str, str] | None = None,
        trial_function: str = RUN_TRIAL,
    ) -> None:
        cores = max(len(os.sched_getaffinity(0)), int(world_size * cpus_per_rank + 0.999))
        self._cluster = RayCluster(address, cores)
        self.startup_seconds = self._cluster.startup_seconds
        try:
            transport = RayTransport(
                world_size,
                bundle={**_bundle(world_size, cpus_per_rank, gpus_per_rank, device), **(resources or {})},
                placement_seconds=placement_seconds,
                environment=environment or {},
                trial_function=trial_function,
            )
        except BaseException:
            self._cluster.close()
            raise
        super().__init__(transport, Gang(transport, python_path=python_path, device=device))

    def close(self) -> None:
        """End every process; see `Runner`."""
        super().close()
        self._cluster.close()


def _bundle(world_size: int, cpus: float, gpus: float | None, device: str) -> dict[str, float]:
    if gpus is None:
        enough = device != "cpu" and ray.cluster_resources().get("GPU", 0) >= world_size
        gpus = 1.0 if enough else 0.0
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
