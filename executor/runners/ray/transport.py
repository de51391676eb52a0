"""Rank processes under Ray actors."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executor.errors import RunnerError
from executor.runners import rank_process
from executor.runners.messages import Message, decode, encode
from executor.runners.ray import actor
from executor.runners.ray.actor import CONTROL, RankActor
from executor.runners.ray.cluster import place
from executor.runners.transport import LOOPBACK, RANK_MAIN, RUN_TRIAL, Death, Transport, thread_environment

ACTOR_SECONDS = 60.0
"""Time for the actors to come up and tell where they are."""
KILL_SECONDS = 5.0
"""Time for an actor to end its rank; then the actor itself is killed, and the system kills the rank with it."""


class RayTransport(Transport):
    """One actor a rank in one placement group; actors outlive their rank processes.

    Raises:
        RunnerError: the ranks cannot be placed, or their actors do not come up.
    """

    def __init__(
        self,
        world_size: int,
        *,
        bundle: Mapping[str, float],
        placement_seconds: float,
        environment: Mapping[str, str],
        trial_function: str = RUN_TRIAL,
    ) -> None:
        self.world_size = world_size
        self._bundle = bundle
        self._environment = environment
        self._trial_function = trial_function
        self._life = 0
        self._streams: dict[Any, int] = {}
        self._actors: list[Any] = []
        self._group: PlacementGroup | None = place(world_size, bundle, placement_seconds)
        try:
            self._start_actors()
        except BaseException:
            self.close()
            raise

    def start(self, python_path: Sequence[str]) -> None:
        """Start every rank; see `Transport`."""
        if not self._actors:
            self._start_actors()
        self._life += 1
        for rank, handle in enumerate(self._actors):
            options = {
                "trial_function": self._trial_function,
                "python_path": list(python_path),
                "environment": self._rank_environment(rank),
            }
            stream = handle.run_rank.options(num_returns="streaming").remote(self._life, RANK_MAIN, options)
            self._streams[stream] = rank

    def send(self, rank: int, message: Message) -> None:
        """Send to a rank; see `Transport`."""
        if self._actors:
            self._actors[rank].send.options(concurrency_group=CONTROL).remote(encode(message))

    def receive(self, timeout: float) -> list[tuple[int, Message | Death]]:
        """What came; see `Transport`."""
        if not self._streams:
            time.sleep(timeout)
            return []
        heard: list[tuple[int, Message | Death]] = []
        while ready := ray.wait(list(self._streams), num_returns=1, timeout=0 if heard else timeout)[0]:
            heard += self._hear(ready[0])
            if not self._streams:
                break
        return heard

    def kill(self) -> None:
        """End every rank; see `Transport`."""
        self._streams.clear()
        if not self._actors:
            return
        calls = [handle.kill.options(concurrency_group=CONTROL).remote(self._life) for handle in self._actors]
        try:
            ray.get(calls, timeout=KILL_SECONDS)
        except ray.exceptions.RayError:
            self._end_actors()

    def close(self) -> None:
        """End ranks and actors and give the placement back; see `Transport`."""
        if not ray.is_initialized():
            return
        self.kill()
        self._end_actors()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _start_actors(self) -> None:
        for module in (actor, rank_process):
            ray.cloudpickle.register_pickle_by_value(module)
        remote = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={CONTROL: 1})(RankActor)
        self._actors = [self._start_actor(remote, index) for index in range(self.world_size)]
        try:
            self._places = ray.get([handle.describe.remote() for handle in self._actors], timeout=ACTOR_SECONDS)
        except ray.exceptions.RayError as error:
            self._end_actors()
            raise RunnerError(f"the Ray actors of the ranks did not come up: {error}; look at `ray status`") from error
        self.address = self._places[0]["address"]

    def _start_actor(self, remote: Any, index: int) -> Any:
        return remote.options(
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            resources={name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        ).remote()

    def _end_actors(self) -> None:
        for handle in self._actors:
            ray.kill(handle)
        self._actors.clear()

    def _rank_environment(self, rank: int) -> dict[str, str]:
        place = self._places[rank]
        hosts = [other["host"] for other in self._places]
        alone = LOOPBACK if len(set(hosts)) == 1 else {}
        return {**alone, **thread_environment(place["cores"], hosts.count(place["host"])), **self._environment}

    def _hear(self, stream: Any) -> list[tuple[int, Message | Death]]:
        """The next item of a stream. A stream that ends has told the rank's death; one that breaks tells it is out of reach."""
        rank = self._streams[stream]
        try:
            item = ray.get(next(stream))
        except StopIteration:
            del self._streams[stream]
            return []
        except ray.exceptions.RayTaskError as error:
            raise RunnerError(f"rank {rank} cannot be run under Ray: {error.cause}; look at the limits of its node") from error
        except ray.exceptions.RayError as error:
            del self._streams[stream]
            return [(rank, Death(output=str(error)))]
        if isinstance(item, bytes):
            return [(rank, decode(item))]
        return [(rank, Death(exit_code=item[0], output=item[1]))]
