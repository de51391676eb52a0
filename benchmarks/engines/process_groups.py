"""Process groups of 64 ranks, counted, and the seconds in which gloo makes those of 8 and 16. Exit code 1 if a bound is missed.

    python -m benchmarks.engines.process_groups [--ranks 8 16] [--markdown docs/results/process-groups.md]

1. For each of 64 ranks the engine builds the groups of a layout over torch's fake backend, once as over NCCL, whose
   communicators are bound to devices (`split_group`), and once as over gloo (`new_group`). Every call is recorded.
   Bounds over NCCL: one call for each dimension along which a rank communicates, and each rank joins only groups that it
   belongs to.
2. Real gloo ranks, forked from one process, build the same layouts at smaller sizes. The seconds of one `new_group` are
   extrapolated to 64 ranks.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.written_page import judge, page_parser, table
from executor.engine import RankContext
from executor.parallel.groups import ParallelGroups
from search_spaces.mesh import make_mesh
from search_spaces.trial_config import TrialConfig

RANKS = 64
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "data": {"zero_stage": 3},
    "tensor 8": {"tensor_parallel_size": 8, "zero_stage": 1},
    "context 4": {"context_parallel_size": 4, "zero_stage": 2},
    "pipeline 4": {"pipeline_parallel_size": 4},
    "experts 8": {"expert_parallel_size": 8, "zero_stage": 1},
    "hsdp 8": {"hsdp_shard_size": 8, "zero_stage": 3},
    "tensor 4, context 2, pipeline 2": {"tensor_parallel_size": 4, "context_parallel_size": 2, "pipeline_parallel_size": 2},
    "tensor 2, pipeline 4, experts 4, hsdp 4": {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 4, "expert_parallel_size": 4, "hsdp_shard_size": 4,
        "zero_stage": 3,
    },
}  # fmt: skip
TIMED: Mapping[str, Any] = {"tensor_parallel_size": 2, "context_parallel_size": 2}
"""Layout of the ranks that are timed: two data ranks or more, so that each of three dimensions has several groups."""
COMMAND = "python -m benchmarks.engines.process_groups --markdown docs/results/process-groups.md"
REPEATS = 3
SECONDS_LIMIT = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The calls of all ranks that build a layout."""

    calls: tuple[int, ...]
    """Of each rank: calls that make groups."""
    dimensions: tuple[int, ...]
    """Of each rank: dimensions along which it communicates with some of the ranks, but not with all."""
    joined: tuple[int, ...]
    """Of each rank: groups that it belongs to."""
    foreign: int
    """Groups that some rank would join without belonging to them."""
    whole: int
    """Groups in all; those of the same ranks along two dimensions are two."""


def count(knobs: Mapping[str, Any], ranks: int, bound: bool) -> Counted:
    """Build the groups of every rank; `bound`: as over NCCL."""
    calls: list[int] = []
    joined: list[int] = []
    everything: set[tuple[int, tuple[int, ...]]] = set()
    dimensions: list[int] = []
    foreign = 0
    mesh = make_mesh(TrialConfig().replace(knobs), ranks)
    for rank in range(ranks):
        own: list[tuple[int, ...]] = []
        made: list[object] = []

        def split(split_ranks: list[list[int]], rank: int = rank, own: Any = own, made: Any = made, **_: object) -> object:
            own += [tuple(one) for one in split_ranks if rank in one]
            made.append(split_ranks)
            return mock.Mock(spec=dist.ProcessGroup)

        def make(one: list[int], rank: int = rank, own: Any = own, made: Any = made, **_: object) -> object:
            own += [tuple(one)] if rank in one else []
            made.append(one)
            return mock.Mock(spec=dist.ProcessGroup) if rank in one else None

        hook = sys.excepthook
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            assert dist.group.WORLD is not None
            if bound:
                dist.group.WORLD.bound_device_id = torch.device("cuda:0")
            with mock.patch.object(dist, "split_group", split), mock.patch.object(dist, "new_group", make):
                built = ParallelGroups(mesh, RankContext(rank=rank, world_size=ranks, device=torch.device("cpu")))
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook  # torch wraps it each time
        dimensions.append(sum(1 < group.size < ranks for _, group in built.by_dimension))
        calls.append(len(made))
        joined.append(len(own))
        foreign += sum(rank not in one for one in own)
        everything |= {*enumerate(own)}
    return Counted(
        calls=tuple(calls), dimensions=tuple(dimensions), joined=tuple(joined), foreign=foreign, whole=len(everything)
    )


