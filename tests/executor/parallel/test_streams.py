"""The order of copies, transfers and collectives on streams: none is missing in the engine, and faults planted there are found.

One rank of a world that is not there (the fake process group), on CPU tensors that a checker takes for a device's.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from stream_checker import COMPUTE, Stream, StreamChecker
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.gang import Gang
from benchmarks.common.static_buffers import StaticBuffers, _Graph
from executor.engine import RankContext
from executor.engines import session as sessions
from executor.engines.native import file_shard
from executor.engines.native.buckets import GradientReducer
from executor.engines.native.engine import NativeEngine
from executor.engines.native.file_shard import FileShare
from executor.engines.native.parameter_shard import Loaded
from executor.engines.native.prefetch import ParameterGatherer
from executor.files.rank_file import FileStream
from executor.parallel import copies
from executor.parallel.activation_offload import _SavedPiece
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.copies import Copy
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

SPEC = ModelSpec(
    name="followed", family="llama", num_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=24, vocab_size=32, sequence_length=16,
)  # fmt: skip
BUCKET = 1500
"""Elements: less than a block, so that steps have several buckets and chunks."""
STEPS = 2
"""Stage 3 records its trace in the first one."""

Knobs = dict[str, Value]
OFFLOADED: Knobs = {"offload_optimizer": "cpu", "offload_param": "cpu"}
IN_FILES: Knobs = {"offload_optimizer": "nvme", "offload_param": "nvme"}


def followed(
    folder: Path, checker: StreamChecker, ranks: int = 2, rank: int = 0, clipping: float = 0.0, **knobs: Value
) -> None:
    """Build a session and train a few steps, with two micro-batches each."""
    standing: Knobs = {
        "micro_batch_size": 2, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET,
        "prefetch_bucket_size": 2 * BUCKET, "param_persistence_threshold": 100,
    }  # fmt: skip
    config = TrialConfig().replace({**standing, **knobs})
    samples = 4 * config.data_parallel_size(ranks)
    workload = Workload(global_batch_size=samples, sequence_length=16, gradient_clipping=clipping, nvme_path=str(folder))
    context = RankContext(rank=rank, world_size=ranks, device=torch.device("cpu"))
    # Of the last block nothing is offloaded; capturing a block takes longer than all else.
    layers = 4 if config.pipeline_parallel_size > 1 else 2 + config.offload_activations - config.cuda_graphs
    experts: dict[str, int] = {"num_experts": 4, "experts_per_token": 2} if config.expert_parallel_size > 1 else {}
    if config.shared_expert_overlap:
        experts["shared_expert_size"] = 16
    spec = dataclasses.replace(SPEC, num_layers=layers, **experts)
    with checker.running():
        session = NativeEngine(StaticBuffers).build(context, spec, config, workload)
        for step in range(STEPS):
            session.prepare(step)
            session.train_step()
        session.close()


@contextmanager
def world(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with patch.object(sessions, "EAGER_STEPS", 1):
            yield
    finally:
        dist.destroy_process_group()


CLEAN = [
    (2, {"zero_stage": 0}),
    (2, {"zero_stage": 1, "overlap_param_gather": True, "reduce_dtype": "int8"}),
    (4, {"zero_stage": 3, "hsdp_shard_size": 2, "offload_optimizer": "cpu", "offload_ratio": 0.5}),
    (2, {"zero_stage": 2, "contiguous_gradients": False, "precision": "bf16", "offload_activations": True}),
    (2, {"zero_stage": 3}),
    (4, {"zero_stage": 3, "secondary_shard_size": 2, "gather_dtype": "int8", "reshard_after_forward": False}),
    (1, {"zero_stage": 3, **OFFLOADED}),
    (2, {"zero_stage": 3, **OFFLOADED, "offload_activations": True, "activation_checkpointing": "full"}),
    (2, {"zero_stage": 3, **OFFLOADED, "lora_rank": 4, "frozen_dtype": "nf4", "overlap_comm": False}),
    (2, {"zero_stage": 3, **IN_FILES}),
    (2, {"zero_stage": 1, "cuda_graphs": True}),
    (2, {"tensor_parallel_size": 2, "sequence_parallel": True, "async_tensor_parallel": True}),
    (4, {"zero_stage": 1, "context_parallel_size": 2, "context_parallel_method": "ulysses"}),
]
"""Ranks, and knobs."""


@pytest.mark.prove
@pytest.mark.parametrize(("ranks", "knobs"), sampled(CLEAN, every=6), ids=str)
def test_the_engine_orders_all_that_it_does(tmp_path: Path, ranks: int, knobs: Knobs) -> None:
    checker = StreamChecker()
    with world(ranks):
        followed(tmp_path, checker, ranks, clipping=1.0, **knobs)
    assert [str(fault) for fault in checker.faults] == []
    assert not checker.held, "collectives that nobody has waited for"
    kinds = {name.split()[0] for name in checker.operations}
    offloads = [
        name for name in ("offload_optimizer", "offload_param", "offload_activations") if knobs.get(name, "none") != "none"
    ]
    assert ("communication" in kinds) == (ranks > 1)
    assert ("copies" in kinds) == bool(offloads)
    assert ("transfer" in kinds) == ("nvme" in knobs.values())


def followed_rank(rank: int, task: tuple[str, Knobs]) -> tuple[list[str], int]:
    """What is found on a real rank, and how many messages there were."""
    folder, knobs = task
    checker = StreamChecker()
    followed(Path(folder), checker, 2, rank, **knobs)
    sent = sum(count for name, count in checker.operations.items() if name.startswith("communication"))
    return [*map(str, checker.faults), *("nobody has waited for a message" for _ in checker.held)], sent


@pytest.mark.prove
def test_pipelines_and_experts_order_their_messages(forked_ranks: None, tmp_path: Path) -> None:
    """On real ranks: what they do next depends on what they are sent."""
    pipeline: Knobs = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2}
    with Gang(2, followed_rank) as gang:
        experts: Knobs = {"expert_parallel_size": 2, "offload_optimizer": "cpu"}
        shared: Knobs = {"expert_parallel_size": 2, "shared_expert_overlap": True, "activation_checkpointing": "full"}
        for knobs in ({**pipeline, "offload_activations": True}, experts, shared):
            for faults, sent in gang.run((str(tmp_path), {"zero_stage": 1, **knobs})):
                assert faults == []
                assert sent


@contextmanager
def hooks_elsewhere(checker: StreamChecker) -> Iterator[None]:
    """Autograd runs the hooks of every other parameter on a stream of its own, as after a capture: behind what made the
    gradient, and backward ends behind them."""
    register, backward, stream = Tensor.register_post_accumulate_grad_hook, Tensor.backward, checker.new_stream("elsewhere")
    count = itertools.count()

    def registered(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
        def elsewhere(value: Tensor) -> None:
            stream.wait_stream(checker.compute)
            with stream:
                hook(value)

        return register(parameter, elsewhere if next(count) % 2 else hook)

    def joined(loss: Tensor, *how: Any, **options: Any) -> None:
        backward(loss, *how, **options)
        checker.compute.wait_stream(stream)

    with patch.multiple(Tensor, register_post_accumulate_grad_hook=registered, backward=joined):
        yield


@contextmanager
def hooks_stay_elsewhere(checker: StreamChecker) -> Iterator[None]:
    """What the hooks start stays on that stream."""
    with hooks_elsewhere(checker), patch.object(copies, "resumed", lambda _: nullcontext()):
        yield


@pytest.mark.prove
@pytest.mark.parametrize(
    "knobs", [{"zero_stage": 1}, {"zero_stage": 1, "contiguous_gradients": False}, {"zero_stage": 3}], ids=str
)
def test_gradients_may_come_on_another_stream(tmp_path: Path, knobs: Knobs) -> None:
    checker = StreamChecker()
    with world(2), hooks_elsewhere(checker):
        followed(tmp_path, checker, 2, **knobs)
    assert [str(fault) for fault in checker.faults] == []


class Planted(NamedTuple):
    """A fault, and what the checker must say of it."""

    knobs: Knobs
    change: Callable[[StreamChecker], AbstractContextManager[Any]]
    says: tuple[str, str, str]
    """What the later operation is, what it does, and to what an earlier one did."""


def not_waited_for(taken: Any) -> None:
    """The collective goes on, and nobody waits for it."""
    taken.work = InFlight(lambda: None)


def without_wait(owner: type, name: str) -> AbstractContextManager[Any]:
    """`owner`'s method is given something with a collective, and takes it for done."""
    real = getattr(owner, name)

    def method(self: Any, taken: Any) -> None:
        not_waited_for(taken)
        real(self, taken)

    return patch.object(owner, name, method)


