"""The nodes of the Ray cluster, by names that stay."""

import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from search_spaces.trial import NodeEvent

LOOK_SECONDS = 1.0
"""How often Ray is asked which nodes live."""
KNOCK_SECONDS = 0.5
"""How long a node is knocked at that is in doubt."""
SILENT_SECONDS = 5.0
"""How often one is knocked at that did not answer."""
_ID_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live node of the cluster."""

    name: str
    """Ray's name of it, its address where nobody gave it one; with some digits of its id where several nodes share a name."""
    node_id: str
    """Ray's own: a node that is started again has another."""
    address: str
    """Where its ranks are reached."""
    port: int
    """Where Ray itself listens on it."""
    host: str
    """The machine's name: fake nodes on one machine share it, and its cores."""
    resources: Mapping[str, float]
    """What Ray has on it, in all."""


class NodeWatch:
    """Tells which nodes came and went since it was made.

    Ray takes many seconds to call a node dead. One that is in doubt, because an actor on it is out of reach, is asked itself:
    where Ray does not answer there it is lost, until it answers again.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._silent: dict[str, float] = {}
        self.nodes: dict[str, Node] = {}
        """The live nodes by name."""
        self.look()

    def look(self) -> list[NodeEvent]:
        """Ask Ray; return what has changed since the last time."""
        self._looked_at = time.monotonic()
        alive = [row for row in ray.nodes() if row["Alive"]]
        self._knock_again(alive)
        rows = [row for row in alive if row["NodeID"] not in self._silent]
        self._name(rows)
        now = {self._names[row["NodeID"]]: _node(self._names[row["NodeID"]], row) for row in rows}
        # A node that was started again between two looks is lost and added.
        gone = [name for name, node in self.nodes.items() if name not in now or now[name].node_id != node.node_id]
        came = [name for name in now if name not in self.nodes or name in gone]
        self.nodes = {name: now[name] for name in sorted(now)}
        lost = [NodeEvent(node=name, kind="lost", message="Ray has lost the node") for name in gone]
        return [*lost, *(NodeEvent(node=name, kind="added", message="the node has joined Ray") for name in came)]

    def look_if_due(self) -> list[NodeEvent]:
        """`look`, once in `LOOK_SECONDS`."""
        return self.look() if time.monotonic() - self._looked_at >= LOOK_SECONDS else []

    def doubt(self, name: str) -> list[NodeEvent]:
        """An actor on this node is out of reach: return what is to be told of it."""
        node = self.nodes.get(name)
        if node is None or _answers(node.address, node.port):
            return []
        self._silent[node.node_id] = time.monotonic()
        return self.look()

    def _knock_again(self, alive: list[dict[str, Any]]) -> None:
        """Forget the silence of those that answer, and of those that Ray has given up too."""
        rows = {row["NodeID"]: row for row in alive if row["NodeID"] in self._silent}
        self._silent = {node_id: since for node_id, since in self._silent.items() if node_id in rows}
        for node_id, since in list(self._silent.items()):
            if time.monotonic() - since < SILENT_SECONDS:
                continue
            self._silent[node_id] = time.monotonic()
            if _answers(rows[node_id]["NodeManagerAddress"], rows[node_id]["NodeManagerPort"]):
                del self._silent[node_id]

    def _name(self, rows: list[dict[str, Any]]) -> None:
        """Give names to those that have none. A name that was given once stays with its node."""
        alike = Counter(own_name(row) for row in rows)
        taken = {self._names[row["NodeID"]] for row in rows if row["NodeID"] in self._names}
        for row in rows:
            own = own_name(row)
            self._names.setdefault(row["NodeID"], node_name(row, shared=alike[own] > 1 or own in taken))


def own_name(row: Mapping[str, Any]) -> str:
    """Of a row of Ray's own table: the name that Ray has for the node, its address where nobody gave it one."""
    return str(row.get("NodeName") or row["NodeManagerAddress"])


def node_name(row: Mapping[str, Any], *, shared: bool) -> str:
    """What the node is called by us; `shared`: several live nodes have its own name."""
    return f"{own_name(row)}-{row['NodeID'][:_ID_DIGITS]}" if shared else own_name(row)


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
        socket.create_connection((address, port), KNOCK_SECONDS).close()
    except OSError:
        return False
    return True
