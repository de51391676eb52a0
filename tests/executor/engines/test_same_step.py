"""Modules as people write them: losses of every stage are those of the plain module, and faults and refusals have names."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.common.gang import Gang
from benchmarks.frameworks import kinds_of_modules
from benchmarks.frameworks.same_step import BOUND, WORKLOAD, compare, compared, configurations, model_of
from executor.batches import FactoryData, map_tensors, tensors_of
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.errors import FactoryError, WrongResultError
from executor.trial.reference import plain_losses
from executor.trial.run import ENGINES, run_trial
from executor.user_module import description
from executor.user_module.calls import called_blocks
from executor.user_module.description import loss_traits
from executor.user_module.factory import load_factory
from search_spaces.models.module_profile import LossTrait
from search_spaces.trial import Fidelity, TrialRequest
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled


@pytest.fixture(scope="module")
def pair() -> Iterator[Gang]:
    with Gang(2, compare) as gang:
        yield gang


@pytest.mark.prove(every=4)
@pytest.mark.parametrize("name", sampled((factory.__name__ for factory in kinds_of_modules.WRITTEN), every=6))
def test_losses_are_those_of_the_plain_module(pair: Gang, name: str) -> None:
    model = model_of(name)
    stages = [config for config in configurations(model) if config.micro_batch_size == 2 and config.zero_stage in (1, 3)]
    for config in stages:
        losses = compared(pair, model, config)
        assert max(losses.off, losses.reference_off) < BOUND[model.precision], (config, losses)


def observed(name: str) -> Any:
    user = load_factory(f"{kinds_of_modules.__name__}:{name}", WORKLOAD)
    return called_blocks(user, FactoryData(batch=user.batch, seed=0).micro_batch(0, 0, 2))


def test_units_are_modules_that_are_called() -> None:
    assert observed("called").units == ("blocks.0", "blocks.1", "blocks.2")
    assert observed("lists_of_lists").units[:3] == ("layers.0.0", "layers.0.1", "layers.1.0")
    assert observed("attributes").units == ()
    assert observed("called").outside == frozenset()
    # What the caller reads of a block.
    assert observed("gain_outside").outside == {"blocks.0.gain", "blocks.1.gain", "blocks.2.gain"}
    # A recomputation inside backward ends before the gradients of the block are done.
    assert {f"blocks.{index}.up.weight" for index in range(3)} <= observed("own_checkpointing").outside
    assert observed("tied").outside == {"embedding.weight"}
    assert not observed("attributes").recomputes
    assert observed("lists_of_lists").recomputes


CAUSES = {
    "called": {LossTrait.DROPOUT}, "padded": {LossTrait.PADDED, LossTrait.DROPOUT},
    "by_methods": {LossTrait.TOGETHER, LossTrait.DROPOUT},
    "noise": {LossTrait.RANDOM}, "moving_teacher": {LossTrait.STATE, LossTrait.DROPOUT},
    "time_first": {LossTrait.UNDIVIDED}, "attributes": set(), "nested": {LossTrait.DROPOUT},
    "loss_in_training_only": {LossTrait.TRAINS_ONLY, LossTrait.DROPOUT, LossTrait.BUFFERS},
    "cached_in_evaluation": {LossTrait.TRAINS_ONLY, LossTrait.DROPOUT},
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_what_a_loss_depends_on_is_found(name: str) -> None:
    user = load_factory(f"{kinds_of_modules.__name__}:{name}", WORKLOAD)
    assert set(loss_traits(user.module, FactoryData(batch=user.batch, seed=0))) == CAUSES[name]


class Counting(nn.Module):
    """Its loss depends on what it computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(2)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.weight * x).sum(-1).mean() + self.calls


def test_sums_and_counters_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Summing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().sum()

    data = FactoryData(batch=lambda size, generator: {"x": torch.randn(size, 2, generator=generator)}, seed=0)
    assert loss_traits(Summing(2, 2), data) == (LossTrait.SUM,)
    assert loss_traits(Counting(), data) == (LossTrait.IRREPRODUCIBLE,)
    monkeypatch.setattr(description, "MOST_SECONDS", 0.0)
    assert loss_traits(Summing(2, 2), data) == (LossTrait.UNCHECKED,)