def beside(owner: type, name: str, checker: StreamChecker, joins: bool = False) -> AbstractContextManager[Any]:
    """`owner`'s method runs on a stream of its own, which does not wait for the current one; `joins`: that one waits for it."""
    real, stream = getattr(owner, name), checker.new_stream("beside")

    def method(*arguments: Any) -> Any:
        with stream:
            result = real(*arguments)
        if joins:
            checker.compute.wait_stream(stream)
        return result

    return patch.object(owner, name, method)


def free_without_wait(piece: _SavedPiece) -> None:
    """`_Piece.free_original` without its wait."""
    piece._copy = piece._original = piece._flat = None


_fetch = _SavedPiece.fetch


def fetch_and_forget(piece: _SavedPiece) -> None:
    """`_Piece.fetch`, whose copy nobody waits for."""
    _fetch(piece)
    piece._copy = None


def write_before_update(share: FileShare, index: int, gradient: Tensor) -> Tensor:
    """`FileShare.step`, whose write begins too early."""
    buffer = share._stream.take()
    master, *moments = share._parts(index, buffer)
    optimizer = file_shard.host_adamw(master, (moments[0], moments[1]), share._steps[index], share._hyperparameters)
    share._stream.put_back(index, buffer)
    return file_shard.updated(optimizer, gradient)


