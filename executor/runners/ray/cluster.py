"""Ray itself: joined where it runs, started where it does not; and the placement of a gang on it."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from executor.errors import RunnerError

OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""Messages between ranks and the runner are a few kilobytes."""


class RayCluster:
    """The connection to Ray. One that is there already is used and left alone; one that is made here is ended by `close`."""

    def __init__(self, address: str | None, cores: int) -> None:
        began = time.monotonic()
        self.started = not ray.is_initialized()
        if self.started:
            try:
                with _handlers_kept():
                    _connect(address, cores)
            except KeyboardInterrupt:
                self.close()
                raise
        self.startup_seconds = time.monotonic() - began

    def close(self) -> None:
        """Disconnect, and end the Ray that was started here. May be called twice."""
        if self.started and ray.is_initialized():
            ray.shutdown()
        self.started = False


def place(world_size: int, bundle: Mapping[str, float], timeout: float) -> PlacementGroup:
    """Reserve a bundle of resources for each rank, close together.

    Raises:
        RunnerError: not placed within `timeout` seconds, with what is missing: Ray itself would wait for ever.
    """
    group = placement_group([dict(bundle) for _ in range(world_size)], strategy="PACK")
    if group.wait(timeout):
        return group
    state = placement_group_table(group).get("stats", {}).get("scheduling_state", "PENDING")
    remove_placement_group(group)
    raise RunnerError(
        f"{world_size} ranks cannot be placed on Ray within {timeout:g} s ({state}): {_missing(world_size, bundle)}"
    )


def _missing(world_size: int, bundle: Mapping[str, float]) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    short = [
        f"{world_size * amount:g} {name} wanted, {free.get(name, 0):g} free of {total.get(name, 0):g}"
        for name, amount in bundle.items()
        if world_size * amount > free.get(name, 0)
    ]
    return "; ".join(short or [f"no node has room for {_listed(bundle)}"]) + "; give fewer ranks or add nodes"


def _listed(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Let Ctrl-C take effect afterwards: a Ray that was interrupted while it started leaves its agents behind.

    And leave SIGTERM to whoever handles it: Ray takes it for itself and ends the process by it, whatever is under way.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    terminated = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if callable(terminated):  # where nobody does, Ray's own way ends what it has started
            signal.signal(signal.SIGTERM, terminated)
    if came and callable(former):
        former(*came[0])


def _connect(address: str | None, cores: int) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(address=address or "local", **options)
    except Exception as error:
        what = f"the Ray cluster at {address} does not answer" if address else "Ray does not start on this machine"
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RunnerError(f"{what}: {line}; check the address with `ray status`, or use the local runner") from error
