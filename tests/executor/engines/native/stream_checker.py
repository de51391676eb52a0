"""A device substitute for tests: the engine's copies, files and collectives run on the CPU, and their order is checked.

Tensors are ordinary CPU tensors, and every operator runs at once. What is checked is the order that a CUDA device would know:
streams are vector clocks, as in `torch.cuda._sanitizer`, and events carry a clock from one stream to another.
"""

import ctypes
import itertools
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from executor.files.rank_file import RankFile, Transfer
from executor.parallel import collectives, copies
from executor.parallel.copies import HostPool

Clock = dict[str, int]
"""Stream -> its operations that are known to have ended, or to end before what comes next."""

aten = torch.ops.aten
READS_VALUES = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
"""The host waits for the current stream, since it needs a value."""
FACTORY = re.compile(r"aten::(new_.*|.*_like)$")
"""Operators that read no data of the tensors they are given."""
DEVICE, PINNED, PAGEABLE = "device", "pinned", "pageable"
HOST, COMPUTE = "host", "compute"
PASSED_BY = ("collectives.", "copies.", "rank_file.RankFile.", "rank_file._")
"""What acts for others: modules, a class, functions."""


@dataclass(frozen=True, slots=True)
class Access:
    """One operation on a part of a memory."""

    stream: str
    time: int
    """The operation's number on its stream."""
    writes: bool
    what: str
    """Operator, and the function of the engine that called it."""
    first: int
    end: int
    """Bytes of the memory, the last one excluded."""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    itemsize: int = 1

    def meets(self, other: "Access") -> bool:
        """Whether both have a byte in common: columns of a matrix lie between each other and have none."""
        if self.first >= other.end or other.first >= self.end:
            return False
        if not self.shape or not other.shape:
            return True
        return not self._elements().isdisjoint(other._elements())

    def _elements(self) -> set[int]:
        places = [
            range(0, size * stride, stride) if stride else (0,) for size, stride in zip(self.shape, self.strides, strict=True)
        ]
        width = range(self.itemsize)
        return {self.first + self.itemsize * sum(place) + byte for place in itertools.product(*places) for byte in width}


@dataclass(slots=True)
class Memory:
    """What a storage, a host buffer or a file holds, and who is at it."""

    kind: str
    made_on: "Stream"
    """The stream whose pool gets it back."""
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    """Streams that `record_stream` has named."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Two operations on one memory that nothing puts in order."""

    verb: str
    """What the later one does: reads, writes, frees."""
    later: Access
    earlier: Access
    kind: str

    def __str__(self) -> str:
        did = "writes" if self.earlier.writes else "reads"
        return (
            f"{self.later.what} on {self.later.stream} {self.verb} {self.kind} memory that {self.earlier.what} on "
            f"{self.earlier.stream} {did}: nothing orders them"
        )


class Stream:
    """Stands for `torch.Stream`."""

    def __init__(self, checker: "StreamChecker", name: str) -> None:
        self.device, self.name, self._checker = torch.device("cpu"), name, checker
        self.clock: Clock = {}

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        join(self.clock, event.clock)

    def record_event(self) -> "Event":
        join(self.clock, self._checker.host.clock)
        return Event(self._checker, dict(self.clock))

    def synchronize(self) -> None:
        join(self._checker.host.clock, self.clock)

    def __enter__(self) -> "Stream":
        self._checker.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._checker.entered.pop()


@dataclass(slots=True)
class Event:
    """Stands for `torch.Event`."""

    _checker: "StreamChecker"
    clock: Clock

    def synchronize(self) -> None:
        join(self._checker.host.clock, self.clock)


class Work:
    """Stands for a collective's `Work`: `wait` lets the current stream come after it, and frees what it holds."""

    def __init__(self, checker: "StreamChecker", stream: Stream, real: Any, held: Sequence[Tensor]) -> None:
        self._checker, self._event, self._real = checker, stream.record_event(), real
        self._number = next(checker.numbers)
        # As NCCL's, which keeps the tensors of one that nobody has waited for until it has ended.
        checker.held[self._number] = list(held)

    def wait(self) -> None:
        self._checker.current().wait_event(self._event)
        self._real.wait()  # in which gloo copies from memory of its own
        self._checker.held.pop(self._number, None)