def take_at_once(stream: FileStream) -> memoryview:
    """`FileStream.take` without its wait."""
    stream._read_ahead()
    _, buffer = stream._reading.popleft()
    stream._read_ahead()
    return buffer


def reclaim_at_once(stream: FileStream) -> None:
    """`FileStream._reclaim` without its wait."""
    stream._free.append(stream._writing.popleft()[1])


OPTIMIZER: Knobs = {"zero_stage": 1, "offload_optimizer": "cpu"}
ACTIVATIONS: Knobs = {"zero_stage": 2, "offload_activations": True}
PLANTED = {
    "a prefetched parameter is used before it came": Planted(
        {"zero_stage": 3}, lambda _: without_wait(ParameterGatherer, "_land"),
        ("split_with_sizes_copy in parameter_shard.fill on compute", "reads", "all_gather_single in prefetch._gather"),
    ),
    "a gather reads what has not come from the host": Planted(
        {"zero_stage": 3, **OFFLOADED}, lambda _: patch.object(Loaded, "before", lambda _: nullcontext()),
        ("all_gather_single in prefetch._gather", "reads", "copy_ in parameter_shard"),
    ),
    "parameters are overwritten while backward reads them": Planted(
        {"zero_stage": 3}, lambda checker: beside(ParameterGatherer, "_land", checker, joins=True),
        ("free in prefetch.gradient_done on beside", "frees", "mm in session._accumulate on compute reads"),
    ),
    "what is saved for backward is freed while it is copied": Planted(
        ACTIVATIONS, lambda _: patch.object(_SavedPiece, "free_original", free_without_wait),
        ("free in activation_offload", "frees", "copy_ in activation_offload.__init__ on copies"),
    ),
    "backward reads what has not come back from the host": Planted(
        ACTIVATIONS, lambda _: patch.object(_SavedPiece, "fetch", fetch_and_forget),
        ("in session._accumulate on compute", "reads", "copy_ in activation_offload.fetch on copies"),
    ),
    "a pinned buffer is filled while its copy runs": Planted(
        OPTIMIZER, lambda _: patch.object(Copy, "end", lambda _: None),
        ("copy_ in parameter_shard.accept_from_host on host", "writes", "copy_ in parameter_shard.accept_from_host on copies"),
    ),
    "a file is read into memory that is still copied to the device": Planted(
        {"zero_stage": 3, "param_persistence_threshold": 0, **IN_FILES}, lambda _: patch.object(Copy, "end", lambda _: None),
        ("file_shard", "writes", "copy_ in file_shard"),
    ),
    "the host reads a gradient that has not arrived": Planted(
        OPTIMIZER, lambda _: patch.object(Copy, "wait", lambda _: None),
        ("_fused_adamw_ in offload.updated on host", "writes", "copy_ in offload"),
    ),
    "a gradient leaves for the host before it is made": Planted(
        OPTIMIZER, lambda _: patch.object(Stream, "wait_stream", lambda *_: None),
        ("copy_ in offload", "reads", "on"),
    ),
    "a collective reads a gradient that is being made": Planted(
        {"zero_stage": 1}, lambda checker: beside(ProcessGroup, "reduce_scatter", checker),
        ("reduce_scatter_single in buckets._reduce", "reads", "in buckets._put on compute"),
    ),
    "a collective does not wait for a gradient's hook": Planted(
        {"zero_stage": 1}, hooks_stay_elsewhere,
        ("reduce_scatter_single in buckets._reduce on", "reads", "on elsewhere"),
    ),
    "the update reads a sum that has not come": Planted(
        {"zero_stage": 1}, lambda _: without_wait(GradientReducer, "_land"),
        ("_fused_adamw_ in offload.step_scaled on compute", "writes", "reduce_scatter_single in buckets._reduce"),
    ),
    "a file is written from a buffer that is being filled": Planted(
        {"zero_stage": 1, "offload_optimizer": "nvme"}, lambda _: patch.object(FileShare, "step", write_before_update),
        ("_fused_adamw_ in offload.updated on host", "writes", "write of a file in rank_file.put_back"),
    ),
    "a buffer is used while a file is read into it": Planted(
        {"zero_stage": 1, "offload_optimizer": "nvme"}, lambda _: patch.object(FileStream, "take", take_at_once),
        ("_fused_adamw_ in offload.updated on host", "writes", "read of a file in rank_file._read_ahead"),
    ),
    "a file is read into a buffer that is being written": Planted(
        {"zero_stage": 1, "offload_optimizer": "nvme"}, lambda _: patch.object(FileStream, "_reclaim", reclaim_at_once),
        ("read of a file in rank_file._read_ahead", "writes", "write of a file in rank_file.put_back"),
    ),
    "a graph reads an input of another stream": Planted(
        {"zero_stage": 1, "cuda_graphs": True}, lambda checker: beside(_Graph, "replay", checker, joins=True),
        ("copy_ in graphs._run on beside", "reads", "on compute"),
    ),
}  # fmt: skip


