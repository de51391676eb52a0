"""The cases of a micro-benchmark: products, attention, layers, memory traffic, launches, copies and collectives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from executor.engine import RankContext
from executor.parallel.collectives import all_gather_single, group_options, reduce_scatter_single
from executor.parallel.head import Head
from executor.parallel.model import Block, whole
from executor.parallel.operators import rotary_table
from search_spaces.clusters.microbenchmark import COLLECTIVES, SINGLE_RANK, GroupShape, Operation, layer_model
from search_spaces.training.states import CHUNK_ELEMENTS

Run = Callable[[], object]
LAUNCH_FLOPS = 3e7
"""FLOPs that a CPU core does in the time of launching a layer's kernels: the lower bound of a layer's cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One case to measure."""

    operation: Operation
    precision: str
    shape: tuple[int, ...]
    cost: float
    """FLOPs or bytes; among the cases of one operation and group, time grows with it."""
    memory: float
    """Bytes that the case holds, approximately."""
    make: Callable[[], Run]
    """Allocates the tensors and returns the function to time."""
    group: GroupShape = SINGLE_RANK
    on_host: bool = False
    """Whether the host's time is measured instead of the device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeGrid:
    """Shapes for one kind of device, typical of the models trained on it."""

    rows: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    """(inner, outer) of products."""
    attention: tuple[tuple[int, int, int, int], ...]
    """(samples, tokens, heads, head dimension)."""
    layers: tuple[tuple[int, int, int, int, int], ...]
    """(samples, tokens, hidden, heads, ffn)."""
    heads: tuple[tuple[int, int, int, int], ...]
    """(samples, tokens, hidden, vocabulary)."""
    elements: tuple[int, ...]


CPU_GRID = ShapeGrid(
    rows=(64, 256, 1024, 4096),
    widths=((64, 64), (128, 128), (128, 512), (512, 128), (512, 512), (512, 2048), (2048, 512)),
    attention=((1, 128, 4, 32), (8, 128, 4, 32), (2, 512, 8, 64), (1, 1024, 8, 64)),
    layers=(
        (1, 8, 32, 1, 64), (1, 128, 64, 2, 176), (1, 128, 128, 4, 344), (4, 128, 128, 4, 344), (1, 128, 256, 4, 688),
        (4, 128, 256, 8, 688), (2, 256, 512, 8, 1376), (1, 512, 128, 4, 344),
    ),
    heads=((1, 128, 64, 256), (1, 128, 128, 512), (4, 128, 128, 512), (4, 128, 256, 2048)),
    elements=(2**16, 2**20, 2**23),
)  # fmt: skip
CUDA_GRID = ShapeGrid(
    rows=(256, 1024, 4096, 16384),
    widths=((512, 512), (1024, 4096), (4096, 1024), (2048, 2048), (4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192)),
    attention=((1, 1024, 16, 64), (4, 2048, 16, 64), (2, 2048, 32, 128), (1, 8192, 32, 128)),
    layers=(
        (1, 32, 128, 2, 256), (1, 512, 512, 8, 1376), (1, 2048, 1024, 16, 2816), (4, 2048, 1024, 16, 2816),
        (1, 2048, 2048, 16, 5632), (2, 2048, 4096, 32, 11008), (1, 8192, 4096, 32, 14336),
    ),
    heads=((1, 2048, 1024, 32000), (2, 2048, 2048, 32000), (1, 2048, 4096, 128000)),
    elements=(2**20, 2**24, 2**27),
)  # fmt: skip


def compute_cases(device: torch.device, precisions: tuple[str, ...]) -> Iterator[KernelCase]:
    """Yield all cases that need no other rank, at each precision that the device supports."""
    grid = CUDA_GRID if device.type == "cuda" else CPU_GRID
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for precision in precisions:
        dtype = dtypes[precision]
        if device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported():
            continue
        for rows in grid.rows:
            for inner, outer in grid.widths:
                yield from _products(device, dtype, precision, rows, inner, outer)
        for attended in grid.attention:
            yield from _attention(device, dtype, precision, attended)
        for layer in grid.layers:
            yield _layer(device, dtype, precision, layer)
        for head in grid.heads:
            yield _head(device, dtype, precision, head)
    yield from _memory(device, grid)


def _products(
    device: torch.device, dtype: torch.dtype, precision: str, rows: int, inner: int, outer: int
) -> Iterator[KernelCase]:
    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        sizes = ((rows, inner), (outer, inner), (rows, outer))
        x, weight, gradient = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
        return x, weight, gradient

    def forward() -> Run:
        x, weight, _ = tensors()
        return lambda: functional.linear(x, weight)

    def backward() -> Run:
        x, weight, gradient = tensors()
        return lambda: (gradient @ weight, gradient.t() @ x)

    flops = 2.0 * rows * inner * outer
    memory = 2.0 * dtype.itemsize * (rows * inner + inner * outer + rows * outer)
    shape = (rows, inner, outer)
    yield KernelCase(operation=Operation.PRODUCT, precision=precision, shape=shape, cost=flops, memory=memory, make=forward)
    yield KernelCase(
        operation=Operation.PRODUCT_BACKWARD, precision=precision, shape=shape, cost=2 * flops, memory=memory, make=backward
    )


