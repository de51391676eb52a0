"""How gradients come into their buckets and parameters out of the update: in few operations, with the same numbers."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.engines.update_counts_rank import Operations
from executor.engines.native.buckets import GradientReducer
from executor.engines.native.offload import step_scaled, update_groups
from executor.engines.native.parameter_shard import BucketLayout, MasterShard, as_rows, make_layout
from executor.engines.native.refill import fill
from executor.parallel import collectives
from executor.parallel.collectives import InFlight, ProcessGroup, group_options
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

SHAPES = ((4, 6), (5,), (3, 3), (7,), (1,), (8, 2))
"""Of parameters, of which two ranks do not share every one evenly."""
CPU = torch.device("cpu")
ALONE = ProcessGroup(None, 1, 0)


class Recording(ProcessGroup):
    """One rank of several, which keeps what it would send."""

    def __init__(self, size: int) -> None:
        super().__init__(None, size, 0)
        self.rows: list[Tensor] = []

    def all_reduce(self, value: Tensor, operation: Any = None) -> InFlight:
        self.rows.append(value.clone())
        return InFlight(lambda: None)

    def reduce_scatter(self, output: Tensor, rows: Tensor) -> InFlight:
        self.rows.append(rows.clone())
        output.copy_(rows[0])
        return InFlight(lambda: None)


class Reduction:
    """A reducer over parameters of `SHAPES`, which get gradients without a model."""

    def __init__(self, ranks: int, dtype: torch.dtype, bucket: int = 10**6, **knobs: Any) -> None:
        torch.manual_seed(0)
        # The last one is large, so that all others make one piece.
        shapes = [*SHAPES, (40, 10)]
        named = [(f"p{index}", nn.Parameter(torch.randn(shape, dtype=dtype))) for index, shape in enumerate(shapes)]
        self.layout: BucketLayout = make_layout(named, ranks, bucket)
        self.group = Recording(2)
        config = TrialConfig(zero_stage=1 if ranks > 1 else 0).replace(knobs)
        self.reducer = GradientReducer(self.layout, self.group, ALONE, config, torch.float32, CPU)
        self.sums = {slot: torch.zeros(slot.shape) for slot in self.layout.slots}
        self.operations = Operations()

    def micro_batch(self, last: bool, without: tuple[str, ...] = ()) -> None:
        self.reducer.begin_micro_batch(last)
        for slot in self.layout.slots:
            if slot.name in without:
                continue
            gradient = torch.randn(slot.shape, dtype=slot.parameter.dtype)
            self.sums[slot] = self.sums[slot] + gradient.float()
            # As autograd: it adds to what is there.
            slot.parameter.grad = gradient if slot.parameter.grad is None else slot.parameter.grad + gradient
            with self.operations:
                self.reducer.take(slot)
                self.reducer.declare_ready((slot,))
        with self.operations:
            self.reducer.end_micro_batch()

    def wanted(self) -> list[Tensor]:
        ranks = self.layout.ranks
        rows = [torch.cat([as_rows(self.sums[slot], slot, ranks) for slot in bucket], dim=1) for bucket in self.layout.buckets]
        return rows if ranks > 1 else [row.view(1, -1) for row in rows]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("bucket", [30, 10**6])
def test_buckets_hold_the_sums_of_what_parameters_got(ranks: int, dtype: torch.dtype, contiguous: bool, bucket: int) -> None:
    """Over micro-batches in which every one, or none but some, has a gradient; every element once, padding as zeros."""
    made = Reduction(ranks, dtype, bucket, contiguous_gradients=contiguous)
    for last, without in ((False, ()), (False, ("p1", "p3")), (True, ("p5",))):
        made.micro_batch(last, without)
    assert len(made.group.rows) == len(made.layout.buckets)
    for sent, wanted in zip(made.group.rows, made.wanted(), strict=True):
        assert torch.equal(sent.view(wanted.shape), wanted)
    assert all(slot.parameter.grad is None for slot in made.layout.slots)


def test_a_parameter_without_any_gradient_is_sent_as_zeros() -> None:
    made = Reduction(2, torch.float32)
    made.micro_batch(True, without=("p0", "p2"))
    assert torch.equal(made.group.rows[0], made.wanted()[0])


def test_neighbours_are_moved_together() -> None:
    """Of seven parameters six make a piece: each micro-batch two pieces, not seven gradients, copied or added."""
    for ranks, most in ((1, (2, 2)), (2, (4, 4))):
        made = Reduction(ranks, torch.float32)
        for bound in most:
            before = made.operations.count
            made.micro_batch(False)
            assert made.operations.count - before <= bound


def test_gradients_that_stay_where_they_are_are_added_by_autograd_alone() -> None:
    made = Reduction(2, torch.float32, contiguous_gradients=False)
    made.micro_batch(False)
    made.micro_batch(False)
    assert made.operations.count == 0
    assert len(made.reducer.held_tensors()) == len(made.layout.slots)


def test_parameters_are_cast_and_copied_at_once() -> None:
    master = torch.randn(30)
    targets = [torch.empty(width, dtype=torch.bfloat16) for width in (10, 15, 5)]
    ranges = [(0, 10), (10, 25), (25, 30)]
    operations = Operations()
    with operations:
        MasterShard(master, torch.bfloat16).copy_to(targets, ranges)
    assert operations.count == 1
    assert torch.equal(torch.cat(targets), master.bfloat16())


def test_gathered_rows_are_copied_to_their_parameters_at_once() -> None:
    for shapes, most in ((((4, 6), (8,), (2, 2)), 1), (SHAPES, 2)):
        named = [(f"p{index}", nn.Parameter(torch.zeros(shape))) for index, shape in enumerate(shapes)]
        layout = make_layout(named, 2, 10**6)
        values = {slot: torch.randn(slot.shape) for slot in layout.slots}
        rows = torch.cat([as_rows(values[slot], slot, 2) for slot in layout.slots], dim=1)
        operations = Operations()
        with torch.no_grad(), operations:
            fill(layout.slots, rows)
        assert operations.count == most
        assert all(torch.equal(slot.parameter.data, values[slot]) for slot in layout.slots)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [True, False])
def test_clipping_is_a_part_of_the_update(kind: Any, fused: bool) -> None:
    """Fused: no operation more than without it. Else one for all parameters. The same weights as when gradients are scaled."""
    scale, counts, results = torch.tensor(0.25), [], []
    for factor in (None, scale):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(size)) for size in (8, 8, 3)]
        optimizer = kind(update_groups(parameters, fused), lr=0.1, weight_decay=0.1, fused=fused, foreach=not fused)
        for step in range(2):
            for parameter in parameters:
                gradient = torch.randn_like(parameter)
                parameter.grad = gradient if factor is not None else gradient * scale
            operations = Operations()
            with torch.no_grad(), operations if step else nullcontext():  # what comes with the first step is not counted
                step_scaled(optimizer, factor)
        counts.append(operations.count)
        results.append(torch.cat([parameter.detach() for parameter in parameters]))
    assert counts[1] - counts[0] == 1, "the reciprocal of the factor, or one multiplication for all"
    assert torch.allclose(*results)
    assert optimizer.defaults["foreach"] is not fused


def test_no_group_makes_temporaries_larger_than_its_largest_parameter() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (5, 5, 10, 3, 3, 3, 3)]
    sizes = [[value.numel() for value in group["params"]] for group in update_groups(parameters, fused=False)]
    assert sizes == [[5, 5], [10], [3, 3, 3], [3]]
    assert len(update_groups(parameters, fused=True)) == 1


def test_nccl_groups_are_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is built for CUDA, with its own class of options."""
    if not hasattr(collectives.dist, "ProcessGroupNCCL"):
        stand_in = SimpleNamespace(Options=lambda: SimpleNamespace(is_high_priority_stream=False))
        monkeypatch.setattr(collectives.dist, "ProcessGroupNCCL", stand_in, raising=False)
    one, other = group_options("nccl"), group_options("nccl")
    assert one.is_high_priority_stream
    assert one is not other, "torch writes the group's ranks into them"
    assert group_options("gloo") is None


def test_models_of_100_million_parameters_have_several_buckets_by_default() -> None:
    spec = ModelSpec(
        name="gpt2-like", family="llama", num_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=12,
        head_dim=64, ffn_hidden_size=2048, vocab_size=32000, sequence_length=1024,
    )  # fmt: skip
    with torch.device("meta"):
        sizes = [spec.vocab_size * spec.hidden_size, *itertools.repeat(spec.layer_parameters, spec.num_layers)]
        named = [(str(index), nn.Parameter(torch.empty(size))) for index, size in enumerate(sizes)]
    layout = make_layout(named, 8, TrialConfig().reduce_bucket_size)
    assert len(layout.buckets) > 2
    assert sum(slot.elements for slot in layout.buckets[-1]) < 0.5 * sum(sizes), (
        "only the last one cannot begin before backward ends"
    )
