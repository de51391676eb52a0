"""Graphs, products, copies, operators and host time of a step of our engine, compiled and eager, in each parallel dimension.

    python -m benchmarks.engines.host_counts [--markdown docs/results/host-counts.md]

Some minutes on one core, most of them for compilation. Counts do not depend on the machine. Exit status 1 if a compiled block
of our engine is not one graph, or executes more products than the uncompiled one.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.written_page import give, page_parser, table
from executor.engine import RankContext
from executor.engines.session import ParallelSession
from executor.errors import EngineRefusalError
from executor.trial.run import ENGINES
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

SPEC = ModelSpec(
    name="llama of 4 layers", family="llama", num_layers=4, hidden_size=64, num_attention_heads=8, num_key_value_heads=8,
    head_dim=8, ffn_hidden_size=128, vocab_size=1024, sequence_length=32,
)  # fmt: skip
EXPERTS = replace(SPEC, name="4 layers with 8 experts", family="mixtral", num_experts=8, experts_per_token=2)
EVEN_LOADS = replace(EXPERTS, expert_loads=((1.0,) * 8,) * 4)
"""So that every rank has rows, whatever a group that sends nothing leaves in memory."""
PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"})
COPIES = frozenset({"aten::copy_", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_chunk_cat", "aten::cat"})
WARM_STEPS, TIMED_STEPS = 3, 30
HEADER = f"""# Graphs, products, copies, operators and host time of a step

