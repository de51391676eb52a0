"""Names of nodes, and what is told of those that go and come."""

import socket

import pytest
import ray

from executor.runners.ray import nodes
from executor.runners.ray.nodes import NodeTracker
from tests.ports import free_port


def row(node_id: str, name: str = "", address: str = "10.0.0.1", alive: bool = True, port: int = 0) -> dict:
    return {
        "NodeID": node_id, "NodeName": name, "NodeManagerAddress": address, "NodeManagerHostname": "host", "Alive": alive,
        "Resources": {"CPU": 1.0}, "NodeManagerPort": port,
    }  # fmt: skip


class Table:
    """What Ray answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rows: dict) -> None:
        self.rows = list(rows)
        monkeypatch.setattr(ray, "nodes", lambda: self.rows)


def told(tracker: NodeTracker) -> list[tuple[str, str]]:
    return [(event.kind, event.node) for event in tracker.refresh()]


def test_a_node_has_its_given_name_or_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    Table(monkeypatch, row("aaaaaaaa", "rack-1"), row("bbbbbbbb", address="10.0.0.2"), row("cccccccc", "gone", alive=False))
    assert sorted(NodeTracker().nodes) == ["10.0.0.2", "rack-1"]


def test_nodes_that_share_a_name_are_told_apart_and_the_first_one_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, row("aaaaaaaa"))
    tracker = NodeTracker()
    table.rows += [row("bbbbbbbb")]
    assert told(tracker) == [("added", "10.0.0.1-bbbbbb")]
    named = {name: node.node_id for name, node in tracker.nodes.items()}
    assert named == {"10.0.0.1": "aaaaaaaa", "10.0.0.1-bbbbbb": "bbbbbbbb"}
    assert sorted(NodeTracker().nodes) == ["10.0.0.1-aaaaaa", "10.0.0.1-bbbbbb"]


def test_a_node_that_is_started_again_is_lost_and_added_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, row("aaaaaaaa", "n"))
    tracker = NodeTracker()
    assert told(tracker) == []
    table.rows = [row("aaaaaaaa", "n", alive=False), row("bbbbbbbb", "n")]
    assert told(tracker) == [("lost", "n"), ("added", "n")]
    table.rows = [row("bbbbbbbb", "n", alive=False)]
    assert told(tracker) == [("lost", "n")]
    assert tracker.nodes == {}
    table.rows += [row("cccccccc", "n")]
    assert told(tracker) == [("added", "n")]


def test_a_node_in_doubt_is_lost_while_ray_does_not_answer_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "RETRY_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", free_port())) as listening:
        port = listening.getsockname()[1]
        Table(monkeypatch, row("aaaaaaaa", "n", "127.0.0.1", port=port))
        tracker = NodeTracker()
        assert tracker.check("n") == []
    assert [(event.kind, event.node) for event in tracker.check("n")] == [("lost", "n")]
    assert told(tracker) == []
    with socket.create_server(("127.0.0.1", port)):
        assert told(tracker) == [("added", "n")]
