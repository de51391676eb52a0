"""A layer of experts on one rank against the equations written out, token by token, in float64."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from executor.parallel import experts as module_of_experts
from executor.parallel.collectives import InFlight, ProcessGroup, rows_of
from executor.parallel.expert_rows import stack_weights
from executor.parallel.experts import Experts, add_balance_gradient, dispatch_capped, set_loss_scale
from executor.parallel.model import Transformer, build_transformer, whole
from search_spaces.errors import ModelFormatError
from search_spaces.models.huggingface import model_spec_from_config
from search_spaces.models.model import ModelSpec

EXACT = 1e-12
SPEC = ModelSpec(
    name="experts", family="mixtral", num_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, head_dim=4,
    ffn_hidden_size=12, vocab_size=16, sequence_length=10, num_experts=4, experts_per_token=2,
)  # fmt: skip
BATCH = 3
CONFIG = {
    "model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 12, "vocab_size": 16, "max_position_embeddings": 10, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def layer(spec: ModelSpec) -> Experts:
    model = build_transformer(spec, spec.sequence_length, seed=3, dtype=torch.float64)
    found = next(module for module in model.modules() if isinstance(module, Experts))
    with torch.no_grad():
        found.router.weight.mul_(50.0)  # as drawn, all experts would get nearly alike
    return found


def tokens() -> Tensor:
    torch.manual_seed(5)
    return torch.randn(BATCH, SPEC.sequence_length, SPEC.hidden_size, dtype=torch.float64, requires_grad=True)


def written_out(experts: Experts, x: Tensor, places: int) -> tuple[Tensor, int]:
    """Mixtral's equations for every token by itself; how many choices found their expert full."""
    rows, dropped = [], 0
    for sequence in x:
        taken = dict.fromkeys(range(SPEC.num_experts), 0)
        for token in sequence:
            probabilities = (experts.router.weight @ token).softmax(dim=0)
            best = probabilities.argsort(descending=True)[: SPEC.experts_per_token].tolist()
            total = torch.zeros_like(token)
            for index in best:
                if taken[index] == places:
                    dropped += 1
                    continue
                taken[index] += 1
                expert = experts.experts[str(index)]
                hidden = functional.silu(expert.gate.weight @ token) * (expert.up.weight @ token)
                total = total + probabilities[index] / probabilities[best].sum() * (expert.down.weight @ hidden)
            rows.append(total)
    return torch.stack(rows).view_as(x), dropped


def gradients(experts: Experts, x: Tensor, output: Tensor) -> list[Tensor]:
    direction = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    return list(torch.autograd.grad((output * direction).sum(), [x, *experts.parameters()]))


@pytest.mark.parametrize(("factor", "some_dropped"), [(0.0, False), (0.6, True), (1.0, True), (4.0, False)])
def test_a_layer_computes_what_the_equations_say(factor: float, some_dropped: bool) -> None:
    spec = dataclasses.replace(SPEC, capacity_factor=factor)
    experts, x = layer(spec), tokens()
    places = spec.expert_capacity(SPEC.sequence_length) or SPEC.sequence_length
    expected, dropped = written_out(experts, x, places)
    result = experts(x)
    assert (dropped > 0) == some_dropped
    assert (result - expected).abs().max() < EXACT
    for own, other in zip(gradients(experts, x, result), gradients(experts, x, expected), strict=True):
        assert (own - other).abs().max() < EXACT


def balance_loss(scores: Tensor) -> Tensor:
    """E x sum_i f_i P_i of each sequence, as autograd sees it; their mean."""
    losses = []
    for sequence in scores:
        chosen = sequence.topk(SPEC.experts_per_token, dim=-1).indices
        shares = torch.stack([(chosen == index).double().mean() for index in range(SPEC.num_experts)])
        losses.append(SPEC.num_experts * (shares * sequence.softmax(dim=-1).mean(dim=0)).sum())
    return torch.stack(losses).mean()


