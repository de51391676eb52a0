"""A trial's memory: the peak of a step by tag, the resident set, and the limit of its host memory."""

import gc
import re
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from executor.engine import HOST, TAGS, PrivatePool, RankContext
from executor.measurement.device import counters_of
from search_spaces.clusters.presets import host_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """The memory of one optimizer step on this rank, in bytes."""

    peak: int
    by_tag: dict[str, int]
    """The peak, split by tag; the sum is the peak."""
    tag_peaks: dict[str, int]
    """Each tag's own highest value in the step."""
    at_start: dict[str, int]
    """Live memory before the step, split by tag."""
    host_peak: int = 0
    """Bytes of host memory that offloading uses; not included in the numbers above. Steps do not allocate there."""
    outside: int | None = None
    """Device memory in use outside torch's allocator after the step, when every collective has been set up; not included in the
    numbers above. None: the device does not report it."""

    @property
    def needed(self) -> int:
        """The device memory that the step needs."""
        return self.peak + (self.outside or 0)


@dataclass(slots=True)
class _Allocation:
    """One allocation."""

    size: int
    tag: str


def account_step(
    step: Callable[[], object],
    storages: Callable[[], Iterable[tuple[str, Tensor]]],
    device: torch.device,
    pool: PrivatePool | None = None,
) -> MemoryAccount:
    """Run `step` once under the profiler and account for it.

    1. Before the step, the engine names every live storage with its tag (`storages`), which is the start of the account. On a
       device whose allocator reports its total, memory that the engine does not name counts as buffers. The private pool of
       graphs (`pool`) is present throughout, with the tags that the engine gives: a replay allocates nothing.
    2. The allocator reports every allocation of the step and its release. (On the CPU it does not report the release of memory
       allocated before the profiler started; by the engine's contract no named storage is released in a step.)
    3. The events are replayed in order of time. An allocation is an activation unless the engine marks it
       (`autotune.tag:TAG:ADDRESS`) or the communication backend allocated it for itself (buffers).
    4. On a device whose allocator reports its peak, that is the peak: autograd's device thread releases the gradients that an
       operator has read without a report, so that the replay holds them until their memory is used again.

    On every device, allocators report to the CPU profiler. Recording CUDA kernels too would start CUPTI, which slows down
    graphs captured before it.
    """
    counters = counters_of(device)
    # Reference cycles would be freed at a random point of the step.
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        blocks, host = _named_storages(storages(), device)
        allocated = counters.allocated_bytes()
        if allocated is not None and pool is not None:
            allocated -= pool.allocated
        counters.reset_peaks()
        # acc_events avoids torch 2.11's warning that events of other cycles are cleared. There is only one cycle.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorder:
            step()
            counters.synchronize()
    finally:
        if collecting:
            gc.enable()
    pool_bytes = {} if pool is None else pool.by_tag
    account = _replay(_events(recorder), blocks, device, allocated, sum(host.values()), pool_bytes)
    highest = counters.peak_allocated_bytes()
    if highest is not None:
        account = _with_peak(account, highest if pool is None else highest - pool.allocated + sum(pool_bytes.values()))
    return replace(account, outside=counters.outside_bytes())


def _with_peak(account: MemoryAccount, peak: int) -> MemoryAccount:
    """The account with the allocator's own peak. Activations are what is released unseen; rounding counts as buffers."""
    unseen = min(max(account.peak - peak, 0), account.by_tag["activations"])
    by_tag = {**account.by_tag, "activations": account.by_tag["activations"] - unseen}
    by_tag["buffers"] += peak - sum(by_tag.values())
    highest = {**account.tag_peaks, "activations": account.tag_peaks["activations"] - unseen}
    return replace(account, peak=peak, by_tag=by_tag, tag_peaks={tag: max(highest[tag], by_tag[tag]) for tag in TAGS})


def _named_storages(
    storages: Iterable[tuple[str, Tensor]], device: torch.device
) -> tuple[dict[int, _Allocation], dict[int, int]]:
    """Return by address: live storages on the device (the first tag given holds), and the sizes of those in the host pool."""
    blocks: dict[int, _Allocation] = {}
    host: dict[int, int] = {}
    for tag, value in storages:
        storage = value.untyped_storage()
        if not storage.size():
            continue
        if tag == HOST:
            host[storage.data_ptr()] = storage.size()
        elif storage.device.type == device.type:
            blocks.setdefault(storage.data_ptr(), _Allocation(storage.size(), tag))
    return blocks, host


@dataclass(frozen=True, slots=True)
class _Event:
    """An allocation (size > 0), a release (size < 0), or a mark."""

    time: int
    kind: str
    address: int = 0
    size: int = 0
    tag: str = ""
    device: str = "cpu"


