"""Which device each rank gets."""

import pytest

from executor.errors import RunnerError
from executor.runners.devices import assign


def ready(host: str = "a", kind: str | None = "cuda", count: int = 2, visible: str | None = None) -> dict:
    return {"host": host, "accelerator": kind, "device_count": count, "visible_devices": visible}


def told(places: list[dict], *names: str) -> list[tuple]:
    return [tuple(place[name] for name in names) for place in places]


def test_ranks_of_a_host_take_its_devices_in_turn() -> None:
    places = assign([ready("a"), ready("a"), ready("b"), ready("b")], "auto")
    assert told(places, "device", "backend", "local_rank", "local_world_size") == [
        ("cuda:0", "nccl", 0, 2), ("cuda:1", "nccl", 1, 2), ("cuda:0", "nccl", 0, 2), ("cuda:1", "nccl", 1, 2),
    ]  # fmt: skip


def test_ranks_that_each_see_their_own_device_have_it_as_their_first() -> None:
    places = assign([ready(count=1, visible="0"), ready(count=1, visible="1")], "auto")
    assert told(places, "device", "backend", "local_rank") == [("cuda:0", "nccl", 0), ("cuda:0", "nccl", 1)]


def test_ranks_that_share_a_device_are_joined_by_gloo() -> None:
    assert told(assign([ready(count=1), ready(count=1)], "auto"), "device", "backend") == [("cuda:0", "gloo")] * 2


@pytest.mark.parametrize(("other", "device"), [(ready(kind=None, count=0), "auto"), (ready(), "cpu")])
def test_without_an_accelerator_for_all_the_ranks_run_on_the_cpu(other: dict, device: str) -> None:
    assert told(assign([ready(), other], device), "device", "backend") == [("cpu", "gloo")] * 2


def test_an_accelerator_that_is_asked_for_must_be_there() -> None:
    with pytest.raises(RunnerError, match="not every rank sees a cuda device"):
        assign([ready(kind=None, count=0)], "cuda")
