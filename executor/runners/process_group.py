"""Joins and leaves the process group of a gang."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from executor.engine import RankContext
from executor.parallel.collectives import group_options
from executor.runners.messages import Message


def join(message: Message, announce: Callable[[int], None]) -> RankContext:
    """Leave the previous group, if any, and join the one that `message` describes.

    Rank 0 lets the system choose the rendezvous port and announces it: a port chosen in advance could be taken by another
    program before rank 0 binds it.
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
    _set_environment(message, store.port)
    dist.init_process_group(
        message["backend"],
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if message["backend"] == "nccl" else None,
        pg_options=group_options(message["backend"]),
    )
    control = dist.new_group(backend="gloo") if world_size > 1 else None
    return RankContext(
        rank=rank,
        world_size=world_size,
        device=device,
        control_group=control,
        reusable_groups={},
        ranks_on_host=message["local_world_size"],
        shares_device=message["shares_device"],
    )


def abort() -> None:
    """Leave every process group immediately, without waiting for collectives in flight or for other ranks.

    This ends NCCL's collectives, even one that another thread waits for. It does not end gloo's, so their connections are
    closed: of any two ranks one has accepted the connection and closes it here. Waiting operations then fail on both sides.
    """
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
        _close_accepted()


def _close_accepted() -> None:
    """Close every TCP connection that this process has accepted: gloo's, and those of the rendezvous store."""
    connections = list(_tcp_sockets())
    listening = {listener.getsockname()[1] for listener in connections if _listens(listener)}
    for connection in connections:
        with connection, contextlib.suppress(OSError):  # the other side may have closed it
            if not _listens(connection) and connection.getsockname()[1] in listening:
                connection.shutdown(socket.SHUT_RDWR)


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, each with a duplicated descriptor; none if the system does not list them."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  only names are needed
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                    continue
                connection = socket.socket(fileno=os.dup(int(name)))
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    yield connection
                else:
                    connection.close()


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_environment(message: Message, port: int) -> None:
    """Set the variables that every launcher sets and from which users' code reads its rank."""
    os.environ |= {
        "RANK": str(message["rank"]),
        "WORLD_SIZE": str(message["world_size"]),
        "LOCAL_RANK": str(message["local_rank"]),
        "LOCAL_WORLD_SIZE": str(message["local_world_size"]),
        "MASTER_ADDR": message["address"],
        "MASTER_PORT": str(port),
    }