def join(clock: Clock, other: Clock) -> None:
    """Everything before `other` is before `clock` from now on."""
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class StreamChecker(TorchDispatchMode):
    """Follows every operator, copy, file transfer and collective; `faults` are what nothing puts in order.

    1. Tensors that `HostPool` makes lie on the host, and what operators make of them alone; all others lie on the device.
    2. An operator on device tensors runs on the current stream, after all that the host knew of when it started it. One on host
       tensors runs on the host, which knows of what it has waited for. A copy between pinned memory and the device with
       `non_blocking` runs on the current stream; after any other the host has waited for that stream.
    3. A collective runs on the stream of its group, after the current stream; `wait` joins the current stream. A transfer of a
       file runs by itself, after the host; `wait` joins the host.
    4. A read needs the writes of the same bytes before it, a write the reads as well. New memory counts as written by the
       stream that is current: in its last life that stream may still be at it. Freed memory goes back to the stream that it was
       made on, which must come after all who used it, except those that `record_stream` has named.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[Fault] = []
        self.operations = Counter[str]()
        """By stream."""
        self.numbers = itertools.count()
        self.held: dict[int, list[Tensor]] = {}
        """Tensors of the collectives that nobody has waited for, by their number."""
        self.host, self.compute = Stream(self, HOST), Stream(self, COMPUTE)
        self.entered: list[Stream] = []
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Memory, int]] = {}
        self._regions: list[tuple[int, int, Memory]] = []
        self._files: dict[int, Memory] = {}
        self._groups: dict[tuple[Any, ...], Stream] = {}
        self._names = Counter[str]()

    def current(self) -> Stream:
        return self.entered[-1] if self.entered else self.compute

    def new_stream(self, name: str = "copies") -> Stream:
        self._names[name] += 1
        return Stream(self, f"{name} {self._names[name]}")

    def is_on_host(self, value: Tensor) -> bool:
        return self._memory(value)[0].kind != DEVICE

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "prim", "profiler"):
            return func(*args, **kwargs)
        name = func._schema.name
        reads, writes = _arguments(func, args, kwargs) if not FACTORY.match(name) else ([], [])
        inputs = _tensors((*args, *kwargs.values()))
        sides = [self.is_on_host(value) for value in inputs]
        on_host = bool(inputs) and all(sides)
        crosses = func in (aten.copy_.default, aten._to_copy.default) and any(sides)
        if func is aten._to_copy.default and on_host and kwargs.get("device") is not None:
            on_host = False  # to the device
        if func is aten.copy_.default and sides[0] != sides[1]:
            on_host = False
        if (
            not crosses
            and any(sides)
            and not on_host
            and any(side and value.dim() for side, value in zip(sides, inputs, strict=True))
        ):
            raise TypeError(f"{name} of tensors on the host and on the device, in {_caller()}")
        stream = self.host if on_host else self.current()
        before = {value.untyped_storage()._cdata for value in inputs}
        result = func(*args, **kwargs)
        made = [value for value in _tensors(result) if value.untyped_storage()._cdata not in before]
        if not (reads or writes or made):
            return result
        what = f"{name.removeprefix('aten::')} in {_caller()}"
        self._tick(stream, works="empty" not in name)
        for value in made:
            self._enter(value, PAGEABLE if on_host else DEVICE, stream, what)
        for value in reads:
            self._access(value, False, stream, what)
        for value in writes:
            self._access(value, True, stream, what)
        if crosses and not on_host and not self._runs_beside(func, args, kwargs):
            stream.synchronize()
        if func in READS_VALUES:
            stream.synchronize()
        return result

    def _runs_beside(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the host goes on while a copy runs."""
        beside = kwargs.get("non_blocking", args[2] if func is aten.copy_.default and len(args) > 2 else False)
        kinds = {self._memory(value)[0].kind for value in _tensors(args)}
        return bool(beside) and PAGEABLE not in kinds

    # Memory

    def _memory(self, value: Tensor) -> tuple[Memory, int]:
        """A tensor's memory, and where in it the tensor's storage begins."""
        storage = value.untyped_storage()
        if (entry := self._known.get(storage._cdata)) is not None:
            return entry[1], entry[2]
        address = storage.data_ptr()
        for first, end, memory in self._regions:
            if first <= address < end:
                return self._keep(storage, memory, address - first)
        return self._keep(storage, Memory(DEVICE, self.compute), 0)

    def _keep(self, storage: torch.UntypedStorage, memory: Memory, offset: int) -> tuple[Memory, int]:
        key = storage._cdata
        self._known[key] = weakref.ref(storage, lambda _: self._died(key)), memory, offset
        return memory, offset

    def _enter(self, value: Tensor, kind: str, stream: Stream, what: str) -> None:
        """A tensor that an operator has made."""
        storage = value.untyped_storage()
        if storage._cdata in self._known:
            return
        memory = Memory(kind, stream)
        self._keep(storage, memory, 0)
        memory.accesses.append(Access(stream.name, stream.clock[stream.name], True, what, 0, storage.nbytes()))

    def _died(self, key: int) -> None:
        _, memory, _ = self._known.pop(key)
        if memory.kind == DEVICE:
            self._free(memory)

    def _free(self, memory: Memory) -> None:
        owner = memory.made_on
        clock = owner.record_event().clock
        later = Access(owner.name, 0, True, f"free in {_caller()}", 0, 0)
        for access in memory.accesses:
            if access.stream not in memory.recorded and not _is_before(access, clock):
                self._report("frees", later, access, memory.kind)
        memory.accesses.clear()

    def _resized(self, storage: torch.UntypedStorage, resize: Callable[..., Any], size: int) -> Any:
        entry = self._known.get(storage._cdata)
        if entry is None or size == storage.nbytes():
            return resize(storage, size)
        memory = entry[1]
        self._free(memory)
        memory.recorded.clear()
        result = resize(storage, size)
        if size:
            memory.made_on = stream = self.current()
            self._tick(stream, works=False)
            memory.accesses.append(Access(stream.name, stream.clock[stream.name], True, f"allocation in {_caller()}", 0, size))
        return result

    def _tick(self, stream: Stream, works: bool = True) -> None:
        """The next operation of a stream; where it does not work, it is over with the one before."""
        join(stream.clock, self.host.clock)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + works
        self.operations[stream.name] += works

    def _access(self, value: Tensor, writes: bool, stream: Stream, what: str) -> None:
        memory, offset = self._memory(value)
        if not value.numel() or not value.untyped_storage().nbytes():
            return
        size = value.element_size()
        first = offset + value.storage_offset() * size
        strides = value.stride()
        end = first + size * (1 + sum((length - 1) * stride for length, stride in zip(value.shape, strides, strict=True)))
        dense = value.is_contiguous()
        shape = () if dense else (tuple(value.shape), tuple(strides))
        self._enter_access(memory, stream, writes, what, first, end, *(shape or ((), ())), size)

    def _enter_access(
        self, memory: Memory, stream: Stream, writes: bool, what: str, first: int, end: int,
        shape: tuple[int, ...] = (), strides: tuple[int, ...] = (), itemsize: int = 1,
    ) -> None:  # fmt: skip
        access = Access(stream.name, stream.clock[stream.name], writes, what, first, end, shape, strides, itemsize)
        kept = []
        for earlier in memory.accesses:
            known = _is_before(earlier, stream.clock)
            if not known and (writes or earlier.writes) and access.meets(earlier):
                self._report("writes" if writes else "reads", access, earlier, memory.kind)
            # What a later write covers, or a later read on the same stream, is before all that comes after it.
            covered = not shape and first <= earlier.first and earlier.end <= end
            if not (known and covered and (writes or (not earlier.writes and earlier.stream == access.stream))):
                kept.append(earlier)
        memory.accesses = [*kept, access]

    def _report(self, verb: str, later: Access, earlier: Access, kind: str) -> None:
        fault = Fault(verb, later, earlier, kind)
        if all(str(fault) != str(known) for known in self.faults):
            self.faults.append(fault)

    # What comes from outside of operators

    def _pooled(self, pages: bool, make: Callable[..., Tensor], pool: HostPool, *args: Any, **kwargs: Any) -> Tensor:
        made = make(pool, *args, **kwargs)
        pinned = pages or kwargs.get("pinned") or (len(args) > 2 and args[2])
        storage = made.untyped_storage()
        if not storage.nbytes():
            return made
        # What an operator has noted of it was its making.
        memory, first = Memory(PINNED if pinned else PAGEABLE, self.host), storage.data_ptr()
        self._known.pop(storage._cdata, None)
        self._keep(storage, memory, 0)
        region = (first, first + storage.nbytes(), memory)
        self._regions.append(region)
        weakref.finalize(storage, self._regions.remove, region)
        return made

    def _transferred(
        self, start: Callable[..., Transfer], file: RankFile, act: Any, offset: int, memory: memoryview
    ) -> Transfer:
        """A transfer is a stream of its own; the file is a memory, too."""
        stream = self.new_stream("transfer")
        self._tick(stream)
        reads_file = act.__name__ == "_read"
        what = f"{'read' if reads_file else 'write'} of a file in {_caller()}"
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        held = self._files.setdefault(id(file), Memory("file", self.host))
        self._enter_access(held, stream, not reads_file, what, offset, offset + len(memory))
        for first, end, region in self._regions:
            if first <= address < end:
                self._enter_access(region, stream, reads_file, what, address - first, address - first + len(memory))
        transfer = start(file, act, offset, memory)
        transfer.event = stream.record_event()  # type: ignore[attr-defined]
        return transfer

    def _collective(self, real: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        """`real` with its first tensor as its result; where it has another, that is what it reads."""
        group = kwargs.get("group")
        async_op = kwargs.pop("async_op", False)
        tensors = [value for value in args if isinstance(value, Tensor)]
        target, source = tensors[0], tensors[-1]
        stream = self._launched(group, name, [source], [target])
        work = Work(self, stream, real(*args, **kwargs, async_op=True), tensors)
        return work if async_op else work.wait()

    def _launched(
        self, group: Any, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], way: tuple[Any, ...] = ()
    ) -> Stream:
        key = id(group or dist.group.WORLD), *way
        if key not in self._groups:
            self._groups[key] = self.new_stream("communication")
        stream = self._groups[key]
        stream.wait_event(self.current().record_event())
        self._tick(stream)
        what = f"{name} in {_caller()}"
        for value in reads:
            self._access(value, False, stream, what)
        for value in writes:
            self._access(value, True, stream, what)
        return stream

    def _message(self, real: Callable[..., Any], name: str, tensor: Tensor, *where: Any, **how: Any) -> Work:
        """From one rank to another: not after what the group sends, nor after what goes to and comes from others."""
        sends = name == "isend"
        peer = (name, *where, how.get("group_dst"), how.get("group_src"))
        stream = self._launched(how.get("group"), name, [tensor] if sends else [], [] if sends else [tensor], peer)
        return Work(self, stream, real(tensor, *where, **how), [tensor])

    @contextmanager
    def running(self) -> Iterator["StreamChecker"]:
        """While it holds, the engine has streams on the CPU, and everything that it does on them comes here."""
        resize, to_list = torch.UntypedStorage.resize_, Tensor.tolist

        def listed(value: Tensor) -> Any:
            self.current().synchronize()
            return to_list(value)

        def waited(transfer: Transfer, wait: Callable[[Transfer], None] = Transfer.wait) -> None:
            wait(transfer)
            transfer.event.synchronize()  # type: ignore[attr-defined]

        def named(value: Tensor, stream: Stream) -> None:
            self._memory(value)[0].recorded.add(stream.name)

        messages = {name: partial(self._message, getattr(dist, name), name) for name in ("isend", "irecv")}
        with ExitStack() as changed:
            for target, name, new in (
                (copies, "make_stream", lambda _: self.new_stream()),
                (copies, "current_stream", lambda _: self.current()),
                (copies, "working_stream", lambda _: self.current()),
                (copies, "is_on_host", self.is_on_host),
                (torch.UntypedStorage, "resize_", lambda storage, size: self._resized(storage, resize, size)),
                (Tensor, "tolist", listed),
                (Tensor, "record_stream", named),
                (HostPool, "zeros", _method(self._pooled, False, HostPool.zeros)),
                (HostPool, "pages", _method(self._pooled, True, HostPool.pages)),
                (RankFile, "_start", _method(self._transferred, RankFile._start)),
                (Transfer, "wait", waited),
                # In both modules: torch checks that an operation is the very function which one of them names.
                *((module, name, message) for name, message in messages.items() for module in (dist, distributed_c10d)),
                *(
                    (dist, name, partial(self._collective, getattr(dist, name), name))
                    for name in ("all_reduce", "all_to_all_single")
                ),
                *(
                    (collectives, name, partial(self._collective, getattr(collectives, name), name))
                    for name in ("all_gather_single", "reduce_scatter_single")
                ),
            ):
                changed.enter_context(patch.object(target, name, new))
            changed.enter_context(self)
            yield self


def _method(call: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A function that becomes a method, as `partial` does not."""

    @wraps(first[-1])
    def method(*args: Any, **kwargs: Any) -> Any:
        return call(*first, *args, **kwargs)

    return method


def _is_before(access: Access, clock: Clock) -> bool:
    return access.time <= clock.get(access.stream, 0)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What an operator reads, and what it writes; a view does neither."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    named = list(zip(func._schema.arguments, args, strict=False))
    named += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    for argument, value in named:
        alias = argument.alias_info
        if alias is None:
            reads += _tensors(value)
        elif alias.is_write:
            writes += _tensors(value)
    return reads, writes


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _caller() -> str:
    """The function of the engine that asks for what is done: file and name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        acting = f"{Path(path).stem}.{frame.f_code.co_qualname}"
        if "/executor/" in path and "/tests/" not in path and not acting.startswith(PASSED_BY):
            return f"{Path(path).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"
