"""A rank of `benchmarks/engines/update_counts.py`."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.engine import RankContext
from executor.engines.native.buckets import GradientReducer
from executor.engines.native.engine import NativeEngine
from executor.engines.session import ParallelSession, Update
from executor.parallel.collectives import ProcessGroup
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

RANKS = 2
CPU = torch.device("cpu")
SPEC = ModelSpec(
    name="llama of 8 layers", family="llama", num_layers=8, hidden_size=64, num_attention_heads=4, num_key_value_heads=4,
    head_dim=16, ffn_hidden_size=128, vocab_size=1024, sequence_length=16,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=8, sequence_length=16)
LARGE = ModelSpec(
    name="llama of 97 million parameters", family="llama", num_layers=12, hidden_size=768, num_attention_heads=12,
    num_key_value_heads=12, head_dim=64, ffn_hidden_size=2048, vocab_size=8192, sequence_length=8,
)  # fmt: skip
FREE = ("empty", "detach", "_unsafe_view", "new_empty", "lift_fresh")
"""Operators other than views that start nothing on a device."""


class Operations(TorchDispatchMode):
    """Counts operators that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        views = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        self.reads += name == "_local_scalar_dense"
        self.count += not views and name not in FREE and not name.startswith("c10d")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Counts and times of one step of a rank."""

    reducing: int
    updating: int
    seconds: float
    """CPU seconds of both, measured without counting operators."""
    loss: float


def step_of(rank: int, config: TrialConfig) -> Step:
    """The third step's operations, and the shortest of ten steps' seconds."""
    session = NativeEngine().build(RankContext(rank=rank, world_size=RANKS, device=CPU), SPEC, config, WORKLOAD)
    reducing, updating, spent = Operations(), Operations(), 0.0
    counts = False

    def around(owner: type, name: str, operations: Operations) -> Any:
        plain = getattr(owner, name)

        def inner(*arguments: Any, **named: Any) -> Any:
            nonlocal spent
            began = time.process_time()
            with operations if counts else ExitStack():
                result = plain(*arguments, **named)
            spent += time.process_time() - began
            return result

        return patch.object(owner, name, inner)

    with ExitStack() as stack:
        for name in ("take", "declare_ready", "end_micro_batch"):
            stack.enter_context(around(GradientReducer, name, reducing))
        stack.enter_context(around(ParallelSession, "_update", updating))
        seconds = []
        for step in range(13):
            session.prepare(step)
            counts, spent = step == 2, 0.0
            loss = session.train_step().loss
            if step > 2:
                seconds.append(spent)
    session.close()
    return Step(reducing=reducing.count, updating=updating.count, seconds=min(seconds), loss=loss or 0.0)


def overlap_of(rank: int, stage: int) -> tuple[int, int]:
    """Reductions of a large model's step: all, and those that began before backward computed the last gradient."""
    config = TrialConfig(zero_stage=stage, micro_batch_size=1)
    workload = Workload(global_batch_size=RANKS, sequence_length=LARGE.sequence_length)
    session = NativeEngine().build(RankContext(rank=rank, world_size=RANKS, device=CPU), LARGE, config, workload)
    log: list[str] = []

    def logged(owner: type, name: str, entry: str) -> Any:
        plain = getattr(owner, name)

        def inner(*arguments: Any, **named: Any) -> Any:
            log.append(entry)
            return plain(*arguments, **named)

        return patch.object(owner, name, inner)

    session.prepare(0)
    with (
        logged(ProcessGroup, "all_reduce", "reduce"),
        logged(ProcessGroup, "reduce_scatter", "reduce"),
        logged(GradientReducer, "take", "gradient"),
        patch.object(ParallelSession, "_update", lambda _: Update(norm=None)),
    ):
        session.run_step()
    session.close()
    last = len(log) - 1 - log[::-1].index("gradient")
    return log.count("reduce"), log[:last].count("reduce")


def work(rank: int, task: tuple[str, Any]) -> Any:
    """Run a rank's task."""
    torch.manual_seed(0)
    kind, value = task
    return step_of(rank, value) if kind == "step" else overlap_of(rank, value)
