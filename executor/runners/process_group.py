"""How a rank joins and leaves the process group of its gang."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from executor.engine import RankContext
from executor.runners.messages import Message


def join(message: Message, announce: Callable[[int], None]) -> RankContext:
    """Leave the group of before, if any, and join the one that `message` describes.

    Rank 0 lets the system choose the rendezvous port and announces it: a port that is chosen by someone else before it
    is bound can be taken by a third program in between.
    """
    leave()
    if sharing := message.get("cores_shared_by"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharing))
    rank, world_size, device = message["rank"], message["world_size"], torch.device(message["device"])
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    address = (message["address"], message["port"] or 0)
    store = dist.TCPStore(*address, world_size, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    if rank == 0:
        announce(store.port)
    _tell_environment(message, store.port)
    dist.init_process_group(
        message["backend"],
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if message["backend"] == "nccl" else None,
    )
    control = dist.new_group(backend="gloo") if world_size > 1 else None
    return RankContext(
        rank=rank,
        world_size=world_size,
        device=device,
        control_group=control,
        ranks_on_host=message["local_world_size"],
        shares_device=message["shares_device"],
    )


def abort() -> None:
    """Leave every process group at once, whatever is in flight: nothing that other ranks have to take part in is waited for.

    NCCL's collectives end, also one that another thread waits for. gloo has no such thing: its connections close, so that
    other ranks hear of it, when the last reference to a group goes.
    """
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell_environment(message: Message, port: int) -> None:
    """Users' code reads its place from the variables that every launcher sets."""
    os.environ |= {
        "RANK": str(message["rank"]),
        "WORLD_SIZE": str(message["world_size"]),
        "LOCAL_RANK": str(message["local_rank"]),
        "LOCAL_WORLD_SIZE": str(message["local_world_size"]),
        "MASTER_ADDR": message["address"],
        "MASTER_PORT": str(port),
    }
