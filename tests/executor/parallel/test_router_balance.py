"""The bias of the choice of experts follows the loads of a step: each micro-batch counts once, whatever computes it again."""

import dataclasses
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from executor.parallel.checkpointing import selective_contexts
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.experts import Experts, RouterBalance
from executor.parallel.model import build_transformer
from search_spaces.models.model import ModelSpec

SPEC = ModelSpec(
    name="balanced", family="deepseek_v3", num_layers=2, hidden_size=8, num_attention_heads=2, num_key_value_heads=2,
    head_dim=4, ffn_hidden_size=12, vocab_size=16, sequence_length=10, num_experts=4, experts_per_token=2,
    sigmoid_routing=True, router_correction=True,
)  # fmt: skip
RATE = 0.25


class Doubling(ProcessGroup):
    """A group whose other rank has the loads `other` [layers, experts]."""

    def __init__(self, other: Tensor) -> None:
        super().__init__(None, 2, 0)
        self.other = other

    def all_reduce(self, value: Tensor, *_: Any) -> InFlight:
        value.add_(self.other)
        return InFlight(lambda: None)


def made(
    *groups: ProcessGroup, spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float64
) -> tuple[list[Experts], RouterBalance]:
    model = build_transformer(spec, spec.sequence_length, seed=3, dtype=dtype)
    alone = ProcessGroup(None, 1, 0)
    shard, replica, tensor, slices = (*groups, *[alone] * (4 - len(groups)))
    of_ranks = Mock(shard=shard, replica=replica, tensor=tensor, expert_tensor=slices)
    balance = RouterBalance([model], RATE, of_ranks)
    return [module for module in model.modules() if isinstance(module, Experts)], balance


def run(layer: Experts, recomputed: str = "none") -> list[int]:
    """A micro-batch; the loads by hand."""
    x = torch.randn(3, 10, SPEC.hidden_size, dtype=layer.router.weight.dtype, requires_grad=True)
    contexts: dict[str, Any] = {"context_fn": lambda: selective_contexts(False)} if recomputed == "selective" else {}
    chosen = (layer.router(x).float().sigmoid() + layer.correction).topk(2).indices.flatten().tolist()
    result: Tensor = layer(x) if recomputed == "none" else checkpoint(layer, x, use_reentrant=False, **contexts)
    result.sum().backward()
    return [chosen.count(expert) for expert in range(SPEC.num_experts)]


@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
def test_each_micro_batch_counts_once(recomputed: str) -> None:
    (layer, _), _ = made()
    batches = [run(layer, recomputed) for _ in range(3)]
    assert layer.loads is not None
    assert layer.loads.tolist() == [sum(loads) for loads in zip(*batches, strict=True)]


def test_what_is_not_trained_on_does_not_count() -> None:
    (layer, _), _ = made()
    with torch.no_grad():
        layer(torch.randn(1, 10, SPEC.hidden_size, dtype=torch.float64))
    assert layer.loads is not None
    assert not layer.loads.any()


def test_biases_move_by_the_rate_towards_even_loads_of_all_ranks() -> None:
    other = torch.tensor([[0, 0, 0, 900], [7, 0, 0, 0]])
    (first, second), balance = made(Doubling(other))
    for layer in (first, second):
        assert layer.loads is not None
        layer.loads += torch.tensor([10, 20, 30, 20])
    balance.update()
    assert first.correction is not None
    assert second.correction is not None
    # Of 980 choices the mean is 245; of 87 it is 21.75.
    assert first.correction.tolist() == [RATE, RATE, RATE, -RATE]
    assert second.correction.tolist() == [RATE, RATE, -RATE, RATE]
    assert first.loads is not None
    assert not first.loads.any()


def test_even_loads_move_nothing_and_dropped_ones_are_forgotten() -> None:
    (layer, other), balance = made()
    assert layer.loads is not None
    assert other.loads is not None
    other.loads += torch.tensor([1, 2, 3, 4])
    other_loads = other.loads
    balance.drop()
    assert not other_loads.any()
    layer.loads += 5
    balance.update()
    assert layer.correction is not None
    assert other.correction is not None
    assert not layer.correction.any()
    assert not other.correction.any()


def test_tensor_ranks_with_other_tokens_are_summed_too() -> None:
    other = torch.tensor([[0, 0, 0, 900], [0, 0, 0, 900]])
    for slices, moved in ((ProcessGroup(None, 1, 0), -RATE), (ProcessGroup(None, 2, 0), RATE)):
        alone = ProcessGroup(None, 1, 0)
        (layer, _), balance = made(alone, alone, Doubling(other), slices)
        assert layer.loads is not None
        layer.loads += torch.tensor([30, 30, 30, 10])
        balance.update()
        assert layer.correction is not None
        assert float(layer.correction[3]) == moved


def test_small_steps_are_not_lost_in_bf16() -> None:
    (layer, _), _ = made(dtype=torch.bfloat16)
    assert layer.correction is not None
    assert layer.correction.dtype is torch.float32


def test_models_without_a_bias_send_nothing() -> None:
    unbiased = dataclasses.replace(SPEC, router_correction=False)
    layers, balance = made(Doubling(torch.zeros(0)), spec=unbiased)
    balance.update()
    assert [layer.loads for layer in layers] == [None, None]