def test_the_balance_loss_has_the_gradient_of_its_formula() -> None:
    torch.manual_seed(1)
    scores = torch.randn(BATCH, 10, SPEC.num_experts, dtype=torch.float64, requires_grad=True)
    plain = torch.randn_like(scores)
    (expected,) = torch.autograd.grad((scores * plain).sum() + 0.25 * 0.02 * balance_loss(scores), scores)
    spec = dataclasses.replace(SPEC, load_balance=0.02)
    (own,) = torch.autograd.grad((add_balance_gradient(scores, spec, 0.25) * plain).sum(), scores)
    assert (own - expected).abs().max() < EXACT
    assert (own - plain).abs().max() > 1e-6


def test_where_all_experts_get_alike_the_balance_loss_is_one_and_pulls_no_way() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]], dtype=torch.float64).repeat(1, 3, 1).requires_grad_()
    assert float(balance_loss(scores.detach())) == pytest.approx(1.0)
    (own,) = torch.autograd.grad(add_balance_gradient(scores, dataclasses.replace(SPEC, load_balance=1.0), 1.0).sum(), scores)
    assert (own - 1.0).abs().max() < EXACT


def test_micro_batches_sum_to_the_whole_batch() -> None:
    """Which tokens are dropped and what is balanced is a sequence's own affair."""
    spec = dataclasses.replace(SPEC, capacity_factor=1.0, load_balance=0.5)
    experts, x = layer(spec), tokens()
    whole = gradients_of_mean(experts, x, 1.0)
    parts = [gradients_of_mean(experts, part.detach().requires_grad_(), 1 / BATCH) for part in x.split(1)]
    for name, (one, *others) in enumerate(zip(whole, *parts, strict=True)):
        assert (one - sum(others)).abs().max() < EXACT, name


def gradients_of_mean(experts: Experts, x: Tensor, scale: float) -> tuple[Tensor, ...]:
    set_loss_scale([experts], scale)
    return torch.autograd.grad(experts(x).square().mean() * scale, list(experts.parameters()))


def test_balance_changes_the_router_alone_and_not_the_loss() -> None:
    models = [build_transformer(dataclasses.replace(SPEC, load_balance=weight), 10, 0, torch.float64) for weight in (0.0, 0.5)]
    losses, routers, others = zip(*(trained(model) for model in models), strict=True)
    assert losses[0] == losses[1]
    assert (routers[0] - routers[1]).abs().max() > 1e-6
    assert (others[0] - others[1]).abs().max() < EXACT  # of the only layer's output


def trained(model: Transformer) -> tuple[float, Tensor, Tensor]:
    ids = torch.arange(20).view(2, 10) % SPEC.vocab_size
    loss = model(tokens=ids, labels=ids.roll(1))
    loss.backward()
    named = dict(model.named_parameters())
    routers = [value.grad for name, value in named.items() if "router" in name]
    downs = [value.grad for name, value in named.items() if "down" in name]
    return float(loss.detach()), torch.cat([part.flatten() for part in routers]), torch.cat([part.flatten() for part in downs])


def test_a_full_expert_takes_the_first_tokens_of_each_sequence() -> None:
    chosen = torch.zeros(2, 3, 1, dtype=torch.int64)
    plan = dispatch_capped(chosen, torch.ones(2, 3, 1), experts=2, capacity=2)
    assert plan.rows.tolist() == [0, 1, 3, 4, 0, 0, 0, 0]
    assert plan.weights.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("factor", "places"), [(0.0, 0), (1.0, 5), (1.25, 7), (100.0, 10)])
def test_the_capacity_is_a_multiple_of_the_even_share(factor: float, places: int) -> None:
    assert dataclasses.replace(SPEC, capacity_factor=factor).expert_capacity(10) == places


def test_a_config_states_capacity_and_balance() -> None:
    plain = model_spec_from_config(CONFIG | {"router_aux_loss_coef": 0.02}, "plain")
    assert (plain.capacity_factor, plain.load_balance) == (0.0, 0.0)  # as Hugging Face, which adds no loss by itself
    told = model_spec_from_config(
        CONFIG | {"router_aux_loss_coef": 0.02, "output_router_logits": True, "expert_capacity_factor": 1.25}, "told"
    )
    # Hugging Face's loss is 2 where two of the experts are chosen and all get alike, ours 1 in each of 4 layers.
    assert (told.capacity_factor, told.load_balance) == (1.25, pytest.approx(0.01))


