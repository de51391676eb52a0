"""This rank's share of the parameters in the type that forward uses: where gathers read it and the update writes it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.parallel.collectives import mark, shares_memory
from executor.parallel.copies import Copy, CopyEngine, Staging
from executor.parallel.host_pool import HostPool

Range = tuple[int, int]
"""First element and the one after the last, in the flat master vector and the frozen parameters that follow it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A part of the share on the device; `copies` that fill it are on their way."""

    values: Tensor
    copies: tuple[Copy, ...] = ()

    def wait(self) -> None:
        """Let the current stream use the values."""
        for copy in self.copies:
            copy.wait()

    def before(self) -> AbstractContextManager[object]:
        """A collective that is started inside finds the values there, and the current stream need not wait for them."""
        return self.copies[-1].followed() if self.copies else nullcontext()


class ParameterShard(ABC):
    """A flat vector of parameters in their own type: those that the optimizer updates, handed over in the master's type, and
    behind them frozen ones, which are written once.
    """

    reads_ahead = 0
    """Units that may be expected at once; 0: `expect` does nothing."""

    def expect(self, ranges: Sequence[Range]) -> None:  # noqa: B027  what is in memory need not be fetched ahead
        """These are going to be read, though not next."""

    @abstractmethod
    def read(self, ranges: Sequence[Range]) -> Loaded:
        """The elements of `ranges` one after the other on the device; a view where nothing has to move."""

    def copy_to(self, targets: Sequence[Tensor], ranges: Sequence[Range]) -> None:
        """Copy the elements of each range to the flat tensor in its place: one operation, which casts as it copies."""
        torch._foreach_copy_([*targets], self._views(ranges))

    def _views(self, ranges: Sequence[Range]) -> list[Tensor]:
        """The elements of each range, in whatever type they are kept."""
        loaded = [self.read((found,)) for found in ranges]
        for one in loaded:
            one.wait()
        return [one.values for one in loaded]

    @abstractmethod
    def accept_from_device(self, start: int, values: Tensor) -> None:
        """Updated elements from `start` on, on the device; not changed before the next update."""

    @abstractmethod
    def accept_from_host(self, start: int, values: Tensor) -> None:
        """Updated elements from `start` on, in host memory; at most a chunk of the optimizer."""

    @abstractmethod
    def finish(self) -> None:
        """Return when reads see everything that was accepted."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """What it keeps on the device between steps."""

    def close(self) -> None:  # noqa: B027
        """Free what is not memory."""


class MasterShard(ParameterShard):
    """The master vector itself, wholly on the device, cast when it is read; and `frozen` parameters in the type to cast to."""

    def __init__(self, master: Tensor, dtype: torch.dtype, frozen: Tensor | None = None) -> None:
        self.master, self.dtype = master, dtype
        self.frozen = torch.empty(0, dtype=dtype, device=master.device) if frozen is None else frozen

    def read(self, ranges: Sequence[Range]) -> Loaded:
        edge = self.master.numel()
        trained = [(start, min(end, edge)) for start, end in ranges if start < edge]
        frozen = [(max(start - edge, 0), end - edge) for start, end in ranges if end > edge]
        parts = [joined(self.master, trained).to(self.dtype)] if trained else []
        parts += [joined(self.frozen, frozen)] if frozen else []
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not shares_memory(values, self.master) and not shares_memory(values, self.frozen):
            mark("buffers", values)
        return Loaded(values)

    def _views(self, ranges: Sequence[Range]) -> list[Tensor]:
        return [self.master[start:end] for start, end in ranges]  # trained ones alone are written by an update

    def accept_from_device(self, start: int, values: Tensor) -> None:
        """Nothing to do: the values are the master's own."""

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self.master[start : start + values.numel()].copy_(values)

    def finish(self) -> None:
        """Nothing is on its way."""

    def tensors(self) -> Iterator[Tensor]:
        if self.frozen.numel():
            yield self.frozen


class DeviceShard(ParameterShard):
    """On the device, for an optimizer that has its master vector, or a part of it, on the host."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, arrivals: Staging) -> None:
        self._values = torch.empty(elements, dtype=dtype, device=device)
        self._arrivals = arrivals

    def read(self, ranges: Sequence[Range]) -> Loaded:
        values = joined(self._values, ranges)
        if len(ranges) > 1:
            mark("buffers", values)
        return Loaded(values)

    def accept_from_device(self, start: int, values: Tensor) -> None:
        self._values[start : start + values.numel()].copy_(values)

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self._arrivals.send(self._values[start : start + values.numel()], values)

    def finish(self) -> None:
        self._arrivals.finish()

    def tensors(self) -> Iterator[Tensor]:
        yield self._values


class HostShard(ParameterShard):
    """In pinned host memory (`offload_param`): read over the host link each time it is gathered.

    The optimizer may overwrite it at once: a gradient reaches the host after everything that the device's current stream had
    waited for, and that includes every gather of the step.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, pool: HostPool, copies: CopyEngine) -> None:
        self._values = pool.zeros(elements, dtype, pinned=True)
        self._device, self._copies = device, copies
        self._leaving: list[Copy] = []

    def read(self, ranges: Sequence[Range]) -> Loaded:
        values = torch.empty(sum(end - start for start, end in ranges), dtype=self._values.dtype, device=self._device)
        mark("buffers", values)
        parts = torch.split(values, [end - start for start, end in ranges])
        copies = [self._copies.start(part, self._values[start:end]) for part, (start, end) in zip(parts, ranges, strict=True)]
        return Loaded(values, tuple(copies))

    def accept_from_device(self, start: int, values: Tensor) -> None:
        cast = values.to(self._values.dtype)
        if cast is not values:
            mark("buffers", cast)
        self._leaving.append(self._copies.start(self._values[start : start + values.numel()], cast))

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self._values[start : start + values.numel()].copy_(values)

    def finish(self) -> None:
        while self._leaving:
            self._leaving.pop().end()

    def tensors(self) -> Iterator[Tensor]:
        return iter(())


class WithQuantised(ParameterShard):
    """`others`, and from `start` on the `quantised` parameters, byte by byte. A read is of the one or of the other."""

    def __init__(self, others: ParameterShard, quantised: ParameterShard, start: int) -> None:
        self.others, self.quantised, self.start = others, quantised, start

    def read(self, ranges: Sequence[Range]) -> Loaded:
        if ranges[0][0] < self.start:
            return self.others.read(ranges)
        return self.quantised.read([(first - self.start, end - self.start) for first, end in ranges])

    def accept_from_device(self, start: int, values: Tensor) -> None:
        self.others.accept_from_device(start, values)

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self.others.accept_from_host(start, values)

    def finish(self) -> None:
        self.others.finish()

    def tensors(self) -> Iterator[Tensor]:
        yield from self.others.tensors()
        yield from self.quantised.tensors()

    def close(self) -> None:
        self.others.close()


def joined(vector: Tensor, ranges: Sequence[Range]) -> Tensor:
    """The elements of `ranges` in one vector; a view where there is one range alone."""
    if len(ranges) == 1:
        return vector[ranges[0][0] : ranges[0][1]]
    return torch.cat([vector[start:end] for start, end in ranges])
