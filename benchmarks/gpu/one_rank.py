"""A process group of one rank over which the engine nevertheless sends everything: NCCL on a GPU, gloo on a CPU.

With one rank the engine copies instead of sending, so that a machine with one GPU would never call NCCL. Here the size of its
data-parallel group is a 1 that compares unequal to 1: the engine's own code then starts every collective, on its own streams,
and its results must equal those without sending. The group is destroyed and created again in between.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.gpu.models import model_of, workload_of
from benchmarks.gpu.proof import LOSS_BOUND, Item, Proof, apart
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.groups import ParallelGroups
from search_spaces.mesh import DATA
from search_spaces.trial_config import TrialConfig

CYCLES = 3
"""Number of groups that are created and destroyed in turn."""
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
STEPS = 3
TRAINED: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0, "reduce_bucket_size": 50_000},
    "stage 1": {"zero_stage": 1, "overlap_param_gather": True},
    "stage 2": {"zero_stage": 2, "reduce_bucket_size": 50_000, "allgather_bucket_size": 50_000},
    "stage 3": {"zero_stage": 3, "param_persistence_threshold": 0},
    "stage 3 without prefetch": {"zero_stage": 3, "prefetch_bucket_size": 0, "reduce_dtype": "bf16"},
}
"""Configurations trained over the group, each compared with the same without sending."""


class Sending(int):
    """A number of ranks that is 1 in arithmetic, but unequal to 1 where the engine checks for a single rank."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return other != 1 and int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def items() -> list[Item]:
    """Items of the part correctness."""
    each = [Item(name="one rank: every collective", show=prove_collectives, seconds=15.0)]
    for label, knobs in TRAINED.items():
        show = partial(prove_engine, knobs=knobs)
        each.append(Item(name=f"one rank: {label}", show=show, seconds=12.0, group="one rank"))
    return each


@contextmanager
def one_rank(device: torch.device) -> Iterator[str]:
    """Create a default process group of this one process; yield the name of its backend."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    own = device if backend == "nccl" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=own)
    try:
        yield backend
    finally:
        dist.destroy_process_group()


def prove_collectives(proof: Proof) -> None:
    """Check every operation of the engine's `ProcessGroup` in every type, over several groups in turn."""
    device = proof.setting.device
    proof.setting.free()
    base = _allocated(device)
    for cycle in range(CYCLES):
        with one_rank(device) as backend:
            wrong = [
                f"{name} of {dtype}" for dtype in DTYPES for name in _wrong(ProcessGroup(None, Sending(1), 0), dtype, device)
            ]
        text = f"wrong are {', '.join(wrong)}" if wrong else "every operation is right"
        proof.claim(not wrong, f"group {cycle + 1} of {CYCLES} over {backend}: {text}")
    proof.setting.free()
    left = _allocated(device) - base
    proof.claim(left == 0, f"{left:,} bytes are left on the device after the last group")


def _wrong(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names of operations that have a wrong result or sent nothing."""
    value = torch.arange(1, 97, device=device).to(dtype)
    rows = value.view(1, -1).clone()
    output, gathered, received = torch.zeros_like(value), torch.zeros_like(rows), torch.zeros_like(rows)
    summed, parts = value.clone(), [value[:32].clone(), value[32:].clone()]
    highest = value.clone()
    handles: dict[str, InFlight] = {
        "all_reduce": group.all_reduce(summed),
        "all_reduce (max)": group.all_reduce(highest, dist.ReduceOp.MAX),
        "reduce_scatter": group.reduce_scatter(output, rows),
        "all_gather": group.all_gather(gathered, value),
        "all_to_all": group.all_to_all(received, rows, [1], [1]),
    }
    for handle in handles.values():
        handle.wait()
    group.all_reduce_parts(parts)
    found = {
        "all_reduce": summed, "all_reduce (max)": highest, "reduce_scatter": output, "all_gather": gathered[0],
        "all_to_all": received[0], "all_reduce_parts": torch.cat(parts),
    }  # fmt: skip
    silent = [name for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all") if name not in group.sent]
    return [name for name, result in found.items() if not torch.equal(result, value)] + silent


def prove_engine(proof: Proof, knobs: dict[str, Any]) -> None:
    """Compare losses of steps that send over two groups in turn with losses of steps that send nothing."""
    device = proof.setting.device
    losses: list[list[float]] = []
    sent = 0
    for sends in (False, True, True):
        with one_rank(device) as backend, _sending() if sends else nullcontext():
            found, count = _train(proof, knobs)
        losses.append(found)
        sent += count
    off = [apart(found, losses[0]) for found in losses[1:]]
    # On a GPU the backward of flash attention sums in a different order each time.
    bound = LOSS_BOUND["bf16"] if proof.setting.on_gpu else 0.0
    differences = " and ".join(f"{one:.1e}" for one in off)
    proof.claim(max(off) <= bound, f"{STEPS} losses over {backend}, in two groups: {differences} off those without sending")
    proof.claim(sent > 0, f"{sent} collectives were sent")


@contextmanager
def _sending() -> Iterator[None]:
    make = ParallelGroups._group

    def group(self: ParallelGroups, dimension: str, ranks: Any) -> ProcessGroup:
        made = make(self, dimension, ranks)
        if dimension == DATA:
            made.size = Sending(made.size)
        return made

    with patch.object(ParallelGroups, "_group", group):
        yield


def _train(proof: Proof, knobs: dict[str, Any]) -> tuple[list[float], int]:
    """Losses, and the number of collectives started."""
    setting = proof.setting
    config = TrialConfig(precision="bf16", micro_batch_size=2).replace(knobs)
    context = RankContext(rank=0, world_size=1, device=setting.device)
    session = NativeEngine().build(context, model_of("small"), config, workload_of("small"))
    try:
        losses = []
        for step in range(STEPS):
            session.prepare(step)
            losses.append(session.train_step().loss or 0.0)
        return losses, sum(count for count, _ in session.collectives().values())
    finally:
        session.close()
        setting.free()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
