"""The network interface that Ray's actors give to gloo and NCCL."""

import pytest

from executor.runners.ray.actor import _variables


def test_both_backends_take_the_interface_of_the_node_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}.items() <= _variables("127.0.0.1", 1).items()
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & _variables("203.0.113.1", 1).keys()


def test_an_interface_that_the_user_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    variables = _variables("127.0.0.1", 1)
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in variables
