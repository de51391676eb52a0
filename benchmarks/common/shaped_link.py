"""Two network namespaces joined by a link of a given rate, so that communication costs as much as on a network.

It needs Linux, root, `ip` and `tc`; `why_not` returns what is missing.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

_CLONE_NEWNET = 0x40000000
_OWN = Path("/proc/thread-self/ns/net")
PREFIX = "atbench"
NAMESPACES = Path("/run/netns")
INTERFACE = "link0"
"""Name of the link's end in each namespace."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""They cannot clash: the namespaces are not reachable from outside."""


def why_not() -> str | None:
    """The reason why this machine cannot shape a link; None: it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with ShapedLink("500mbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


@dataclass
class ShapedLink:
    """A context manager: both namespaces and the link exist inside the context.

    Names carry this process's id; namespaces that a killed process left are removed on entry.
    """

    rate: str
    """Rate of each direction, as `tc` writes it: 500mbit."""
    burst: str = "256kb"
    """Bytes sent at full speed after a pause: more than the kernel's largest segment (64 kB), 4 ms of 500 Mbit/s."""
    names: tuple[str, str] = field(init=False)

    def __enter__(self) -> Self:
        remove_orphans()
        mark = uuid.uuid4().hex[:6]
        self.names = (f"{PREFIX}-{os.getpid()}-{mark}-0", f"{PREFIX}-{os.getpid()}-{mark}-1")
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def command(self, end: int) -> list[str]:
        """Prefix that makes a command run at this end of the link."""
        return ["ip", "netns", "exec", self.names[end]]

    def _create(self) -> None:
        for name in self.names:
            run_command("ip", "netns", "add", name)
        ends = ("peer", "name", INTERFACE, "netns", self.names[1])
        run_command("ip", "-n", self.names[0], "link", "add", INTERFACE, "type", "veth", *ends)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            run_command("ip", "-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
            shape = ("tbf", "rate", self.rate, "burst", self.burst, "latency", "50ms")
            run_command("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shape)
            for device in ("lo", INTERFACE):
                run_command("ip", "-n", name, "link", "set", device, "up")

    def _remove(self) -> None:
        """Deleting the namespaces also removes the link."""
        for name in self.names:
            if (NAMESPACES / name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@dataclass
class ShapedLoopback:
    """A context manager: inside the context a network namespace exists whose loopback has a given rate.

    For programs that start all ranks on one host and cannot start each in a separate namespace.
    """

    rate: str
    """Rate that both directions share, as `tc` writes it: 1gbit."""
    burst: str = "256kb"
    name: str = field(init=False)

    def __enter__(self) -> Self:
        remove_orphans()
        self.name = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:6]}-lo"
        run_command("ip", "netns", "add", self.name)
        try:
            shape = ("tbf", "rate", self.rate, "burst", self.burst, "latency", "50ms")
            run_command("tc", "-n", self.name, "qdisc", "add", "dev", "lo", "root", *shape)
            run_command("ip", "-n", self.name, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Move this thread, and the processes it starts, into the namespace."""
        return entered(self.name)

    def _remove(self) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True)


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Move this thread, and the processes it starts, into the network namespace `name`.

    Raises:
        OSError: the namespace does not exist, or the system denies access.
    """
    before = os.open(_OWN, os.O_RDONLY)
    there = os.open(NAMESPACES / name, os.O_RDONLY)
    try:
        _set_namespace(there)
        yield
    finally:
        _set_namespace(before)
        os.close(there)
        os.close(before)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def sent_bytes() -> int:
    """Bytes that this process's end of the link has sent, headers included; 0 without a link."""
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def remove_orphans() -> None:
    """Remove the namespaces that killed processes left."""
    for path in NAMESPACES.glob(f"{PREFIX}-*") if NAMESPACES.exists() else ():
        owner = path.name.split("-")[1]
        if not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)


def run_command(*command: str) -> None:
    """Raises:
    subprocess.CalledProcessError: the command failed; `stderr` has the reason.
    """
    subprocess.run(command, check=True, capture_output=True, text=True)
