"""The collectives of one mesh dimension, and the marking of tensors for the memory account."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

# Older torch has these two functions under other names, with the same behaviour; in 2.13 the old names warn.
all_gather_single: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_use_count: Callable[[Tensor], int] | None = getattr(Tensor, "_use_count", None)
"""References to a tensor, from Python and from the backend; None if this torch does not report them."""


class Observer(Protocol):
    """Observes an engine from outside, such as a dry run, which has no allocator that reports."""

    def marked(self, tag: str, value: Tensor) -> None:
        """Called when the engine marks `value`'s storage as belonging to `tag`."""

    def started(self) -> object:
        """Called when a collective was started. The returned object is kept until the collective has been waited for."""

    def rows(self, counts: Tensor, total: int) -> list[int]:
        """Values to assume for `counts`, which sum to `total`, if tensors hold no data."""


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Call `observer` for what engines do on this thread."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def rows_of(counts: Tensor, total: int) -> list[int]:
    """The numbers of rows in the tensor `counts`, read on the host; they sum to `total`."""
    observer = _observer.get()
    return counts.flatten().tolist() if observer is None else observer.rows(counts, total)


class InFlight:
    """A collective in flight."""

    _BACKEND_SECONDS = 0.001
    """Seconds that a memory account gives the backend's thread to release a finished collective."""

    def __init__(self, start: Callable[[], dist.Work | None], *aliases: Tensor, clock: "Clock | None" = None) -> None:
        """`aliases` are views created only for this collective; `clock` counts the time spent in `wait`."""
        self._clock = clock
        self._aliases = aliases if accounting() and _use_count is not None else ()
        self._uses = [_use_count(alias) for alias in self._aliases] if _use_count is not None else []
        self._work = start()
        observer = _observer.get()
        self._observed = None if observer is None or self._work is None else observer.started()

    def wait(self) -> None:
        """Return when the result may be used; on CUDA, by the current stream.

        The backend's thread may release a collective's tensors a moment after it has signalled completion, and memory freed on
        that thread is not reported. While memory is accounted for, wait until that thread has released them.
        """
        work, self._work = self._work, None
        if work is None:
            return
        with nullcontext() if self._clock is None else self._clock.running():
            work.wait()
        self._observed = None
        if self._aliases:
            time.sleep(self._BACKEND_SECONDS)
            del work
            self._wait_for_backend()

    def _wait_for_backend(self) -> None:
        assert _use_count is not None
        until = time.monotonic() + 100 * self._BACKEND_SECONDS
        pairs = list(zip(self._aliases, self._uses, strict=True))
        while any(_use_count(alias) > uses for alias, uses in pairs) and time.monotonic() < until:
            time.sleep(self._BACKEND_SECONDS / 10)
        self._aliases = ()


def group_options(backend: str) -> Any:
    """Options for a process group of this backend; a new object for each group. None: the defaults.

    NCCL's kernels run on high-priority streams: a ready reduction gets the next free multiprocessors and does not wait behind
    the queued kernels of backward.
    """
    if backend != dist.Backend.NCCL:
        return None
    options: Any = dist.ProcessGroupNCCL.Options()  # missing in CPU builds
    options.is_high_priority_stream = True
    return options


class Clock:
    """Counts seconds of this rank's thread, such as those spent waiting for other ranks. A reading costs about 1 us."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time spent inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


class ProcessGroup:
    """A process group of one mesh dimension. With one rank, results are copied and nothing is sent."""

    by_name: ClassVar[WeakValueDictionary[str, "ProcessGroup"]] = WeakValueDictionary()

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int, clock: Clock | None = None) -> None:
        self.group, self.size, self.rank = group, size, rank
        self.name = next(name for name in map(str, count()) if name not in self.by_name)
        """With which compiled code refers to it; free again for the groups of the next trial, whose code is then the same."""
        self.by_name[self.name] = self
        self.clock = clock or Clock()
        self.sent: dict[str, tuple[int, int]] = {}
        """Operation -> (count, bytes of the full messages) so far."""

    def all_reduce(self, value: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> InFlight:
        """Sum (or reduce by `operation`) in place, asynchronously."""
        if self.size == 1:
            return InFlight(lambda: None)
        self.count("all_reduce", value)
        alias = value.view_as(value)
        send = partial(dist.all_reduce, alias, operation, group=self.group, async_op=True)
        return InFlight(send, alias, clock=self.clock)

    def all_reduce_parts(self, parts: Sequence[Tensor]) -> None:
        """Sum each of `parts` in place, all in one message, and wait."""
        if self.size == 1 or not parts:
            return
        total = torch.cat([part.reshape(-1) for part in parts])
        self.all_reduce(total).wait()
        for part, whole in zip(parts, torch.split(total, [part.numel() for part in parts]), strict=True):
            part.copy_(whole.view_as(part))

    def reduce_scatter(self, output: Tensor, rows: Tensor) -> InFlight:
        """Sum `rows` [ranks, n] over the ranks and leave this rank's row in `output` [n], asynchronously."""
        if self.size == 1:
            output.copy_(rows[0])
            return InFlight(lambda: None)
        self.count("reduce_scatter", rows)
        flat, alias = rows.view(-1), output.view_as(output)
        send = partial(reduce_scatter_single, alias, flat, group=self.group, async_op=True)
        return InFlight(send, alias, flat, clock=self.clock)

    def all_gather(self, rows: Tensor, shard: Tensor) -> InFlight:
        """Gather every rank's `shard` [n] into `rows` [ranks, n], asynchronously."""
        if self.size == 1:
            rows[0].copy_(shard)
            return InFlight(lambda: None)
        self.count("all_gather", rows)
        flat, alias = rows.view(-1), shard.view_as(shard)
        send = partial(all_gather_single, flat, alias, group=self.group, async_op=True)
        return InFlight(send, flat, alias, clock=self.clock)

    def all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], returns: bool = False
    ) -> InFlight:
        """Send each rank its part of `parts` [n, …], of `sent[rank]` consecutive rows, asynchronously.

        `output` receives the parts of all ranks in order, `received[rank]` rows each. The message size that is counted is that
        of the rank that owns the rows: what it sends, or what it receives if rows come back to it (`returns`).
        """
        if self.size == 1:
            output.copy_(parts)
            return InFlight(lambda: None)
        self.count("all_to_all", output if returns else parts)
        alias, source = output.view_as(output), parts.view_as(parts)
        send = partial(dist.all_to_all_single, alias, source, list(received), list(sent), group=self.group, async_op=True)
        return InFlight(send, alias, source, clock=self.clock)

    def count(self, operation: str, message: Tensor) -> None:
        """Count a sent message: the full one, of which a rank may hold only a part."""
        count, size = self.sent.get(operation, (0, 0))
        # Not `nbytes`, which torch.compile does not support for dynamic sizes.
        self.sent[operation] = (count + 1, size + message.numel() * message.element_size())


def accounting() -> bool:
    """Whether a memory account runs on this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def mark(tag: str, value: Tensor) -> None:
    """Record in a running memory account that `value`'s storage belongs to `tag`. Costs nothing if none runs."""
    if (observer := _observer.get()) is not None:
        observer.marked(tag, value)
    if accounting():
        with record_function(f"autotune.tag:{tag}:{value.untyped_storage().data_ptr()}"):
            pass


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors share a storage, even one without data."""
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)