@pytest.mark.prove(every=15)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(tmp_path: Path, name: str) -> None:
    planted, checker = PLANTED[name], StreamChecker()
    with world(2), planted.change(checker):
        followed(tmp_path, checker, 2, **planted.knobs)
    said = [str(fault) for fault in checker.faults]
    later, verb, earlier = planted.says
    assert any(
        later in one.split(f" {verb} ")[0] and earlier in one.split(f" {verb} ")[-1] for one in said if f" {verb} " in one
    ), said


def test_without_order_each_kind_of_access_is_a_fault() -> None:
    """By hand, and the same with order; columns beside each other do not meet."""
    checker = StreamChecker()
    with checker.running():
        other = checker.new_stream()
        value = torch.zeros(4, 6)
        with other:
            value.sum()
        assert [(fault.verb, fault.earlier.stream) for fault in checker.faults] == [("reads", COMPUTE)]
        checker.compute.wait_stream(other)
        other.wait_stream(checker.compute)
        with other:
            value[:, :3].mul_(2)
        value[:, 3:].mul_(2)
        assert len(checker.faults) == 1
        value[:, 2:].mul_(2)
        assert [(fault.verb, fault.earlier.stream) for fault in checker.faults[1:]] == [("writes", other.name)]
        checker.compute.wait_event(other.record_event())
        value.mul_(2)
        assert len(checker.faults) == 2
        other.wait_stream(checker.compute)
        with other:
            value.sum()
        del value
    assert [fault.verb for fault in checker.faults[2:]] == ["frees"]


def test_memory_that_a_stream_is_recorded_for_may_be_freed() -> None:
    checker = StreamChecker()
    with checker.running():
        other, value = checker.new_stream(), torch.zeros(4)
        other.wait_stream(checker.compute)
        with other:
            value.sum()
        value.record_stream(other)  # type: ignore[arg-type]
        del value
    assert checker.faults == []
