"""AdamW on bf16 masters: rounding is unbiased and repeatable, small updates add up, and copies of a share stay equal."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.common.gang import Gang
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.engines.native.offload import Hyperparameters
from executor.engines.native.optimizers.device_optimizer import AdamWBf16, Shares, round_stochastically
from executor.engines.native.parameter_shard import MasterShard, make_layout
from executor.parallel.collectives import ProcessGroup
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

WORKLOAD = Workload(global_batch_size=4, sequence_length=32)


@pytest.mark.parametrize("value", [1.0 + 2**-10, -3.0 - 2**-9, 1e-3, 1.0, 0.0, 3e38, float("inf")])
def test_the_mean_is_exact_and_every_result_a_neighbour(value: float) -> None:
    count = 1 << 18
    rounded = round_stochastically(torch.full((count,), value), torch.Generator().manual_seed(7))
    exact = torch.full((), value)
    assert torch.equal(rounded, rounded.bfloat16().float())
    if exact == exact.bfloat16().float():
        assert bool((rounded == exact).all())
        return
    low, high = rounded.min().double(), rounded.max().double()
    assert len(rounded.unique()) == 2 and low < exact.double() < high
    spread = (high - low) / 2 / count**0.5  # at most, of a mean of two values
    assert abs(rounded.double().mean() - exact.double()) < 5 * spread


def optimizer(own_row: int = 0, name: str = "weight", seed: int = 0, rate: float = 1e-3) -> AdamWBf16:
    layout = make_layout([(name, nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)))], 1, 10**9)
    alone = ProcessGroup(None, 1, 0)
    shares = Shares(
        layout=layout, own_row=own_row, group=alone, tensor=alone, split={}, matrices=frozenset(),
        tied=frozenset(("head", "table")), seed=seed,
    )  # fmt: skip
    rates = Hyperparameters(learning_rate=rate, weight_decay=0.0, fused=False)
    return AdamWBf16(torch.ones(4096, dtype=torch.bfloat16), shares, rates)


def trained(adamw: AdamWBf16, steps: int = 3) -> Tensor:
    for _ in range(steps):
        adamw.step([torch.ones(4096)], MasterShard(adamw.master, torch.bfloat16))
    return adamw.master


def test_bits_depend_on_seed_step_share_and_name_alone() -> None:
    first = trained(optimizer())
    assert torch.equal(first, trained(optimizer()))
    for other in (optimizer(own_row=1), optimizer(name="bias"), optimizer(seed=1)):
        assert not torch.equal(first, trained(other))
    assert torch.equal(trained(optimizer(name="head")), trained(optimizer(name="table")))


def test_updates_below_half_a_unit_add_up() -> None:
    """One unit of bf16 below 1 is 2^-8: rounding to nearest would lose every update of 1e-4."""
    assert float(trained(optimizer(rate=1e-4), 200).double().mean()) == pytest.approx(1 - 200 * 1e-4, abs=5e-4)


def losses_and_weights(rank: int, stage: int) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
    config = TrialConfig(zero_stage=stage, micro_batch_size=2, precision="bf16", optimizer="adamw_bf16")
    context = RankContext(rank=rank, world_size=2, device=torch.device("cpu"))
    session = NativeEngine().build(context, resolve_model("llama-tiny"), config, WORKLOAD)
    losses = []
    for step in range(4):
        session.prepare(step)
        losses.append(session.train_step().loss or 0.0)
    weights = {name: value.clone() for name, value in session.full_parameters().items()}
    own = {value.untyped_storage().data_ptr(): value.nbytes for tag, value in session.tagged_storages() if tag != "activations"}
    widths = {str(value.dtype): 1 for tag, value in session.tagged_storages() if tag == "parameters"}
    session.close()
    return losses, weights, {**widths, "bytes": sum(own.values())}


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_agree_and_keep_no_fp32_master(stage: int) -> None:
    with Gang(2, losses_and_weights) as gang:
        (losses, first, held), (_, second, _) = gang.run(stage)
        again = gang.run(stage)[0]
    assert losses[-1] < losses[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert losses == again[0] and all(torch.equal(first[name], again[1][name]) for name in first)
    assert {value.dtype for value in first.values()} == {torch.bfloat16}
    assert set(held) == {"torch.bfloat16", "bytes"}
