"""Which device each rank gets."""

import pytest

from executor.errors import RunnerError
from executor.runners.gang import assign_devices, device_order


def ready(
    host: str = "a", kind: str | None = "cuda", count: int = 2, visible: str | None = None, build: str = "cuda", driver: int = 0
) -> dict:
    torch = {"torch": "2.13.0+cpu" if build == "cpu" else "2.13.0", "torch_build": build, "driver_devices": driver}
    return {"host": host, "accelerator": kind, "device_count": count, "visible_devices": visible, **torch}


NONE = {"kind": None, "count": 0}


def told(places: list[dict], *names: str) -> list[tuple]:
    return [tuple(place[name] for name in names) for place in places]


def test_ranks_of_a_host_take_its_devices_in_turn() -> None:
    places = assign_devices([ready("a"), ready("a"), ready("b"), ready("b")], "auto")
    assert told(places, "device", "backend", "local_rank", "local_world_size") == [
        ("cuda:0", "nccl", 0, 2), ("cuda:1", "nccl", 1, 2), ("cuda:0", "nccl", 0, 2), ("cuda:1", "nccl", 1, 2),
    ]  # fmt: skip


def test_ranks_that_each_see_their_own_device_have_it_as_their_first() -> None:
    places = assign_devices([ready(count=1, visible="0"), ready(count=1, visible="1")], "auto")
    assert told(places, "device", "backend", "local_rank") == [("cuda:0", "nccl", 0), ("cuda:0", "nccl", 1)]


def test_ranks_of_a_host_are_in_the_order_of_its_devices() -> None:
    seen = [("a", "10"), ("b", "1,0"), ("a", "2"), ("b", "0"), ("a", "3")]
    assert device_order([ready(host, visible=visible) for host, visible in seen]) == [2, 3, 4, 1, 0]
    assert device_order([ready("a"), ready("b"), ready("a")]) == [0, 1, 2]


def test_ranks_that_share_a_device_are_joined_by_gloo() -> None:
    places = assign_devices([ready(count=1), ready(count=1)], "auto")
    assert told(places, "device", "backend", "shares_device") == [("cuda:0", "gloo", True)] * 2


@pytest.mark.parametrize(("rank", "device"), [(ready(**NONE, build="cpu"), "auto"), (ready(**NONE), "auto"), (ready(), "cpu")])
def test_ranks_run_on_the_cpu_where_there_is_no_device_or_it_is_asked_for(rank: dict, device: str) -> None:
    assert told(assign_devices([rank, rank], device), "device", "backend", "shares_device") == [("cpu", "gloo", False)] * 2


NO_BUILD = "torch 2.13.0+cpu on host b is built for cpu; install the CUDA build of torch there"
NO_DEVICE = (
    "torch 2.13.0 on host b finds no cuda device (CUDA_VISIBLE_DEVICES=-1); check nvidia-smi and CUDA_VISIBLE_DEVICES there, "
    "or use fewer ranks"
)


@pytest.mark.parametrize(
    ("first", "device", "second", "why"),
    [
        (ready(), "cuda", {"build": "cpu"}, NO_BUILD),
        (ready("b", **NONE, build="cpu"), "cuda", {"build": "cpu"}, NO_BUILD),
        (ready("b", **NONE, build="cpu", driver=8), "auto", {"build": "cpu", "driver": 8}, NO_BUILD),
        (ready(), "auto", {"visible": "-1"}, NO_DEVICE),
    ],
)
def test_a_rank_that_cannot_provide_the_device_is_an_error_with_a_remedy(
    first: dict, device: str, second: dict, why: str
) -> None:
    """It is asked for, or another rank has one, or the driver lists what torch cannot use: CPUs never stand in for it."""
    with pytest.raises(RunnerError) as raised:
        assign_devices([first, ready("b", **NONE, **second)], device)
    needs = f"device: this job needs cuda, but {why}"
    assert str(raised.value) == f"{needs}, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
