"""Finds the fused-kernel packages that are installed on the nodes of a Ray cluster."""

from collections.abc import Mapping, Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from executor.runners.ray import on_node
from executor.runners.ray.cluster import RayCluster
from search_spaces.fused_kernels import PACKAGES

ANSWER_SECONDS = 60.0
"""Time for a process on every node to start and answer."""


def kernel_packages(address: str, node_ids: Sequence[str]) -> dict[str, str] | None:
    """Return module -> version of the packages that all these nodes have in the same version; None: a node did not answer.

    Raises:
        RunnerError: no Ray answers at the address.
    """
    cluster = RayCluster(address, 1)
    try:
        ray.cloudpickle.register_pickle_by_value(on_node)
        return _asked(node_ids)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(on_node)
        cluster.close()


def in_common(answers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the packages that all have in the same version."""
    first = answers[0] if answers else {}
    return {name: version for name, version in first.items() if all(one.get(name) == version for one in answers)}


def _asked(node_ids: Sequence[str]) -> dict[str, str] | None:
    """Query each node by a process that occupies no core, so that it also answers on a busy node."""
    wanted = {package.module: package.distribution for package in PACKAGES.values()}
    ask = ray.remote(max_retries=0)(on_node.installed)
    places = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids]
    calls = [ask.options(num_cpus=0, scheduling_strategy=place).remote(wanted) for place in places]
    done, late = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS) if calls else ([], [])
    for call in late:
        ray.cancel(call, force=True)
    try:
        return None if late or not done else in_common(ray.get(calls))
    except ray.exceptions.RayError:
        return None
