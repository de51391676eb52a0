"""Sums over ranks that are sent as 8-bit integers: rounded where they leave, summed in full where they arrive."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from executor.parallel.block_integers import few, pack, unpack
from executor.parallel.collectives import Group, InFlight, mark
from search_spaces.compression import integer_bytes


class QuantisedReduceScatter:
    """Every rank sends each other its row in blocks of integers, and sums what it gets [Wang et al. 2023, ZeRO++, 3.3: qgZ].

    A ring would round sums again at every rank. The own row is rounded too: the result is that of any rank that had the rows.
    Each parameter has blocks of its own: one that two tensor ranks hold is rounded alike on both, whatever lies beside it.
    """

    def __init__(self, group: Group, parameters: Iterable[Tensor], widths: Sequence[int], dtype: torch.dtype) -> None:
        """Of each of `parameters` [ranks, width] the rows for each rank; each is free when the next is asked for."""
        self._widths, self._dtype = widths, dtype
        self._sent = _packed(parameters)
        self._received = torch.empty_like(self._sent)
        for buffer in (self._sent, self._received):
            mark("buffers", buffer)
        each = [1] * group.size
        self._work = group.all_to_all(self._received, self._sent, each, each)

    def wait(self) -> Tensor:
        """The sum of this rank's rows over all ranks, parameter by parameter [sum of widths]."""
        self._work.wait()
        total = torch.cat([self._summed(part, width) for part, width in _by_parameter(self._received, self._widths)])
        mark("buffers", total)
        return total

    def _summed(self, packed: Tensor, width: int) -> Tensor:
        total = torch.zeros(width, dtype=self._dtype, device=packed.device)
        for some in few(packed):
            total.add_(unpack(some, width, self._dtype).sum(dim=0))
        return total


class QuantisedAllReduce:
    """The same, whose parts every rank then gathers, rounded once more: `value` [n] becomes the same sum on all ranks.

    Three calls in one order on all ranks: making it, `gather`, `wait`; what is started by one is on its way until the next.
    """

    def __init__(self, group: Group, value: Tensor, sizes: Sequence[int]) -> None:
        """`sizes` sum to n: elements of each parameter, of which every rank has a part, padded with zeros."""
        self._group = group
        self._places = torch.split(value, list(sizes))
        self._widths = [-(-size // group.size) for size in sizes]
        rows = (_as_rows(place, group.size) for place in self._places)
        self._scatter: QuantisedReduceScatter | None = QuantisedReduceScatter(group, rows, self._widths, value.dtype)
        self._gathered: tuple[InFlight, Tensor, Tensor] | None = None

    def gather(self) -> None:
        """Send what this rank has summed to the others; a second call does nothing."""
        if self._scatter is None:
            return
        own = _packed(torch.split(self._scatter.wait()[None], self._widths, dim=1))
        self._scatter = None  # with what was sent and came
        rows = torch.empty(self._group.size, own.shape[1], dtype=own.dtype, device=own.device)
        for buffer in (own, rows):
            mark("buffers", buffer)
        self._gathered = self._group.all_gather(rows, own.view(-1)), rows, own

    def wait(self) -> None:
        """Return when `value` is the sum."""
        self.gather()
        assert self._gathered is not None
        work, rows, _ = self._gathered
        work.wait()
        for place, (part, width) in zip(self._places, _by_parameter(rows, self._widths), strict=True):
            start = 0
            for some in few(part):
                target = place[start : start + len(some) * width]
                target.copy_(unpack(some, width, place.dtype).reshape(-1)[: len(target)])
                start += len(some) * width


def _as_rows(flat: Tensor, ranks: int) -> Tensor:
    """[ranks, …], with zeros at the end."""
    padding = -len(flat) % ranks
    return (functional.pad(flat, (0, padding)) if padding else flat).view(ranks, -1)


def _packed(parameters: Iterable[Tensor]) -> Tensor:
    """The bytes of each row, parameter by parameter."""
    return torch.cat([pack(part) for part in parameters], dim=1)


def _by_parameter(packed: Tensor, widths: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """The bytes of each parameter, and its width."""
    return zip(torch.split(packed, [integer_bytes(width) for width in widths], dim=1), widths, strict=True)