def _rank(rank: int, ranks: int, path: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(path, ranks), rank=rank, world_size=ranks)
    seconds = []
    mesh = make_mesh(TrialConfig().replace(TIMED), ranks)
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        made = ParallelGroups(mesh, RankContext(rank=rank, world_size=ranks, device=torch.device("cpu")))
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        made.close()
    results.put(seconds)
    results.close()
    results.join_thread()
    dist.destroy_process_group()


def measure(ranks: int) -> float:
    """Seconds of gloo ranks until all have all groups of `TIMED`: the median of the repeats, each of the slowest rank."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(rank, ranks, f"{folder}/store", results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            taken = [results.get(timeout=SECONDS_LIMIT) for _ in processes]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    slowest: list[float] = [max(times) for times in zip(*taken, strict=True)]
    return statistics.median(slowest)


def extrapolated(seconds: Mapping[int, float], calls: Mapping[int, int], wanted_calls: int) -> tuple[float, float, float]:
    """Seconds of `RANKS` ranks for so many calls, and a band.

    A call's seconds grow with the ranks as between the two measured sizes. Lower end: a call takes as long as at the larger
    size; upper: it grows with the square of the ranks, or as measured if that is more.
    """
    small, large = sorted(seconds)
    each = {ranks: seconds[ranks] / calls[ranks] for ranks in seconds}
    times, ratio = RANKS / large, each[large] / each[small]
    power = max(torch.log2(torch.tensor(ratio)).item() / torch.log2(torch.tensor(large / small)).item(), 0.0)
    low, high = each[large], each[large] * times ** max(2.0, power)
    return wanted_calls * each[large] * times**power, wanted_calls * low, wanted_calls * high


def problems(counted: Mapping[str, Counted]) -> list[str]:
    """What breaks a bound over NCCL."""
    wrong = []
    for name, one in counted.items():
        if one.calls != one.dimensions:
            wrong.append(f"{name}: ranks call {sorted(set(one.calls))} times for {sorted(set(one.dimensions))} dimensions")
        if one.foreign or one.joined != one.dimensions:
            wrong.append(f"{name}: a rank joins groups that it does not belong to")
    return wrong


def page(
    split: Mapping[str, Counted], separate: Mapping[str, Counted], seconds: Mapping[int, float], calls: Mapping[int, int]
) -> str:
    """Markdown."""
    headings = (
        "layout",
        "groups",
        "of a rank",
        "its calls over NCCL",
        "over gloo",
        f"seconds over gloo, {RANKS} ranks",
        "band",
    )
    rows = []
    for name, one in split.items():
        gloo = max(separate[name].calls)
        middle, low, high = extrapolated(seconds, calls, gloo)
        rows.append(
            (
                name,
                str(one.whole),
                str(max(one.joined)),
                str(max(one.calls)),
                str(gloo),
                f"{middle:.2g}",
                f"{low:.2g} to {high:.2g}",
            )
        )
    measured = " and ".join(
        f"{value:.3f} s of {calls[ranks]} calls on {ranks} ranks" for ranks, value in sorted(seconds.items())
    )
    about = (
        f"The engine builds the groups of {RANKS} ranks over torch's fake backend; every call is recorded on every rank. Over "
        "NCCL, whose communicators are bound to devices, one split makes all groups of a dimension: a rank calls once for each "
        "dimension along which it communicates, and joins only its own groups. A dimension of all ranks uses the default group "
        "and needs no call. Over gloo a rank calls `new_group` for each group of a dimension and waits in each for all ranks."
    )
    timed = (
        f"Measured: {measured} (gloo, ranks forked on a machine with {os.cpu_count()} cores beside other work; the median of "
        f"{REPEATS} repeats, each of the slowest rank). The columns in seconds extrapolate the seconds of a call to {RANKS} "
        "ranks, as they grow between these sizes; the band is from no growth to growth with the square of the ranks. Ranks "
        "that share cores wait for each other, which ranks with cores of their own do not; ranks of several hosts wait for "
        "the network besides, which these do not. NCCL was not timed: it needs devices."
    )
    lines = [
        "# Process groups of a large gang",
        "",
        f"Written by `{COMMAND}`.",
        "",
        about,
        "",
        *table(headings, rows),
        "",
        timed,
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser: argparse.ArgumentParser = page_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs=2, default=(8, 16), help="the numbers of ranks that are timed")
    arguments = parser.parse_args()
    sizes: Sequence[int] = arguments.ranks
    split, separate = ({name: count(knobs, RANKS, bound) for name, knobs in LAYOUTS.items()} for bound in (True, False))
    calls = {ranks: max(count(TIMED, ranks, bound=False).calls) for ranks in sizes}
    seconds = {ranks: measure(ranks) for ranks in sizes}
    return judge(page(split, separate, seconds, calls), problems(split), arguments.markdown)


if __name__ == "__main__":
    sys.exit(main())
