"""Graphs, products, copies, operators and host time of a step of our engine, compiled and eager, in each parallel dimension.

    python -m benchmarks.engines.host_counts [--markdown docs/results/host-counts.md]

Some minutes on one core. Counts do not depend on the machine. Exit status 1 if a count exceeds its bound.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.written_page import page_parser
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.errors import EngineRefusalError
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

SPEC = ModelSpec(
    name="llama of 4 layers", family="llama", num_layers=4, hidden_size=64, num_attention_heads=8, num_key_value_heads=8,
    head_dim=8, ffn_hidden_size=128, vocab_size=1024, sequence_length=32,
)  # fmt: skip
EXPERTS = replace(SPEC, name="4 layers with 8 experts", family="mixtral", num_experts=8, experts_per_token=2)
PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"})
COPIES = frozenset({"aten::copy_", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_chunk_cat", "aten::cat"})
WARM_STEPS, TIMED_STEPS = 3, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration of a number of ranks, of which rank 0 runs."""

    name: str
    ranks: int
    knobs: Mapping[str, object]
    spec: ModelSpec = SPEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of one step of rank 0, after the first steps."""

    graphs: int
    """Different graphs that the compiler made of the blocks."""
    products: int
    """Executed matrix products, of forward, backward and recomputation."""
    copies: int
    operators: int
    """All operators that the host started."""
    milliseconds: float
    """CPU time of the fastest step."""


FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
TENSOR = {"tensor_parallel_size": 2}
CASES = (
    Case(name="1 rank", ranks=1, knobs={}),
    Case(name="1 rank, full checkpointing", ranks=1, knobs=FULL),
    Case(name="1 rank, selective checkpointing", ranks=1, knobs=SELECTIVE),
    Case(name="1 rank, experts, bf16", ranks=1, knobs={"precision": "bf16"}, spec=EXPERTS),
    *(
        Case(name=f"stage {stage}", ranks=ranks, knobs={"zero_stage": stage, "param_persistence_threshold": 0})
        for ranks in (2, 8) for stage in range(4)
    ),
    Case(name="tensor 2", ranks=2, knobs=TENSOR),
    Case(name="tensor 2, full checkpointing", ranks=2, knobs=TENSOR | FULL),
    Case(name="tensor 2, selective checkpointing", ranks=2, knobs=TENSOR | SELECTIVE),
    Case(name="tensor 2, sequence", ranks=2, knobs=TENSOR | {"sequence_parallel": True}),
    Case(name="tensor 2, sequence, selective checkpointing", ranks=2, knobs=TENSOR | SELECTIVE | {"sequence_parallel": True}),
    Case(name="tensor 2, overlapped", ranks=2, knobs=TENSOR | {"async_tensor_parallel": True}),
    Case(
        name="tensor 2, sequence, overlapped", ranks=2,
        knobs=TENSOR | {"sequence_parallel": True, "async_tensor_parallel": True},
    ),
    Case(name="context 2", ranks=2, knobs={"context_parallel_size": 2}),
    Case(name="context 2, Ulysses", ranks=2, knobs={"context_parallel_size": 2, "context_parallel_method": "ulysses"}),
    Case(name="experts 2, bf16", ranks=2, knobs={"expert_parallel_size": 2, "precision": "bf16"}, spec=EXPERTS),
    Case(
        name="stage 3, tensor 2, sequence, context 2, selective checkpointing", ranks=8,
        knobs=TENSOR | SELECTIVE | {"sequence_parallel": True, "context_parallel_size": 2, "zero_stage": 3},
    ),
)  # fmt: skip


def counts_of(case: Case, compiled: bool) -> Counts | None:
    """The counts of rank 0; None: the engine refuses the configuration."""
    config = TrialConfig(micro_batch_size=1).replace({**case.knobs, "compile_blocks": compiled})
    workload = Workload(global_batch_size=config.data_parallel_size(case.ranks), sequence_length=SPEC.sequence_length)
    counters.clear()
    if case.ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    try:
        context = RankContext(rank=0, world_size=case.ranks, device=torch.device("cpu"))
        session = NativeEngine().build(context, case.spec, config, workload)
        spent = []
        for step in range(WARM_STEPS + TIMED_STEPS):
            session.prepare(step)
            began = time.process_time()
            session.run_step()
            spent.append(time.process_time() - began)
        session.prepare(WARM_STEPS + TIMED_STEPS)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            session.run_step()
        graphs = counters["stats"]["unique_graphs"]
        session.close()
    except EngineRefusalError:
        return None
    finally:
        if case.ranks > 1:
            dist.destroy_process_group()
    names = Counter(event.name for event in recorded.events() if event.name.startswith(("aten::", "autotune::", "c10d::")))
    return Counts(
        graphs=graphs,
        products=sum(count for name, count in names.items() if name in PRODUCTS),
        copies=sum(count for name, count in names.items() if name in COPIES),
        operators=names.total(),
        milliseconds=1e3 * min(spent[WARM_STEPS:]),
    )


def main() -> int:
    page_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        for compiled in (False, True):
            try:
                print(case.ranks, case.name, compiled, counts_of(case, compiled), flush=True)
            except Exception as error:
                print(case.ranks, case.name, compiled, repr(error)[:600], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
