"""A layer of experts on one rank against the equations written out, token by token, in float64."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor.engines.native.experts import Experts, balanced, capped, tell_loss_scale
from executor.engines.native.model import Transformer, build_transformer
from search_spaces.errors import ModelFormatError
from search_spaces.huggingface import model_spec_from_config
from search_spaces.model import ModelSpec

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
    (own,) = torch.autograd.grad((balanced(scores, spec, 0.25) * plain).sum(), scores)
    assert (own - expected).abs().max() < EXACT
    assert (own - plain).abs().max() > 1e-6


def test_where_all_experts_get_alike_the_balance_loss_is_one_and_pulls_no_way() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]], dtype=torch.float64).repeat(1, 3, 1).requires_grad_()
    assert float(balance_loss(scores.detach())) == pytest.approx(1.0)
    (own,) = torch.autograd.grad(balanced(scores, dataclasses.replace(SPEC, load_balance=1.0), 1.0).sum(), scores)
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
    tell_loss_scale([experts], scale)
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
    plan = capped(chosen, torch.ones(2, 3, 1), experts=2, places=2)
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