def _events(recorder: Any) -> list[_Event]:
    """Return the recorded events of all threads in order of time."""
    events: list[_Event] = []
    stack = [(node, False) for node in recorder.profiler.kineto_results.experimental_event_tree()]
    while stack:
        node, in_backend = stack.pop()
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            tag, kind = "buffers" if in_backend else "activations", fields.device.type
            events.append(
                _Event(node.start_time_ns, "memory", address=fields.ptr, size=fields.alloc_size, tag=tag, device=kind)
            )
        else:
            name = node.name
            if mark := re.fullmatch(r"autotune\.tag:(\w+):(\d+)", name):
                events.append(_Event(node.start_time_ns, "mark", tag=mark[1], address=int(mark[2])))
            # Inside these operators the backend allocates memory for itself.
            in_backend = in_backend or name.startswith(("c10d::", "gloo:", "nccl:"))
        stack.extend((child, in_backend) for child in node.children)
    return sorted(events, key=lambda event: event.time)


def _replay(
    events: list[_Event],
    blocks: dict[int, _Allocation],
    device: torch.device,
    allocated: int | None,
    host: int,
    pool_bytes: Mapping[str, int],
) -> MemoryAccount:
    """Two passes: first find the final tag of every allocation, then follow the sums."""
    live = dict(blocks)
    if allocated is not None:
        # The rest that a device's allocator holds: rounding, and tensors that no step releases.
        live[-1] = _Allocation(max(allocated - sum(block.size for block in live.values()), 0), "buffers")
    first = list(live.values())
    changes = _changes(events, live, device)
    at_start = Counter[str](pool_bytes)
    for block in first:
        at_start[block.tag] += block.size
    peak, by_tag, tag_peaks = _follow(at_start, changes)
    return MemoryAccount(
        peak=peak,
        by_tag={tag: by_tag[tag] for tag in TAGS},
        tag_peaks={tag: tag_peaks[tag] for tag in TAGS},
        at_start={tag: at_start[tag] for tag in TAGS},
        host_peak=host,
    )


def _changes(events: Iterable[_Event], live: dict[int, _Allocation], device: torch.device) -> list[tuple[int, _Allocation]]:
    """Return (+size or -size, block) in order. A mark changes a block's tag for its whole life. Updates `live`."""
    changes: list[tuple[int, _Allocation]] = []
    for event in events:
        if event.kind == "mark" and event.address in live:
            live[event.address].tag = event.tag
        elif event.kind == "memory" and event.device == device.type:
            if event.address in live:
                # The block was released, possibly by a thread that does not report: the address is free for a new block.
                block = live.pop(event.address)
                changes.append((-block.size, block))
            if event.size > 0:
                block = live[event.address] = _Allocation(event.size, event.tag)
                changes.append((event.size, block))
    return changes


def _follow(at_start: Counter[str], changes: list[tuple[int, _Allocation]]) -> tuple[int, Counter[str], Counter[str]]:
    now, highest = Counter(at_start), Counter(at_start)
    peak, at_peak = now.total(), Counter(at_start)
    for size, block in changes:
        now[block.tag] += size
        highest[block.tag] = max(highest[block.tag], now[block.tag])
        if now.total() > peak:
            peak, at_peak = now.total(), Counter(now)
    return peak, at_peak, highest


def reset_peak_resident_set() -> None:
    """Reset the kernel's peak resident set (Linux; on other systems the peak covers the process's life)."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        try:
            path.write_text("5")
        except OSError:  # not permitted in some containers: the peak then covers the process's life
            return


def peak_resident_set() -> int:
    """Return this process's peak resident set since the last reset, in bytes; 0 if the kernel does not report it."""
    return _status_bytes("VmHWM") or 0


def _status_bytes(entry: str) -> int | None:
    """Return an entry of this process's status in bytes; None if the kernel does not report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(rf"{entry}:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else None


SLACK_BYTES = 1 << 30
"""For thread stacks, the backend's buffers and memory that the C allocator caches."""


def host_bound(context: RankContext, limit_bytes: int | None, build_bytes: int) -> int | None:
    """Return the bytes by which a rank's host memory may grow in a trial; None: unlimited, as there is no limit.

    On a CPU device the limit applies to host memory: the bound is twice the limit, plus the build's needs and some slack. An
    accelerator's limit does not apply to host memory, which offloading may fill further: the bound is the rank's share of it.

    Args:
        limit_bytes: the trial's limit of device memory per rank.
        build_bytes: memory for building the model before it is sharded.
    """
    if limit_bytes is None:
        return None
    if context.device.type == "cpu":
        return 2 * limit_bytes + build_bytes + SLACK_BYTES
    return host_memory_bytes() // context.ranks_on_host + SLACK_BYTES


@contextmanager
def bounded_memory(growth_bytes: int | None) -> Iterator[None]:
    """Limit the growth of this process's private memory to `growth_bytes` (`host_bound`) inside the block.

    The memory account (`account_step`) decides about the limit; this is the backstop for steps that would not get that far. It
    does nothing without a bound or if the system does not support one. Pinned memory belongs to the driver and is not bounded.
    """
    now = _status_bytes("VmData")  # private writable memory, including untouched pages
    if growth_bytes is None or now is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = now + growth_bytes
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
