"""Collects facts about every node of a Ray cluster and the network between them. It does not judge them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from executor.runners.ray import on_node
from executor.runners.ray.cluster import RayCluster
from executor.runners.ray.nodes import RayNode, nodes_of
from executor.runners.ray.on_node import NodeProbe
from executor.runners.transport import RANK_MAIN
from search_spaces.plain import from_plain

LARGE_BYTES = 16 * 2**20
"""A message whose time is dominated by bandwidth."""
ANSWER_SECONDS = 60.0
"""Time for the probes of all nodes to start and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts about a node, as a process on it sees them."""

    node: str
    """Its name; see `RayNode`."""
    address: str
    """Where Ray reaches it."""
    host: str
    resolved: str
    """The address to which the host's own name resolves; empty: none."""
    interfaces: dict[str, str]
    """Name -> IPv4 address."""
    environment: dict[str, str]
    """The variables that choose an interface, if set."""
    versions: dict[str, str]
    """python, ray, torch, autotune; with GPUs also driver and NCCL. Missing packages are left out."""
    rank_main: bool
    """Whether the ranks' program is at the same path as on this machine."""
    shared_memory_bytes: int | None
    """Free bytes in /dev/shm; None: there is no /dev/shm."""
    locked_memory_bytes: int | None
    """Limit of the memory that a process may lock; None: no limit."""
    infiniband: bool
    gpus: tuple[str, ...]
    topology: tuple[str, ...]
    """Lines of `nvidia-smi topo -m`; empty with fewer than two GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A port of one node that another node could not connect to."""

    listener: str
    caller: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An all-reduce over one rank on each of two nodes."""

    nodes: tuple[str, str]
    small_seconds: float = 0.0
    """For a message of 4 KiB."""
    large_seconds: float = 0.0
    """For `LARGE_BYTES`."""
    problem: str = ""
    """Why there is no measurement; empty: there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The collected facts."""

    nodes: tuple[RayNode, ...]
    facts: tuple[NodeFacts, ...]
    """Of the nodes that answered."""
    silent: tuple[tuple[str, str], ...]
    """(node, reason) of the nodes that Ray reports as alive and that did not answer."""
    unreached: tuple[Unreached, ...]
    pairs: tuple[Pair, ...]
    backend: str
    """Backend of the pairs: gloo or nccl."""


def check_up(address: str) -> Checkup:
    """Check all live nodes at the same time, then their pairs one after the other.

    Raises:
        RunnerError: no Ray answers at the address.
    """
    cluster = RayCluster(address, 1)
    try:
        ray.cloudpickle.register_pickle_by_value(on_node)
        return _check_up(nodes_of(ray.nodes()))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(on_node)
        cluster.close()


def pairs_of(nodes: Sequence[RayNode]) -> list[tuple[RayNode, RayNode]]:
    """Return the pairs to measure: all of few nodes; of more, each with the next: a bad node shows in both of its pairs."""
    if len(nodes) <= 8:
        return list(itertools.combinations(nodes, 2))
    return list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))


def _check_up(nodes: tuple[RayNode, ...]) -> Checkup:
    living = {node.name: node for node in nodes if node.alive}
    probes = {name: _probe(node, gpus=0) for name, node in living.items()}
    try:
        answers = _each(probes, "facts", RANK_MAIN)
        facts = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
        ports = _each({name: probes[name] for name in facts}, "listen")
        listening = {name: (living[name].address, port) for name, port in ports.items() if isinstance(port, int)}
        unreached = _unreached(probes, listening)
    finally:
        for probe in probes.values():
            ray.kill(probe)
    measured = [living[name] for name in facts]
    backend = "nccl" if measured and all(node.resources.get("GPU", 0) >= 1 for node in measured) else "gloo"
    return Checkup(
        nodes=nodes,
        facts=tuple(from_plain(NodeFacts, {**answer, "node": name}) for name, answer in facts.items()),
        silent=tuple((name, answer) for name, answer in answers.items() if isinstance(answer, str)),
        unreached=tuple(unreached),
        pairs=tuple(_pairs(measured, backend)),
        backend=backend,
    )


def _probe(node: RayNode, gpus: int) -> Any:
    """Start a probe that occupies no core, so that it also runs on a busy node."""
    affinity = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return ray.remote(max_restarts=0)(NodeProbe).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=affinity).remote()


def _each(probes: Mapping[str, Any], method: str, *words: Any) -> dict[str, Any]:
    """Call a method of every probe. Return the answers, or as text the reason why there is none."""
    calls = {name: getattr(probe, method).remote(*words) for name, probe in probes.items()}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_SECONDS)
    return {name: _answer(call) for name, call in calls.items()}


def _answer(call: Any, seconds: float = 1.0) -> Any:
    try:
        return ray.get(call, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        return "it did not answer in time"
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error  # without Ray's traceback around it
        return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _unreached(probes: Mapping[str, Any], listening: Mapping[str, tuple[str, int]]) -> list[Unreached]:
    """Try to reach every listener from every other node."""
    peers = {name: [other for other in listening if other != name] for name in listening}
    calls = {name: probes[name].reach.remote([listening[other] for other in peers[name]]) for name in listening}
    limit = ANSWER_SECONDS + on_node.CONNECT_SECONDS * len(listening)
    unreached = []
    for caller, call in calls.items():
        answer = _answer(call, limit)
        problems = [answer] * len(peers[caller]) if isinstance(answer, str) else answer
        listener_problems = zip(peers[caller], problems, strict=True)
        unreached += [Unreached(listener=to, caller=caller, problem=problem) for to, problem in listener_problems if problem]
    return unreached


def _pairs(nodes: Sequence[RayNode], backend: str) -> list[Pair]:
    """Measure one pair after the other, so that they do not disturb each other. A rank serves all pairs of its node."""
    ranks: dict[str, Any] = {}
    pairs = []
    try:
        for pair in pairs_of(nodes):
            for node in pair:
                if node.name not in ranks:
                    ranks[node.name] = _probe(node, gpus=1 if backend == "nccl" else 0)
            pairs.append(_measured(pair, [ranks[node.name] for node in pair], backend))
            if pairs[-1].problem:  # the state of its ranks is unknown
                for node in pair:
                    ray.kill(ranks.pop(node.name))
    finally:
        for rank in ranks.values():
            ray.kill(rank)
    return pairs


def _measured(nodes: tuple[RayNode, RayNode], ranks: Sequence[Any], backend: str) -> Pair:
    names, address = (nodes[0].name, nodes[1].name), nodes[0].address
    ready = ray.wait([rank.ready.remote() for rank in ranks], num_returns=2, timeout=ANSWER_SECONDS)[0]
    if len(ready) < 2:
        return Pair(nodes=names, problem="no free GPU on them" if backend == "nccl" else "no process starts on them")
    port = _answer(ranks[0].open_store.remote(address), ANSWER_SECONDS)
    if isinstance(port, str):
        return Pair(nodes=names, problem=port)
    # A message whose time is dominated by latency.
    sizes = [4 * 1024, LARGE_BYTES]
    calls = [rank.all_reduce.remote(number, address, port, sizes, backend) for number, rank in enumerate(ranks)]
    answers = [_answer(call, 120.0) for call in calls]
    problems = [answer if isinstance(answer, str) else answer.get("problem", "") for answer in answers]
    if any(problems):
        return Pair(nodes=names, problem=next(filter(None, problems)))
    small, large = (max(answer["seconds"][size_index] for answer in answers) for size_index in range(2))
    return Pair(nodes=names, small_seconds=small, large_seconds=large)