@pytest.mark.parametrize(
    "wrong", [{"capacity_factor": -1.0}, {"load_balance": float("nan")}, {"num_experts": 0, "load_balance": 1.0}]
)
def test_what_is_no_factor_is_refused(wrong: dict[str, float]) -> None:
    name = "capacity_factor" if "capacity_factor" in wrong else "load_balance"
    with pytest.raises(ModelFormatError, match=name):
        dataclasses.replace(SPEC, **wrong)


GROUPED = dataclasses.replace(SPEC, hidden_size=16, head_dim=8, ffn_hidden_size=24, mlp_bias=True)
"""Widths of which torch's kernel takes rows."""


def narrow_layer(spec: ModelSpec) -> Experts:
    model = build_transformer(spec, spec.sequence_length, seed=3, dtype=torch.bfloat16)
    found = next(module for module in model.modules() if isinstance(module, Experts))
    with torch.no_grad():
        found.router.weight.mul_(50.0)
        for name, value in found.named_parameters():
            if name.endswith("bias"):
                value.normal_(generator=torch.Generator().manual_seed(len(name)))
    return found


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_grouped_products_are_those_of_each_expert(factor: float) -> None:
    experts, drawn = narrow_layer(dataclasses.replace(GROUPED, capacity_factor=factor)), torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, 10, 16, generator=drawn).bfloat16().requires_grad_()
    outcomes = []
    for hooked in (False, True):  # what is hooked is called by itself
        handles = [expert.register_forward_hook(lambda *_: None) for expert in experts.experts.values() if hooked]
        with Operators() as seen:
            result = experts(x)
            outcomes.append([result, *torch.autograd.grad(result.float().square().mean(), [x, *experts.parameters()])])
        assert (seen.counts[torch.ops.aten._grouped_mm.default] > 0) is not hooked
        for handle in handles:
            handle.remove()
    for grouped, each in zip(*outcomes, strict=True):
        assert (grouped - each).abs().max() <= 0.02 * each.abs().max()


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_the_host_waits_for_nothing(factor: float) -> None:
    """On the meta device whatever reads a value on the host raises."""
    experts = narrow_layer(dataclasses.replace(GROUPED, capacity_factor=factor, load_balance=0.1)).to("meta")
    x = torch.empty(BATCH, 10, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    experts(x).sum().backward()
    assert all(value.grad is not None for value in (x, *experts.parameters()))


def test_the_host_reads_rows_once_where_products_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def read(counts: Tensor, total: int) -> list[int]:
        reads.append(total)
        return rows_of(counts, total)

    monkeypatch.setattr(module_of_experts, "rows_of", read)
    with Operators() as seen:
        layer(SPEC)(tokens()).sum().backward()
    assert len(reads) == 1
    assert not seen.counts[torch.ops.aten.nonzero.default] and not seen.counts[torch.ops.aten._local_scalar_dense.default]


class Mirror(ProcessGroup):
    """Two ranks of which the other one sends what this one does."""

    def all_to_all(self, output: Tensor, parts: Tensor, *_: object) -> InFlight:
        output.copy_(parts)
        return InFlight(lambda: None)


def test_the_host_reads_rows_once_where_ranks_divide_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exchange between ranks must be told; the rest runs on the meta device, where no other value can be read."""
    reads = []

    def read(counts: Tensor, total: int) -> list[int]:
        reads.append(counts.device.type)
        return [total // len(counts)] * len(counts)

    monkeypatch.setattr(module_of_experts, "rows_of", read)
    part = dataclasses.replace(whole(GROUPED), expert=Mirror(None, 2, 0))
    model = build_transformer(GROUPED, 10, seed=3, dtype=torch.bfloat16, part=part).to("meta")
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    x = torch.empty(2, 10, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Operators() as seen:
        experts(x).sum().backward()
    assert reads == ["meta"]
    assert seen.counts[torch.ops.aten._grouped_mm.default] == 9


def test_matrices_at_equal_distances_are_not_copied() -> None:
    memory = torch.randn(3, 2, 16, 24).bfloat16()
    every_other = stack_weights(memory[:, 1].unbind())
    assert every_other.data_ptr() == memory[0, 1].data_ptr()
    assert torch.equal(every_other, memory[:, 1])
    uneven = [memory[0, 0], memory[0, 1], memory[2, 0]]
    assert torch.equal(stack_weights(uneven), torch.stack(uneven))


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))