class Scaling(nn.Linear):
    """It changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2.0)).square().mean()


class Adapted(nn.Module):
    """Trained matrices in fp32 beside a frozen one in bf16, by which the loss is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).bfloat16().requires_grad_(False)
        self.adapter = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.base(x.bfloat16()) + self.adapter(x).bfloat16()).square().mean().float()


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class Paired(nn.Linear):
    def forward(self, pair: Pair) -> torch.Tensor:
        return (super().forward(pair.x) - pair.y).square().mean()


def test_what_rounds_changes_its_input_or_comes_in_a_dataclass_depends_on_nothing() -> None:
    def rows(size: int, generator: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randn(size, 64, generator=generator)}

    def pairs(size: int, generator: torch.Generator) -> dict[str, Any]:
        return {"pair": Pair(torch.randn(size, 64, generator=generator), torch.randn(size, 64, generator=generator))}

    torch.manual_seed(0)
    assert loss_traits(Scaling(64, 64), FactoryData(batch=rows, seed=0)) == ()
    assert loss_traits(Adapted(), FactoryData(batch=rows, seed=0)) == ()
    assert loss_traits(Paired(64, 64), FactoryData(batch=pairs, seed=0)) == ()


def test_a_module_without_loss_and_a_batch_of_one_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dict(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": super().forward(x).square().mean()}

    def rows(size: int, generator: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randn(size, 8, generator=generator)}

    def constant(size: int, generator: torch.Generator) -> dict[str, Any]:
        return {"x": torch.randn(8, 8, generator=generator)}

    class Scores(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    made = {"dict": (Dict(8, 8), rows), "tensor": (Scores(8, 8), rows), "constant": (Dict(8, 8), constant)}
    for name, pair in made.items():
        monkeypatch.setattr(kinds_of_modules, name, lambda pair=pair: pair, raising=False)
    assert description.describe(f"{kinds_of_modules.__name__}:dict", WORKLOAD).loss_traits == ()
    with pytest.raises(FactoryError, match=r"tensor: the module's call must return the loss \(one number\)"):
        description.describe(f"{kinds_of_modules.__name__}:tensor", WORKLOAD)
    with pytest.raises(FactoryError, match=r"constant: batch\(4, …\) and batch\(3, …\) have tensors of the same shapes"):
        description.describe(f"{kinds_of_modules.__name__}:constant", WORKLOAD)


def test_batches_are_made_per_micro_batch_and_may_be_nested() -> None:
    sizes: list[int] = []

    def batch(size: int, generator: torch.Generator) -> dict[str, Any]:
        sizes.append(size)
        return {"x": [torch.rand(3, size, generator=generator), {"y": (torch.ones(1), None)}], "flag": True}

    data = FactoryData(batch=batch, seed=1)
    first, again, other = (data.micro_batch(*place, 4) for place in ((0, 0), (0, 0), (0, 1)))
    assert sizes == [4, 4, 4]
    assert torch.equal(first["x"][0], again["x"][0])
    assert not torch.equal(first["x"][0], other["x"][0])
    doubled = map_tensors(first, lambda value: value.double())
    assert [value.dtype for value in tensors_of(doubled)] == [torch.float64] * 2
    assert (doubled["x"][1]["y"][1], doubled["flag"]) == (None, True)


class FaultyEngine(NativeEngine):
    """Its first update is wrong: a parameter changes in addition."""

    def build(self, context: Any, model: Any, config: TrialConfig, workload: Any) -> Any:
        session = super().build(context, model, config, workload)
        with torch.no_grad():
            next(session.parts[0].module.parameters()).add_(0.05)
        return session


@pytest.mark.parametrize("name", ["by_methods", "noise"])
def test_a_first_trial_of_a_size_is_held_against_the_module_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its loss depends on the division, or on random numbers in forward."""
    request = TrialRequest(
        attempt="one", model=model_of(name), config=TrialConfig(micro_batch_size=4), workload=WORKLOAD, world_size=1,
        fidelity=Fidelity(min_steps=2, max_steps=2, max_warmup_steps=4, measure_memory=False), plain_steps=3,
    )  # fmt: skip
    context = RankContext(rank=0, world_size=1, device=torch.device("cpu"))
    result = run_trial(context, request, lambda _: None)
    assert result.losses == pytest.approx(plain_losses(context, request), rel=1e-5)
    monkeypatch.setitem(ENGINES, "native", FaultyEngine())
    with pytest.raises(WrongResultError, match="off the job's reference"):
        run_trial(context, request, lambda _: None)
