"""The part of a checkup that runs on a node.

Ray's workers get this file by value, like `actor`: it imports only the standard library and Ray, torch inside functions, and
returns plain data.
"""

import fcntl
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import statistics
import struct
import subprocess
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

CONNECT_SECONDS = 3.0
JOIN_SECONDS = 30.0
"""Timeout for the two ranks of a pair to connect, and for each collective."""


class NodeProbe:
    """Reports facts about its node, listens on it, connects to other nodes, and acts as one rank of a pair."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._store: Any = None

    def facts(self, rank_main: str) -> dict[str, Any]:
        """Return versions, limits and interfaces as a rank on this node sees them."""
        cards = [
            line.rsplit(", ", 1) for line in _command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        ]
        memory = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return {
            "address": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "resolved": _resolved(),
            "interfaces": _interfaces(),
            "environment": {
                name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name in os.environ
            },
            "versions": {"python": platform.python_version(), **_versions(), **_cuda_versions(cards)},
            "rank_main": Path(rank_main).exists(),
            "shared_memory_bytes": memory.free if memory else None,
            "locked_memory_bytes": None if locked == resource.RLIM_INFINITY else locked,
            "infiniband": any(Path("/sys/class/infiniband").glob("*")),
            "gpus": [card[0] for card in cards],
            "topology": _command("nvidia-smi", "topo", "-m") if len(cards) > 1 else [],
        }

    def listen(self) -> int:
        """Listen on a port that the system chooses, as a rank does; return the port."""
        self._listener = listener = socket.create_server(("", 0), backlog=128)
        threading.Thread(target=_accept_all, args=(listener,), daemon=True).start()
        return int(listener.getsockname()[1])

    def reach(self, addresses: list[tuple[str, int]]) -> list[str]:
        """Return for each (address, port) why it cannot be reached from here; empty: it can be reached."""
        return [_why_unreached(address) for address in addresses]

    def ready(self) -> bool:
        """Return once the probe has been placed."""
        return True

    def open_store(self, address: str) -> int:
        """Open the rendezvous store for the ranks of a pair; return the port."""
        self._store = _store(address, 0, is_master=True)
        return int(self._store.port)

    def all_reduce(self, rank: int, address: str, port: int, sizes: list[int], backend: str) -> dict[str, Any]:
        """Return the seconds of an all-reduce over the pair for each size in bytes, or the problem."""
        import torch
        import torch.distributed as dist

        limit = timedelta(seconds=JOIN_SECONDS)
        try:
            store = self._store or _store(address, port, is_master=False)
            dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=limit)
            device = torch.device("cuda" if backend == "nccl" else "cpu")
            return {"seconds": [_median_seconds(torch.ones(size // 4, device=device)) for size in sizes]}
        except Exception as error:
            return {"problem": (str(error).strip().splitlines() or [type(error).__name__])[0]}
        finally:
            with suppress(Exception):
                dist.destroy_process_group()
            self._store = None


def _store(address: str, port: int, is_master: bool) -> Any:
    import torch.distributed as dist

    limit = timedelta(seconds=JOIN_SECONDS)
    return dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]


def _median_seconds(message: Any) -> float:
    import torch
    import torch.distributed as dist

    seconds = []
    # Runs of each message, of which the median is taken.
    for _ in range(2 + 7):
        if message.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(message)
        if message.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def _command(*words: str) -> list[str]:
    """Return the lines of a command's output; empty if the command does not exist or fails."""
    try:
        process = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in process.stdout.splitlines() if line.strip()]


def installed(distributions: dict[str, str]) -> dict[str, str]:
    """Return name -> version of the installed distributions, without importing them."""
    versions = {}
    for name, distribution in distributions.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(distribution)
    return versions


def _versions() -> dict[str, str]:
    return installed({"ray": "ray", "torch": "torch", "autotune": "autotune-parallel"})


def _cuda_versions(cards: list[list[str]]) -> dict[str, str]:
    if not cards:
        return {}
    versions = {"driver": cards[0][-1]}
    with suppress(Exception):  # torch built without CUDA
        import torch

        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions


def _interfaces() -> dict[str, str]:
    """Return interface -> IPv4 address, for interfaces with one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                # Linux's SIOCGIFADDR.
                answer = fcntl.ioctl(udp_socket.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _resolved() -> str:
    """Return the address to which the host's own name resolves. gloo listens there if no interface is set."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _accept_all(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


def _why_unreached(address: tuple[str, int]) -> str:
    try:
        socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""
