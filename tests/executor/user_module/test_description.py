"""What a look at a module finds: the FLOPs of a sample, and what of a model's own tensor-parallel plan can be carried out."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.measurement.flops import CONVENTION, COUNTED, convention_of, tflops_per_device
from executor.user_module.description import describe
from executor.user_module.plan import Style, own_plan
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel
from search_spaces.trial import Workload

WORK = Workload(global_batch_size=4, sequence_length=128)
WIDTH = 32


class Vectors(nn.Module):
    """Samples are vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Images(nn.Module):
    """Samples are images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).mean((2, 3))).square().mean()


class LooksAtValues(Vectors):
    """Cannot run on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.sum()) < 1e9 else -x)


class NowhereHere(Vectors):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("needs a GPU")


def frozen_first() -> nn.Module:
    module = Vectors()
    module.layers[0].requires_grad_(False)
    return module


def look(monkeypatch: pytest.MonkeyPatch, module: nn.Module, *shape: int) -> FactoryModel:
    code = ModuleType("looked_at")
    code.build = lambda: (module, lambda size, generator: {"x": torch.randn(size, *shape, generator=generator)})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "looked_at", code)
    return describe("looked_at:build", WORK)


@pytest.mark.parametrize(
    ("make", "shape", "products"),
    [
        # Forward and the gradient of each trained weight; the gradient of each input that depends on one.
        (Vectors, (WIDTH,), 2 * WIDTH * WIDTH * (3 + 2)),
        (LooksAtValues, (WIDTH,), 2 * WIDTH * WIDTH * (3 + 2)),
        (frozen_first, (WIDTH,), 2 * WIDTH * WIDTH * 3),
        (Images, (3, 16, 16), 2 * (16 * 16 * 3 * 9 * 8 * 2 + 8 * 5 * 3)),
    ],
)
def test_flops_of_a_sample_are_counted_whatever_a_sample_is(
    monkeypatch: pytest.MonkeyPatch, make: Any, shape: tuple[int, ...], products: int
) -> None:
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert look(monkeypatch, module, *shape).flops_per_sample == products
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_module_that_does_not_run_here_has_no_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, NowhereHere(), WIDTH)
    assert found.flops_per_sample is None
    assert tflops_per_device(found, WORK, 10.0, 2) is None


def test_model_flops_of_a_module_are_the_counted_ones_not_those_of_a_sequence() -> None:
    counted = FactoryModel(reference="m:f", parameter_count=10**6, flops_per_sample=6e6)
    assert tflops_per_device(counted, WORK, 100.0, 2) == pytest.approx(6e6 * 100.0 / 2 / 1e12)
    assert convention_of(counted) == COUNTED


@pytest.mark.parametrize(
    ("words", "pattern", "known"),
    [
        (("--length", "{sequence_length}"), None, True),
        ((), r"(?P<tokens_per_second>\d+) tok/s", True),
        ((), None, False),
    ],
)
def test_model_flops_of_a_script_are_known_where_its_samples_are_sequences(
    words: tuple[str, ...], pattern: str | None, known: bool
) -> None:
    script = CommandModel(arguments=("python", "train.py", *words), parameter_count=1000, pattern=pattern)
    expected = pytest.approx(6 * 1000 * 128 * 10.0 / 1e12) if known else None
    assert tflops_per_device(script, WORK, 10.0, 1) == expected
    assert convention_of(script) == CONVENTION


class ScaledEmbedding(nn.Embedding):
    """As Gemma's: not a plain lookup."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 4.0


class HalvedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Layer(nn.Module):
    def __init__(self, up: type[nn.Linear]) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"query": nn.Linear(8, 8), "out": nn.Linear(8, 8)})
        self.mlp = nn.ModuleDict({"up": up(8, 16), "down": nn.Linear(16, 8)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention["out"](self.attention["query"](x))
        return x + self.mlp["down"](self.mlp["up"](x))


class PlansItself(nn.Module):
    """A stand-in for a Hugging Face model: it has a plan of its own."""

    tp_plan = {  # noqa: RUF012  as Hugging Face's
        "table": "embedding_rowwise", "layers.*.attention.query": "colwise", "layers.*.attention.out": "rowwise",
        "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise", "head": "colwise_gather_output",
    }  # fmt: skip

    def __init__(self, table: type[nn.Embedding] = nn.Embedding, up: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.table, self.head = table(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList([Layer(up), Layer(up)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x.abs().long().clamp(max=15))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).square().mean()


def test_a_lookup_that_is_not_plain_stays_whole_and_the_rest_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    module = PlansItself(table=ScaledEmbedding)
    plan = own_plan(module)
    assert plan.skipped == ("table",)
    assert plan.tensor["layers.*.mlp.up"] is Style.COLWISE
    assert plan.tensor["head"] is Style.COLWISE_GATHER
    assert look(monkeypatch, module, 4).tensor_divisor == 8


def test_what_stands_beside_a_linear_that_is_not_plain_stays_whole_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = PlansItself(up=HalvedLinear)
    plan = own_plan(module)
    assert plan.skipped == ("layers.*.mlp.down", "layers.*.mlp.up")
    assert set(plan.tensor) == {"table", "layers.*.attention.query", "layers.*.attention.out", "head"}
    assert look(monkeypatch, module, 4).tensor_divisor == 8


def test_a_plain_plan_is_carried_out_whole() -> None:
    assert own_plan(PlansItself()).skipped == ()