Written by `make bench` (`benchmarks/engines/host_counts.py`). Rank 0 of worlds of 1, 2 and 8 ranks on a process group that
sends nothing (torch's `fake` backend), one core: {SPEC.name} of width {SPEC.hidden_size} and {SPEC.sequence_length} tokens, so
small that a step's time is that of the host. *Graphs*: different graphs that the compiler made of all blocks. *Products*,
*copies*: executed matrix products and copies of a step, of forward, backward and recomputation. *Operators*: all operators of
torch, views included; the compiler's own kernels are none of them. *ms*: processor time of the fastest of {TIMED_STEPS} steps.
*Before*: the same program when collectives split the graphs of compiled blocks, checkpoints were around compiled blocks, and
gathered rows were copied one by one. Times of two runs of one case differ by up to 1.4 times, as other work shared the cores;
run in turn, uncompiled cases take the same time before and now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration of a number of ranks, of which rank 0 runs."""

    name: str
    ranks: int
    knobs: Mapping[str, Any]
    spec: ModelSpec = SPEC
    engine: str = "native"


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one step of rank 0, after the first steps."""

    graphs: int
    products: int
    copies: int
    operators: int
    milliseconds: float


FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
TENSOR = {"tensor_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
CASES = (
    Case(name="one rank", ranks=1, knobs={}),
    Case(name="one rank, full checkpointing", ranks=1, knobs=FULL),
    Case(name="one rank, selective checkpointing", ranks=1, knobs=SELECTIVE),
    Case(name="one rank, experts", ranks=1, knobs={"precision": "bf16"}, spec=EXPERTS),
    *(
        Case(name=f"stage {stage}", ranks=ranks, knobs={"zero_stage": stage, "param_persistence_threshold": 0})
        for ranks in (2, 8) for stage in range(4)
    ),
    *(Case(name="stage 3 of FSDP2", ranks=ranks, knobs={"zero_stage": 3}, engine="fsdp2") for ranks in (2, 8)),
    Case(name="tensor 2", ranks=2, knobs=TENSOR),
    Case(name="tensor 2, full checkpointing", ranks=2, knobs=TENSOR | FULL),
    Case(name="tensor 2, selective checkpointing", ranks=2, knobs=TENSOR | SELECTIVE),
    Case(name="tensor 2, overlapped", ranks=2, knobs=TENSOR | {"async_tensor_parallel": True}),
    Case(name="tensor 2, sequence", ranks=2, knobs=SEQUENCE),
    Case(name="tensor 2, sequence, selective checkpointing", ranks=2, knobs=SEQUENCE | SELECTIVE),
    Case(name="tensor 2, sequence, overlapped", ranks=2, knobs=SEQUENCE | {"async_tensor_parallel": True}),
    Case(name="context 2", ranks=2, knobs={"context_parallel_size": 2}),
    Case(name="context 2, Ulysses", ranks=2, knobs={"context_parallel_size": 2, "context_parallel_method": "ulysses"}),
    Case(name="experts 2", ranks=2, knobs={"expert_parallel_size": 2, "precision": "bf16"}, spec=EVEN_LOADS),
    Case(
        name="stage 3, tensor 2, sequence, context 2, selective checkpointing", ranks=8,
        knobs=SEQUENCE | SELECTIVE | {"context_parallel_size": 2, "zero_stage": 3, "param_persistence_threshold": 0},
    ),
)  # fmt: skip
BEFORE: Mapping[tuple[int, str, bool], Counts | None] = {
    (1, "one rank", False): Counts(0, 87, 22, 1613, 8.1),
    (1, "one rank, full checkpointing", False): Counts(0, 111, 30, 2101, 21.5),
    (1, "one rank, selective checkpointing", False): Counts(0, 87, 30, 2685, 25.5),
    (1, "one rank, experts", False): Counts(0, 99, 34, 4778, 33.5),
    (2, "stage 0", False): Counts(0, 87, 22, 1615, 9.0),
    (2, "stage 1", False): Counts(0, 87, 26, 1714, 10.8),
    (2, "stage 2", False): Counts(0, 87, 26, 1714, 10.2),
    (2, "stage 3", False): Counts(0, 87, 64, 1871, 12.4),
    (8, "stage 0", False): Counts(0, 87, 22, 1615, 8.7),
    (8, "stage 1", False): Counts(0, 87, 26, 1732, 10.5),
    (8, "stage 2", False): Counts(0, 87, 26, 1732, 9.6),
    (8, "stage 3", False): Counts(0, 87, 64, 1889, 11.9),
    (2, "stage 3 of FSDP2", False): Counts(0, 87, 17, 2450, 24.7),
    (8, "stage 3 of FSDP2", False): Counts(0, 87, 17, 2630, 23.4),
    (2, "tensor 2", False): Counts(0, 87, 22, 1748, 10.4),
    (2, "tensor 2, full checkpointing", False): Counts(0, 111, 30, 2256, 19.8),
    (2, "tensor 2, selective checkpointing", False): Counts(0, 87, 30, 2884, 33.6),
    (2, "tensor 2, overlapped", False): Counts(0, 111, 22, 1864, 11.6),
    (2, "tensor 2, sequence", False): Counts(0, 87, 32, 2120, 11.6),
    (2, "tensor 2, sequence, selective checkpointing", False): Counts(0, 87, 40, 3352, 35.7),
    (2, "tensor 2, sequence, overlapped", False): Counts(0, 111, 32, 2452, 13.4),
    (2, "context 2", False): Counts(0, 87, 38, 2163, 12.8),
    (2, "context 2, Ulysses", False): Counts(0, 87, 30, 2007, 10.8),
    (2, "experts 2", False): Counts(0, 99, 91, 3894, 34.9),
    (8, "stage 3, tensor 2, sequence, context 2, selective checkpointing", False): Counts(0, 87, 102, 4532, 43.1),
    (1, "one rank", True): Counts(1, 87, 25, 614, 6.3),
    (1, "one rank, full checkpointing", True): Counts(1, 115, 25, 750, 10.8),
    (1, "one rank, selective checkpointing", True): None,
    (1, "one rank, experts", True): Counts(1, 99, 68, 3367, 25.5),
    (2, "stage 0", True): Counts(1, 87, 25, 616, 6.3),
    (2, "stage 1", True): Counts(1, 87, 32, 715, 7.8),
    (2, "stage 2", True): Counts(1, 87, 32, 715, 7.4),
    (2, "stage 3", True): Counts(1, 87, 109, 872, 8.8),
    (8, "stage 0", True): Counts(1, 87, 25, 616, 6.5),
    (8, "stage 1", True): Counts(1, 87, 38, 733, 6.6),
    (8, "stage 2", True): Counts(1, 87, 38, 733, 7.9),
    (8, "stage 3", True): Counts(1, 87, 115, 890, 9.3),
    (2, "stage 3 of FSDP2", True): Counts(1, 87, 118, 1454, 20.5),
    (8, "stage 3 of FSDP2", True): Counts(1, 87, 190, 1634, 19.6),
    (2, "tensor 2", True): Counts(13, 87, 32, 807, 16.1),
    (2, "tensor 2, full checkpointing", True): Counts(13, 115, 32, 983, 28.8),
    (2, "tensor 2, selective checkpointing", True): None,
    (2, "tensor 2, overlapped", True): Counts(15, 111, 32, 1131, 26.9),
    (2, "tensor 2, sequence", True): Counts(19, 87, 96, 1201, 26.4),
    (2, "tensor 2, sequence, selective checkpointing", True): None,
    (2, "tensor 2, sequence, overlapped", True): Counts(24, 111, 120, 1649, 29.0),
    (2, "context 2", True): Counts(13, 87, 73, 1013, 13.4),
    (2, "context 2, Ulysses", True): Counts(17, 87, 101, 1014, 15.6),
    (2, "experts 2", True): None,
    (8, "stage 3, tensor 2, sequence, context 2, selective checkpointing", True): None,
}
"""(ranks, name, compiled) -> the counts before; None: it was refused."""


class _Executed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators below autograd: those that a stopped recomputation does not reach have no part in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[getattr(func, "_schema", func).name.removesuffix("_out")] += 1
        return func(*args, **(kwargs or {}))


def _recorded(session: ParallelSession) -> tuple[Counter[str], int]:
    """Products and copies of a step that are no part of another one, and the number of operators that call no other one."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        session.run_step()
    events = [event for event in recorded.events() if "::" in event.name]
    callers = {id(event.cpu_parent) for event in events}

    def is_part(event: Any) -> bool:
        parent = event.cpu_parent
        return parent is not None and (parent.name in PRODUCTS | COPIES or is_part(parent))

    counted = (event.name for event in events if event.name in PRODUCTS | COPIES and not is_part(event))
    return Counter(counted), sum(id(event) not in callers for event in events)


def counts_of(case: Case, compiled: bool) -> Counts | None:
    """The counts of rank 0; None: the engine refuses the configuration."""
    config = TrialConfig(micro_batch_size=1).replace({**case.knobs, "compile_blocks": compiled})
    workload = Workload(global_batch_size=config.data_parallel_size(case.ranks), sequence_length=SPEC.sequence_length)
    counters.clear()
    if case.ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    try:
        context = RankContext(rank=0, world_size=case.ranks, device=torch.device("cpu"))
        session = ENGINES[case.engine].build(context, case.spec, config, workload)
        assert isinstance(session, ParallelSession)
        spent = []
        for step in range(WARM_STEPS + TIMED_STEPS):
            session.prepare(step)
            began = time.process_time()
            session.run_step()
            spent.append(time.process_time() - began)
        session.prepare(WARM_STEPS + TIMED_STEPS)
        names, operators = _recorded(session)
        if not compiled:
            session.prepare(WARM_STEPS + TIMED_STEPS + 1)
            with _Executed() as executed:
                session.run_step()
            names = executed.names
        graphs = counters["stats"]["unique_graphs"]
        session.close()
    except EngineRefusalError:
        return None
    finally:
        if case.ranks > 1:
            dist.destroy_process_group()
    return Counts(
        graphs,
        sum(count for name, count in names.items() if name in PRODUCTS),
        sum(count for name, count in names.items() if name in COPIES),
        operators,
        round(1e3 * min(spent[WARM_STEPS:]), 1),
    )


def problems(counted: Mapping[tuple[int, str, bool], Counts | None]) -> list[str]:
    """Compiled blocks of our engine that are not one graph, or compute more than uncompiled ones."""
    lines = []
    for case in CASES:
        eager, compiled = (counted[case.ranks, case.name, way] for way in (False, True))
        if case.engine == "native" and compiled is not None and eager is not None:
            if compiled.graphs != 1:
                lines.append(f"{case.name}: {compiled.graphs} graphs")
            if compiled.products > eager.products:
                lines.append(f"{case.name}: {compiled.products} products compiled, {eager.products} uncompiled")
    return lines


def page(counted: Mapping[tuple[int, str, bool], Counts | None]) -> list[str]:
    """Lines of markdown."""
    lines = HEADER.splitlines()
    names = ("graphs", "products", "copies", "operators", "milliseconds")
    for compiled in (False, True):
        rows = []
        for case in CASES:
            key = case.ranks, case.name, compiled
            before, now = BEFORE.get(key), counted[key]
            cells = [
                [f"{getattr(counts, name):g}" for name in names] if counts else ["refused"] * 5 for counts in (before, now)
            ]
            pairs = [
                f"{first} → {second}" if key in BEFORE and first != second else second
                for first, second in zip(*cells, strict=True)
            ]
            rows.append([str(case.ranks), case.name, *(pairs if compiled else pairs[1:])])
        headings = ["ranks", "case", *("graphs" for _ in range(compiled)), "products", "copies", "operators", "ms"]
        lines += ["", f"## {'Compiled' if compiled else 'Uncompiled'} blocks, before → now", "", *table(headings, rows)]
    return [*lines, *(["", "Wrong:", "", *(f"- {line}" for line in problems(counted))] if problems(counted) else [])]


def main() -> int:
    arguments = page_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    counted = {}
    for compiled in (False, True):
        for case in CASES:
            counted[case.ranks, case.name, compiled] = counts_of(case, compiled)
            print(
                f"    {(case.ranks, case.name, compiled)!r}: {counted[case.ranks, case.name, compiled]!r},",
                file=sys.stderr,
                flush=True,
            )
    give(page(counted), arguments.markdown)
    return 1 if problems(counted) else 0


if __name__ == "__main__":
    sys.exit(main())
