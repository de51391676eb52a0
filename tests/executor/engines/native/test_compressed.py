"""What compressed communication sends and keeps, on four real ranks, against closed forms; what 1-bit Adam leaves unsaid."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closed_forms import RANKS, Layout
from torch import nn

from benchmarks.correctness.compressed_forms import Forms
from executor.engine import measured_config
from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import Shares as Holders
from executor.engines.native.optimizers.onebit_adam import OneBitAdam
from executor.engines.native.parameter_shard import BucketLayout as Shares
from executor.engines.native.parameter_shard import MasterShard, make_layout
from executor.parallel.collectives import ProcessGroup
from search_spaces.models.model import ModelSpec
from search_spaces.optimizers import LEAST_ROOT
from search_spaces.trial import REFERENCE_STEPS, TrialResult
from search_spaces.trial_config import TrialConfig

Count = Callable[..., TrialResult]

SPEC = ModelSpec(
    name="compressed", family="llama", num_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ffn_hidden_size=97, vocab_size=65, sequence_length=16,
)  # fmt: skip

pytestmark = pytest.mark.nightly
"""`make oldest` runs these too."""
"""Tables and MLPs whose shares end in the midst of a block, and matrices of keys and values that are too small for blocks."""
SHARDED: dict[str, Any] = {"zero_stage": 3}
WAYS: dict[str, dict[str, Any]] = {
    "gathers": {**SHARDED, "gather_dtype": "int8"},
    "gathers in bf16": {**SHARDED, "gather_dtype": "int8", "precision": "bf16"},
    "gathers, once": {**SHARDED, "gather_dtype": "int8", "micro_batch_size": 2},
    "second copy": {**SHARDED, "secondary_shard_size": 2},
    "second copy on each rank": {**SHARDED, "secondary_shard_size": 1},
    "second copy of integers": {**SHARDED, "secondary_shard_size": 2, "gather_dtype": "int8"},
    **{f"reductions, stage {stage}": {"zero_stage": stage, "reduce_dtype": "int8"} for stage in range(4)},
    "reductions within shards and between their copies": {**SHARDED, "hsdp_shard_size": 2, "reduce_dtype": "int8"},
    "signs": {"optimizer": "onebit_adam"},
}


def layout_of(**knobs: Any) -> Layout:
    return Layout(SPEC, **knobs)


def forms_of(layout: Layout) -> Forms:
    return Forms(SPEC, layout.config, RANKS, layout.micro_batches)


@pytest.mark.parametrize("name", WAYS)
def test_every_rank_sends_what_the_closed_form_says(count: Count, name: str) -> None:
    layout = layout_of(**WAYS[name])
    for rank in count(layout).ranks:
        found = {(row.operation, row.mesh_dimension): (row.count, row.bytes) for row in rank.collectives if row.count}
        assert found == forms_of(layout).messages(), f"rank {rank.rank}"


@pytest.mark.parametrize("name", ["second copy", "second copy on each rank", "second copy of integers"])
def test_a_second_copy_takes_its_part_of_what_is_gathered(count: Count, name: str) -> None:
    layout, plain = layout_of(**WAYS[name]), layout_of(**{**WAYS[name], "secondary_shard_size": 0})
    held = [count(one, memory=True).ranks[0].tag_peak_bytes["parameters"] for one in (layout, plain)]
    assert held[0] - held[1] == forms_of(layout).second_copy()


def test_what_signs_leave_unsaid_is_kept(count: Count) -> None:
    signs, plain = layout_of(**WAYS["signs"]), layout_of()
    kept = [count(one, memory=True).ranks[0].tag_peak_bytes["optimizer_state"] for one in (signs, plain)]
    counter = 4  # of torch's AdamW, in the one bucket
    assert kept[0] - kept[1] == forms_of(signs).momentum_errors() - counter


def test_a_trial_measures_what_comes_after_the_warm_up() -> None:
    def measured(optimizer: str, steps: int) -> int:
        return measured_config(TrialConfig(optimizer=optimizer, onebit_warmup_steps=steps)).onebit_warmup_steps

    assert measured("onebit_adam", 500) == REFERENCE_STEPS
    assert measured("onebit_adam", 2) == 2
    assert measured("adamw", 1000) == 1000, "which the engines without this optimizer insist on"


def alone(shapes: dict[str, tuple[int, ...]], warmup_steps: int) -> tuple[OneBitAdam, Shares]:
    """The optimizer of one rank, over parameters of ones."""
    layout = make_layout([(name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()], 1, 10**9)
    holders = Holders(
        layout=layout,
        own_row=0,
        group=ProcessGroup(None, 1, 0),
        tensor=ProcessGroup(None, 1, 0),
        split={},
        matrices=frozenset(),
    )
    rates = Hyperparameters(learning_rate=1e-2, weight_decay=0.0, fused=False)
    return OneBitAdam(torch.ones(layout.master_elements), holders, rates, warmup_steps), layout


def gradient(layout: Shares, step: int) -> torch.Tensor:
    """The same numbers for a parameter of one name, whatever lies beside it."""
    parts = []
    for slot in layout.slots:
        generator = torch.Generator().manual_seed(1000 * step + len(slot.name))
        parts.append(torch.randn(slot.elements, generator=generator))
    return torch.cat(parts)


def frozen_from(warmup_steps: int, steps: int, layout: Shares) -> torch.Tensor:
    """Where the same update without rounding brings weights of ones."""
    weights = torch.ones(layout.master_elements)
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(1, steps + 1):
        new = gradient(layout, step) + 0.5
        first = 0.9 * first + 0.1 * new
        second = second if step > warmup_steps else 0.999 * second + 0.001 * new**2
        mean = second / (1 - 0.999 ** min(step, warmup_steps))
        least = float(mean.mean().sqrt()) * LEAST_ROOT if step > warmup_steps else 0.0
        weights -= 1e-2 / (1 - 0.9**step) * first / (mean.sqrt().clamp(min=least) + 1e-8)
    return weights


def test_what_signs_leave_unsaid_is_said_later() -> None:
    """Weights go where the update without rounding brings them; with nothing made good they stay far off."""
    off = []
    for forgets in (False, True):
        optimizer, layout = alone({"w": (40, 60)}, warmup_steps=5)
        for step in range(1, 121):
            optimizer.step([gradient(layout, step) + 0.5], MasterShard(optimizer.master, torch.float32))
            if forgets:
                optimizer._own_error.zero_()
                optimizer._part_error.zero_()
        exact = frozen_from(5, 120, layout)
        off.append(float((optimizer.master - exact).abs().mean() / (exact - 1).abs().mean()))
    assert off[0] < 0.2
    assert off[0] < off[1] / 2


def test_before_warm_up_ends_it_is_adamw() -> None:
    optimizer, layout = alone({"w": (40, 60), "bias": (7,)}, warmup_steps=4)
    weights = nn.Parameter(torch.ones(layout.master_elements))
    adamw = torch.optim.AdamW([weights], lr=1e-2, weight_decay=0.0)
    for step in range(4):
        assert not optimizer.sums_itself
        weights.grad = gradient(layout, step)
        adamw.step()
        optimizer.step([gradient(layout, step)], MasterShard(optimizer.master, torch.float32))
    torch.testing.assert_close(optimizer.master, weights.detach())
    assert optimizer.sums_itself