def _attention(
    device: torch.device, dtype: torch.dtype, precision: str, shape: tuple[int, int, int, int]
) -> Iterator[KernelCase]:
    samples, tokens, heads, width = shape

    def inputs() -> list[Tensor]:
        size = (samples, heads, tokens, width)
        return [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]

    def forward() -> Run:
        query, key, value = inputs()
        return lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def backward() -> Run:
        leaves = inputs()
        query, key, value = leaves
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradient = torch.randn_like(result)
        return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)

    cost = 4.0 * samples * tokens * tokens * heads * width
    memory = 12.0 * dtype.itemsize * samples * tokens * heads * width
    for operation, make in ((Operation.ATTENTION, forward), (Operation.ATTENTION_BACKWARD, backward)):
        yield KernelCase(operation=operation, precision=precision, shape=shape, cost=cost, memory=memory, make=make)


def _layer(device: torch.device, dtype: torch.dtype, precision: str, shape: tuple[int, int, int, int, int]) -> KernelCase:
    samples, tokens, hidden, heads, ffn = shape

    def make() -> Run:
        spec = layer_model(tokens, hidden, heads, ffn)
        block = Block(spec, whole(spec), 0).to(device=device, dtype=dtype)
        cosines, sines = (table.to(device=device, dtype=dtype) for table in rotary_table(spec, tokens))
        x = torch.randn(samples, tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        gradient, leaves = torch.randn_like(x), [x, *block.parameters()]
        return lambda: torch.autograd.grad(block(x, (cosines, sines)), leaves, gradient)

    parameters = 4 * hidden * hidden + 3 * hidden * ffn
    cost = 6.0 * samples * tokens * (parameters + tokens * hidden) + LAUNCH_FLOPS
    memory = 4.0 * dtype.itemsize * (parameters + samples * tokens * (16 * hidden + 6 * ffn))
    return KernelCase(operation=Operation.LAYER, precision=precision, shape=shape, cost=cost, memory=memory, make=make)


def _head(device: torch.device, dtype: torch.dtype, precision: str, shape: tuple[int, int, int, int]) -> KernelCase:
    samples, tokens, hidden, vocabulary = shape

    def make() -> Run:
        spec = layer_model(tokens, hidden, 1, hidden, vocabulary)
        part = whole(spec)
        head = Head(spec, part.tensor, part.operators, False, 0).to(device=device, dtype=dtype)
        x = torch.randn(samples, tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        labels = torch.randint(vocabulary, (samples, tokens), device=device)
        leaves = [x, *head.parameters()]
        return lambda: torch.autograd.grad(head(x, labels), leaves)

    cost = 6.0 * samples * tokens * hidden * vocabulary + LAUNCH_FLOPS
    memory = 4.0 * hidden * vocabulary * dtype.itemsize + 16.0 * samples * tokens * vocabulary
    return KernelCase(operation=Operation.HEAD, precision=precision, shape=shape, cost=cost, memory=memory, make=make)


def _memory(device: torch.device, grid: ShapeGrid) -> Iterator[KernelCase]:
    def copy(elements: int) -> Run:
        source = torch.zeros(elements, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    def launch() -> Run:
        value = torch.zeros(64, device=device)
        return lambda: value.add_(1.0)

    for elements in grid.elements:
        moved = 4.0 * elements
        parts: list[tuple[Operation, float, Callable[[], Run]]] = [
            (Operation.COPY, 2.0, partial(copy, elements)),
            (Operation.UPDATE, 4.0, partial(update, elements, device)),
        ]
        if device.type == "cuda":
            parts += [
                (Operation.HOST_UPDATE, 0.0, partial(host_update, elements)),
                (Operation.TO_HOST, 1.0, partial(host_copy, elements, device, down=True)),
                (Operation.TO_DEVICE, 1.0, partial(host_copy, elements, device, down=False)),
            ]
        for operation, copies, make in parts:
            size = int(moved) if operation in (Operation.TO_HOST, Operation.TO_DEVICE) else elements
            yield KernelCase(
                operation=operation, precision="fp32", shape=(size,), cost=moved, memory=copies * moved, make=make,
                on_host=operation is Operation.HOST_UPDATE,
            )  # fmt: skip
    yield KernelCase(
        operation=Operation.LAUNCH, precision="fp32", shape=(64,), cost=1.0, memory=256.0, make=launch, on_host=True
    )


def update(elements: int, device: torch.device) -> Run:
    """Return an optimizer step over flat fp32 states: norm, clipping, fused AdamW."""
    parameter, first, second = (torch.zeros(elements, device=device) for _ in range(3))
    gradient, step = torch.full_like(parameter, 1e-3), torch.zeros((), device=device)

    def run() -> None:
        gradient.mul_((1.0 / (gradient.norm() + 1e-6)).clamp(max=1.0))
        step.add_(1.0)
        _fused_adamw(parameter, gradient, first, second, step)

    return run


def host_update(elements: int) -> Run:
    """Return an update of flat fp32 states on the host as offloading runs it: in chunks, without a norm."""
    states = [torch.zeros(elements) for _ in range(3)]
    gradient, step = torch.full((elements,), 1e-3), torch.zeros(())
    chunks = [
        [value[start : start + CHUNK_ELEMENTS] for value in (*states, gradient)] for start in range(0, elements, CHUNK_ELEMENTS)
    ]

    def run() -> None:
        step.add_(1.0)
        for parameter, first, second, part in chunks:
            _fused_adamw(parameter, part, first, second, step)

    return run


def _fused_adamw(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor) -> None:
    """The operator of `torch.optim.AdamW`: the class imports torch.compile, which takes longer than a short measurement."""
    torch._fused_adamw_(
        [parameter], [gradient], [first], [second], [], [step], lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01,
        eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def host_copy(elements: int, device: torch.device, *, down: bool) -> Run:
    """Return a copy between the device and pinned memory of its host."""
    on_device = torch.zeros(elements, device=device)
    on_host = torch.zeros(elements, pin_memory=True)
    source, target = (on_device, on_host) if down else (on_host, on_device)
    return lambda: target.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGroup:
    """A group of this rank. All groups of the same shape communicate at the same time."""

    shape: GroupShape
    ranks: tuple[int, ...]
    handle: dist.ProcessGroup


def group_layouts(hosts: Sequence[str]) -> list[tuple[GroupShape, list[tuple[int, ...]]]]:
    """Return the group shapes with the groups of each: the ranks of a node, one rank of each node, all ranks.

    If nodes have unequal numbers of ranks, there is only the group of all ranks.
    """
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    members = list(nodes.values())
    per_node, equal = len(members[0]), len({len(ranks) for ranks in members}) == 1
    layouts = []
    if per_node > 1 and equal:
        layouts.append((GroupShape(ranks=per_node, in_node=per_node), [tuple(ranks) for ranks in members]))
    if len(members) > 1:
        if per_node > 1 and equal:
            shape = GroupShape(ranks=len(members), in_node=1, sharing=per_node)
            layouts.append((shape, [tuple(column) for column in zip(*members, strict=True)]))
        largest = max(len(ranks) for ranks in members)
        layouts.append((GroupShape(ranks=len(hosts), in_node=min(per_node, largest)), [tuple(range(len(hosts)))]))
    return layouts


def open_groups(context: RankContext, hosts: Sequence[str]) -> list[LinkGroup]:
    """Create the groups. Every rank creates all of them in the same order, as the backends require."""
    mine = []
    for shape, groups in group_layouts(hosts):
        for ranks in groups:
            handle = dist.new_group(list(ranks), pg_options=group_options(dist.get_backend()))
            if context.rank in ranks:
                mine.append(LinkGroup(shape=shape, ranks=ranks, handle=handle))
    return mine


def link_cases(context: RankContext, groups: Sequence[LinkGroup], largest_bytes: int) -> Iterator[KernelCase]:
    """Yield every collective over every group, small messages first."""
    size = 4096
    while size <= largest_bytes:
        for group in groups:
            for operation in COLLECTIVES:
                yield _case(context, group, operation, size)
        size *= 4


def _case(context: RankContext, group: LinkGroup, operation: Operation, size: int) -> KernelCase:
    ranks = len(group.ranks)
    elements = max(size // 4 // ranks, 1) * ranks
    return KernelCase(
        operation=operation,
        precision="fp32",
        shape=(4 * elements,),
        cost=4.0 * elements + 2.0**16,  # below about 64 kB the time of a message does not depend on its size
        memory=12.0 * elements,
        make=lambda: _communication(context, group, operation, elements),
        group=group.shape,
    )


def _communication(context: RankContext, group: LinkGroup, operation: Operation, elements: int) -> Run:
    """One collective, or for SEND a message between neighbours, over `elements` fp32 numbers."""
    handle, whole = group.handle, torch.zeros(elements, device=context.device)
    part = torch.zeros(elements // len(group.ranks), device=context.device)
    match operation:
        case Operation.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=handle)
        case Operation.ALL_GATHER:
            return lambda: all_gather_single(whole, part, group=handle)
        case Operation.REDUCE_SCATTER:
            return lambda: reduce_scatter_single(part, whole, group=handle)
        case Operation.ALL_TO_ALL:
            received = torch.zeros_like(whole)
            return lambda: dist.all_to_all_single(received, whole, group=handle)
    # Ranks at even positions send to the next rank. If their number is odd, the last one is idle.
    position = group.ranks.index(context.rank)
    if position % 2:
        return lambda: dist.recv(whole, src=group.ranks[position - 1], group=handle)
    if position + 1 < len(group.ranks):
        return lambda: dist.send(whole, dst=group.ranks[position + 1], group=handle)
    return lambda: None
