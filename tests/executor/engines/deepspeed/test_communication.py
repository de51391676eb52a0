"""What is entered in the account of a backend's calls. Needs no DeepSpeed: the backend is made up."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from executor.engines.deepspeed.engine import Account
from search_spaces.mesh import Mesh

GROUPS = {"pair of tensor ranks": [0, 1], "pair of data ranks": [0, 2], "alone": [0], None: [0, 1, 2, 3]}


class Backend:
    """Takes the arguments of DeepSpeed's own, in their order, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> str:
        self.calls.append("all_reduce")
        return "work"

    def reduce_scatter_tensor(self, output_tensor: Any, input_tensor: Any, op: Any = None, group: Any = None) -> None:
        self.calls.append("reduce_scatter_tensor")

    def all_gather_coalesced(self, output_tensors: Any, input_tensors: Any, group: Any = None, async_op: bool = False) -> None:
        self.calls.append("all_gather_coalesced")

    def send(self, tensor: Any, dst: int, group: Any = None, tag: int = 0) -> None:
        self.calls.append("send")

    def isend(self, tensor: Any, dst: int, group: Any = None, tag: int = 0) -> None:
        self.calls.append("isend")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(dist, "get_process_group_ranks", GROUPS.__getitem__)
    return Backend()


def test_messages_are_counted_by_operation_and_dimension(backend: Backend) -> None:
    account = Account(Mesh(tensor=2, data=2))
    account.attach(backend)
    value = torch.zeros(10)
    assert backend.all_reduce(value, None, "pair of tensor ranks") == "work"
    backend.all_reduce(tensor=value, group="pair of tensor ranks")
    backend.all_reduce(value)
    backend.all_reduce(value, group="alone")
    backend.reduce_scatter_tensor(value[:5], value, group="pair of data ranks")
    backend.all_gather_coalesced([value, value], [value[:5], value[:5]], "pair of data ranks")
    backend.send(value, 2)
    assert account.sent == {
        ("all_reduce", "tensor"): (2, 80),
        ("all_reduce", "world"): (1, 40),
        ("reduce_scatter", "data"): (1, 40),
        ("all_gather", "data"): (2, 80),
        ("send", "pipeline"): (1, 40),
    }
    assert len(backend.calls) == 7


def test_a_backend_is_itself_again_afterwards(backend: Backend) -> None:
    account = Account(Mesh(data=4))
    account.attach(backend)
    account.detach()
    account.detach()
    backend.all_reduce(torch.zeros(1))
    assert account.sent == {}
    assert vars(backend) == {"calls": ["all_reduce"]}
