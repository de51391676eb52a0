"""A look at every node of a Ray cluster, and at what lies between them. Nothing is judged here."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from executor.runners.ray import on_node
from executor.runners.ray.cluster import RayCluster
from executor.runners.ray.describe import RayNode, nodes_of
from executor.runners.ray.on_node import NodeProbe
from executor.runners.transport import RANK_MAIN
from search_spaces.plain import from_plain

SMALL_BYTES = 4 * 1024
"""A message whose time is all latency."""
LARGE_BYTES = 16 * 2**20
"""One whose time is all bandwidth."""
ALL_PAIRS = 8
"""Nodes up to which every pair is measured; of more, each with the next: a bad node shows in both of its pairs."""
ANSWER_SECONDS = 60.0
"""Time for the probes of all nodes to start and answer."""
PAIR_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node as a process on it finds it."""

    node: str
    """Its name; see `RayNode`."""
    address: str
    """Where Ray reaches it."""
    host: str
    resolved: str
    """The address that the host's own name resolves to; empty: none."""
    interfaces: dict[str, str]
    """Name -> IPv4 address."""
    environment: dict[str, str]
    """The variables that choose an interface, where they are set."""
    versions: dict[str, str]
    """python, ray, torch, autotune; with GPUs driver and NCCL. What is not there is left out."""
    rank_main: bool
    """Whether the ranks' program is where it is on this machine."""
    shared_memory_bytes: int | None
    """Free in /dev/shm; None: there is none."""
    locked_memory_bytes: int | None
    """The limit of memory that a process may lock; None: there is no limit."""
    infiniband: bool
    gpus: tuple[str, ...]
    topology: tuple[str, ...]
    """Lines of `nvidia-smi topo -m`; empty with fewer than two GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """A port of one node that another could not connect to."""

    listener: str
    caller: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An all-reduce over one rank on each of two nodes."""

    nodes: tuple[str, str]
    small_seconds: float = 0.0
    """Of `SMALL_BYTES`."""
    large_seconds: float = 0.0
    """Of `LARGE_BYTES`."""
    problem: str = ""
    """Why there are no seconds; empty: there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What was found."""

    nodes: tuple[RayNode, ...]
    facts: tuple[NodeFacts, ...]
    """Of the nodes that answered."""
    silent: tuple[tuple[str, str], ...]
    """Node and reason of those that Ray calls alive and that did not answer."""
    unreached: tuple[Unreached, ...]
    pairs: tuple[Pair, ...]
    backend: str
    """Of the pairs: gloo or nccl."""


def check_up(address: str) -> Checkup:
    """Look at every node that is alive, all at the same time, then at the pairs of them one after the other.

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
    """The pairs that are measured."""
    if len(nodes) <= ALL_PAIRS:
        return list(itertools.combinations(nodes, 2))
    return list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))


def _check_up(nodes: tuple[RayNode, ...]) -> Checkup:
    living = {node.name: node for node in nodes if node.alive}
    probes = {name: _probe(node, gpus=0) for name, node in living.items()}
    try:
        answers = _each(probes, "facts", RANK_MAIN)
        told = {name: answer for name, answer in answers.items() if not isinstance(answer, str)}
        ports = _each({name: probes[name] for name in told}, "listen")
        listening = {name: (living[name].address, port) for name, port in ports.items() if isinstance(port, int)}
        unreached = _unreached(probes, listening)
    finally:
        for probe in probes.values():
            ray.kill(probe)
    measured = [living[name] for name in told]
    backend = "nccl" if measured and all(node.resources.get("GPU", 0) >= 1 for node in measured) else "gloo"
    return Checkup(
        nodes=nodes,
        facts=tuple(from_plain(NodeFacts, {**answer, "node": name}) for name, answer in told.items()),
        silent=tuple((name, answer) for name, answer in answers.items() if isinstance(answer, str)),
        unreached=tuple(unreached),
        pairs=tuple(_pairs(measured, backend)),
        backend=backend,
    )


def _probe(node: RayNode, gpus: int) -> Any:
    """A probe that takes no core: it is to run on a busy node too."""
    here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    return ray.remote(max_restarts=0)(NodeProbe).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=here).remote()


def _each(probes: Mapping[str, Any], method: str, *words: Any) -> dict[str, Any]:
    """The answer of each probe, or, as text, why there is none."""
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
    """Every listener from every other node."""
    others = {name: [other for other in listening if other != name] for name in listening}
    calls = {name: probes[name].reach.remote([listening[other] for other in others[name]]) for name in listening}
    limit = ANSWER_SECONDS + on_node.CONNECT_SECONDS * len(listening)
    found = []
    for caller, call in calls.items():
        told = _answer(call, limit)
        problems = [told] * len(others[caller]) if isinstance(told, str) else told
        asked = zip(others[caller], problems, strict=True)
        found += [Unreached(listener=to, caller=caller, problem=problem) for to, problem in asked if problem]
    return found


def _pairs(nodes: Sequence[RayNode], backend: str) -> list[Pair]:
    """One pair after the other, so that none is measured in another's way; a rank serves all pairs of its node."""
    ranks: dict[str, Any] = {}
    found = []
    try:
        for pair in pairs_of(nodes):
            for node in pair:
                if node.name not in ranks:
                    ranks[node.name] = _probe(node, gpus=1 if backend == "nccl" else 0)
            found.append(_measured(pair, [ranks[node.name] for node in pair], backend))
            if found[-1].problem:  # what is left of it in its ranks is not known
                for node in pair:
                    ray.kill(ranks.pop(node.name))
    finally:
        for rank in ranks.values():
            ray.kill(rank)
    return found


def _measured(nodes: tuple[RayNode, RayNode], ranks: Sequence[Any], backend: str) -> Pair:
    names, address = (nodes[0].name, nodes[1].name), nodes[0].address
    placed = ray.wait([rank.ready.remote() for rank in ranks], num_returns=2, timeout=ANSWER_SECONDS)[0]
    if len(placed) < 2:
        return Pair(nodes=names, problem="no free GPU on them" if backend == "nccl" else "no process starts on them")
    port = _answer(ranks[0].open_store.remote(address), ANSWER_SECONDS)
    if isinstance(port, str):
        return Pair(nodes=names, problem=port)
    sizes = [SMALL_BYTES, LARGE_BYTES]
    calls = [rank.all_reduce.remote(number, address, port, sizes, backend) for number, rank in enumerate(ranks)]
    told = [_answer(call, PAIR_SECONDS) for call in calls]
    problems = [answer if isinstance(answer, str) else answer.get("problem", "") for answer in told]
    if any(problems):
        return Pair(nodes=names, problem=next(filter(None, problems)))
    small, large = (max(answer["seconds"][place] for answer in told) for place in range(2))
    return Pair(nodes=names, small_seconds=small, large_seconds=large)
