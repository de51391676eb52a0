"""The nodes of the Ray cluster, with stable names."""

import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from search_spaces.trial import NodeEvent

REFRESH_SECONDS = 1.0
"""How often Ray is asked which nodes are alive."""
CONNECT_SECONDS = 0.5
"""Timeout of a connection to a node that may be lost."""
RETRY_SECONDS = 5.0
"""How often a node that did not answer is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live node of the cluster."""

    name: str
    """Ray's node name, or its address if it has no name; with some digits of its ID if several nodes share a name."""
    node_id: str
    """Ray's ID. A node that is restarted gets a new one."""
    address: str
    """The address of its ranks."""
    port: int
    """The port on which Ray itself listens."""
    host: str
    """The machine's name: fake nodes on one machine share it, and its cores."""
    resources: Mapping[str, float]
    """All of its Ray resources."""


class NodeTracker:
    """Tracks the live nodes, and reports which have joined and which were lost.

    Ray takes many seconds to declare a node dead. If an actor on a node is out of reach, the node is contacted directly: if Ray
    does not answer there, it is lost until it answers again.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._silent: dict[str, float] = {}
        self.nodes: dict[str, Node] = {}
        """The live nodes by name."""
        self.refresh()

    def refresh(self) -> list[NodeEvent]:
        """Query Ray and return the changes since the last time."""
        self._refreshed_at = time.monotonic()
        alive = [row for row in ray.nodes() if row["Alive"]]
        self._retry_silent(alive)
        rows = [row for row in alive if row["NodeID"] not in self._silent]
        self._name(rows)
        now = {self._names[row["NodeID"]]: _node(self._names[row["NodeID"]], row) for row in rows}
        # A node that was restarted between two queries is both lost and added.
        gone = [name for name, node in self.nodes.items() if name not in now or now[name].node_id != node.node_id]
        added = [name for name in now if name not in self.nodes or name in gone]
        self.nodes = {name: now[name] for name in sorted(now)}
        lost = [NodeEvent(node=name, kind="lost", message="Ray has lost the node") for name in gone]
        return [*lost, *(NodeEvent(node=name, kind="added", message="the node has joined Ray") for name in added)]

    def refresh_if_due(self) -> list[NodeEvent]:
        """Call `refresh` at most once in `REFRESH_SECONDS`."""
        return self.refresh() if time.monotonic() - self._refreshed_at >= REFRESH_SECONDS else []

    def check(self, name: str) -> list[NodeEvent]:
        """Contact a node on which an actor is out of reach; return the resulting events."""
        node = self.nodes.get(name)
        if node is None or _answers(node.address, node.port):
            return []
        self._silent[node.node_id] = time.monotonic()
        return self.refresh()

    def _retry_silent(self, alive: list[dict[str, Any]]) -> None:
        """Clear the silent mark of nodes that answer again, and of nodes that Ray has declared dead."""
        rows = {row["NodeID"]: row for row in alive if row["NodeID"] in self._silent}
        self._silent = {node_id: since for node_id, since in self._silent.items() if node_id in rows}
        for node_id, since in list(self._silent.items()):
            if time.monotonic() - since < RETRY_SECONDS:
                continue
            self._silent[node_id] = time.monotonic()
            if _answers(rows[node_id]["NodeManagerAddress"], rows[node_id]["NodeManagerPort"]):
                del self._silent[node_id]

    def _name(self, rows: list[dict[str, Any]]) -> None:
        """Name the nodes that have no name yet. A node keeps its name."""
        alike = Counter(own_name(row) for row in rows)
        used_names = {self._names[row["NodeID"]] for row in rows if row["NodeID"] in self._names}
        for row in rows:
            name = own_name(row)
            self._names.setdefault(row["NodeID"], node_name(row, shared=alike[name] > 1 or name in used_names))


def own_name(row: Mapping[str, Any]) -> str:
    """Return the node's name in a row of Ray's own table, or its address if it has no name."""
    return str(row.get("NodeName") or row["NodeManagerAddress"])


def node_name(row: Mapping[str, Any], *, shared: bool) -> str:
    """Return our name of the node; `shared`: several live nodes have its own name."""
    return f"{own_name(row)}-{row['NodeID'][:6]}" if shared else own_name(row)


def _node(name: str, row: Mapping[str, Any]) -> Node:
    return Node(
        name=name,
        node_id=row["NodeID"],
        address=row["NodeManagerAddress"],
        port=row["NodeManagerPort"],
        host=row["NodeManagerHostname"],
        resources=row["Resources"],
    )


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
