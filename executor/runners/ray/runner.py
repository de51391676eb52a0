"""The runner on Ray."""

import os
from collections.abc import Mapping, Sequence

import ray

from executor.errors import RunnerError
from executor.runners.gang_runner import GangsRunner
from executor.runners.rank_process import passed_variables
from executor.runners.ray.cluster import RayCluster
from executor.runners.ray.pool import GangPool, PoolSettings
from executor.runners.ray.rank_slots import SlotSettings
from executor.runners.transport import RUN_TRIAL


class RayRunner(GangsRunner):
    """Runs trials on a Ray cluster, several side by side if it is larger than a trial, on ranks that stay warm between trials.

    `world_size` is a trial's usual number of ranks; each trial runs with its own. At most `gangs` trials run at a time; None:
    as many as fit on a joined cluster or on the GPUs of a Ray that is started here, and one on the CPUs of the latter.
    A tensor-parallel group stays within a node, unless `tensor_across_nodes`.

    Without `address` a Ray is started on this machine, with as many CPU slots as ranks if there are fewer cores, and stopped by
    `close`. If the process is already connected to Ray, that connection is used and kept open.
    A rank takes `cpus_per_rank` and `gpus_per_rank`; None: one GPU each for the device `cuda`, and for `auto` if the cluster
    has that many. `resources` are further Ray resources of each rank; `environment` is added to the ranks'.

    Raises:
        RunnerError: Ray does not start or answer, has no GPUs although they are required, or has no capacity for the ranks
            within `placement_seconds`.
    """

    startup_seconds: float
    """Time to start Ray, or to connect."""

    def __init__(
        self,
        world_size: int,
        *,
        address: str | None = None,
        gangs: int | None = None,
        tensor_across_nodes: bool = False,
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
            gpus = _gpus(world_size, gpus_per_rank, device)
            bundle = {"CPU": cpus_per_rank, **({"GPU": gpus} if gpus else {}), **(resources or {})}
            settings = PoolSettings(
                world_size=world_size,
                # Trials side by side on the CPUs of one machine would disturb each other, because they share its memory.
                gangs=1 if gangs is None and self._cluster.started and address is None and not gpus else gangs,
                tensor_across_nodes=tensor_across_nodes,
                placement_seconds=placement_seconds,
                python_path=tuple(python_path),
                device=device,
                own_cores=0 if gpus else max(1, int(cpus_per_rank)),
            )
            variables = {**passed_variables(os.environ), **(environment or {})}
            pool = GangPool(settings, SlotSettings(bundle=bundle, environment=variables, trial_function=trial_function))
        except BaseException:
            self._cluster.close()
            raise
        super().__init__(pool)

    def close(self) -> None:
        """End every process; see `Runner`."""
        super().close()
        self._cluster.close()


def _gpus(world_size: int, requested: float | None, device: str) -> float:
    """Return the GPUs of a rank."""
    cluster_gpus = ray.cluster_resources().get("GPU", 0)
    if requested is None:
        requested = 1.0 if device == "cuda" or (device == "auto" and cluster_gpus >= world_size) else 0.0
    if requested and not cluster_gpus:
        raise RunnerError("the job is for GPUs and the Ray cluster has none; start Ray on nodes that have some, or use the CPU")
    return requested
