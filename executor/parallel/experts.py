"""A mixture-of-experts layer: routing, balance of loads, dispatch of tokens to experts on any rank, and combination."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.parallel.block_collectives import sum_ranks
from executor.parallel.collectives import ProcessGroup, rows_of
from executor.parallel.expert_rows import (
    Exchange,
    Halves,
    Numbers,
    SharedWork,
    apply_grouped,
    can_group,
    exchange,
    exchange_counts,
    finish_exchange,
    start_exchange,
)
from executor.parallel.groups import ParallelGroups
from executor.parallel.tensor import TensorParallel
from search_spaces.models.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Rows to send to experts, in the order of the experts."""

    rows: Tensor
    """Token of each row, int64 [rows]."""
    weights: Tensor
    """Factor of the expert's result, or of its input, [rows]; 0 if the row is an empty slot."""
    counts: Tensor | None
    """Rows of each expert, int64 [experts]; None: all have the same number."""


class Experts(nn.Module):
    """Routes each token to its best experts, weighted by the softmax over those [Jiang et al. 2024, Mixtral, 2.1]
    or over all.

    1. With `expert_parallel_size` a rank holds its share of the experts, and tokens are sent to them and back in two
       all-to-alls [Lepikhin et al. 2021, GShard, 3.2]. Tensor ranks hold a slice of each expert. Between `enter` and `leave`
       each of them has a summand of the result, so that the router's gradient is also a summand. With
       `expert_tensor_parallel_size` fewer ranks hold the slices of an expert: each of a tensor group takes its share of the
       tokens, those that divide the same experts gather theirs, and the router's gradient is a sum over all of the group
       [Liu et al. 2025, MoE Parallel Folding, arXiv 2504.14960, 3]. A shared expert is divided as the rest of the model.
    2. Without `capacity_factor` no token is dropped: ranks first exchange the numbers of rows. With it an expert takes at most
       `capacity` tokens of each sequence, in order; its other slots stay empty, so that communication and computation never
       depend on the data. The capacity is per sequence, not per micro-batch, so that the same tokens are dropped in every
       layout.
    3. Rows are sorted by expert. In bf16 their products are grouped, for which the host need not know the number of rows per
       expert (`grouped`); otherwise it reads the numbers once. With several ranks they are always read once, because the
       exchange needs them.
    4. With `load_balance` the gradient of the balance loss is added at the router's scores (`add_balance_gradient`).
    5. With stated loads the choices are drawn (`follow`), and the router only weights them.
    6. With `overlaps` the shared expert computes while tokens travel (`expert_rows`).
    7. After `count_loads` each backward counts how many tokens chose each expert (`router_balance`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensor: TensorParallel,
        group: ProcessGroup,
        make_expert: Callable[[], nn.Module],
        slices: TensorParallel | None = None,
        shared: Halves | None = None,
        overlaps: bool = False,
    ) -> None:
        """`slices`: the ranks that divide each expert; None: those of `tensor`. If there are fewer, a shared expert
        communicates by itself. `shared`: the shared expert; None: there is none.
        """
        super().__init__()
        self.spec, self.tensor, self.group, self.slices = spec, tensor, group, slices or tensor
        self.loss_scale = 1.0
        """Factor of the loss of a micro-batch before backward."""
        self.router = nn.Linear(spec.hidden_size, spec.num_experts, bias=spec.router_bias)
        num_local_experts = spec.num_experts // group.size
        # Named by the expert's number in the whole model, because initial weights depend on their names.
        mine = range(group.rank * num_local_experts, (group.rank + 1) * num_local_experts)
        self.experts = nn.ModuleDict({str(index): make_expert() for index in mine})
        self.shared = shared
        self.overlaps = overlaps and shared is not None and group.size > 1
        self.correction: Tensor | None
        self.drawn: Tensor | None
        self.loads: Tensor | None
        """Tokens that chose each expert since the loads were last read, int64 [experts]; None: they are not counted."""
        self.register_buffer("drawn", None, persistent=False)
        self.register_buffer("loads", None, persistent=False)
        self.make_tables(self.router.weight.dtype)

    def make_tables(self, dtype: torch.dtype) -> None:
        """Create the bias of the choice of experts [experts], if the model has one, in at least fp32, since its steps are
        small. It stays 0 unless weights are loaded or loads move it (`router_balance`).
        """
        precise = torch.promote_types(dtype, torch.float32)
        correction = torch.zeros(self.spec.num_experts, dtype=precise) if self.spec.router_correction else None
        self.register_buffer("correction", correction)

    def follow(self, chosen: Tensor) -> None:
        """From now on the tokens of every sample go to these experts, int64 [tokens of the tensor group, choices]."""
        shares, size = self.tensor.size // self.slices.size, self.slices.size
        self.register_buffer("drawn", chosen.chunk(shares)[self.tensor.rank // size], persistent=False)

    def count_loads(self) -> None:
        """From now on count the tokens that choose each expert in `loads`."""
        assert self.correction is not None  # only layers with a bias need loads
        loads = torch.zeros(self.spec.num_experts, dtype=torch.int64, device=self.correction.device)
        self.register_buffer("loads", loads, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.slices is self.tensor:
            x = self.tensor.enter(x)
            shared = SharedWork(self.shared, x)
            return self.tensor.leave(shared.added_to(self._mix(x, shared)))
        shared = SharedWork(self.shared, x)
        mixed = self.slices.leave(self._mix(self.slices.enter(self.tensor.take_tokens(x)), shared))
        return shared.added_to(self.tensor.join_tokens(mixed))

    def _mix(self, x: Tensor, shared: SharedWork) -> Tensor:
        """The weighted results of each token's experts; with slices of these, a summand. May compute a part of `shared`."""
        scores = self.router(x)
        if self.spec.load_balance:
            scores = add_balance_gradient(scores, self.spec, self.loss_scale / self.slices.size, self._sum_over_sequence)
        chosen, weights = self._route(scores)
        if self.loads is not None:
            weights = _CountedWeights.apply(weights, _numbers_of(chosen, self.spec.num_experts), self.loads)  # type: ignore[no-untyped-call]
        return self._dispatch(x.flatten(0, -2), self._plan(chosen, weights.to(x.dtype)), shared).view_as(x)

    def _sum_over_sequence(self, counts: Tensor) -> Tensor:
        """Counts of this rank's tokens to those of whole sequences, on every rank. May overwrite `counts`."""
        if self.slices is self.tensor:
            return counts
        total: Tensor = sum_ranks(counts, self.tensor.group)
        return total / self.slices.size  # each token was counted by the ranks that divide each expert

    def _route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """A token's experts and their weights [batch, tokens, choices] in at least fp32, by the router's scores."""
        spec, precise = self.spec, torch.promote_types(scores.dtype, torch.float32)
        drawn = None if self.drawn is None else self.drawn.expand(*scores.shape[:-1], -1)
        if not (spec.sigmoid_routing or spec.router_correction or spec.router_groups > 1) and spec.normalised_routing:
            best, chosen = scores.topk(spec.experts_per_token, dim=-1) if drawn is None else (scores.gather(-1, drawn), drawn)
            return chosen, best.softmax(dim=-1, dtype=precise) * spec.routing_scale
        shares = scores.to(precise).sigmoid() if spec.sigmoid_routing else scores.softmax(dim=-1, dtype=precise)
        ranked = shares.detach() if self.correction is None else shares.detach() + self.correction
        if spec.router_groups > spec.router_groups_kept:
            ranked = _in_best_groups(ranked, spec)
        chosen = ranked.topk(spec.experts_per_token, dim=-1).indices if drawn is None else drawn
        weights = shares.gather(-1, chosen)
        if spec.normalised_routing:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, weights * spec.routing_scale

    def _plan(self, chosen: Tensor, weights: Tensor) -> Dispatch:
        if self.spec.capacity_factor:
            return dispatch_capped(chosen, weights, self.spec.num_experts, self.spec.expert_capacity(chosen.shape[1]))
        order = chosen.flatten().argsort(stable=True)
        counts = _numbers_of(chosen, self.spec.num_experts)
        return Dispatch(order // chosen.shape[-1], weights.flatten()[order], counts)

    def _dispatch(self, tokens: Tensor, plan: Dispatch, shared: SharedWork) -> Tensor:
        rows = tokens.index_select(0, plan.rows)
        if self.spec.weighted_inputs:
            rows = rows * plan.weights[:, None]
        experts, counts, number = list(self.experts.values()), self._counts(plan), len(plan.rows)
        groups = can_group(experts, rows)
        if self.group.size == 1:
            outputs = apply_grouped(experts, rows, counts) if groups else self._apply_each(rows, self._read(plan, counts))
            return self._combine(tokens, plan, outputs)
        theirs = counts if plan.counts is None else exchange_counts(counts, self.group)
        both = torch.cat((counts, theirs))
        # The compiler does not let numbers into a graph without another one for each of them; tensors on the host it does.
        numbers: Numbers = both.cpu() if torch.compiler.is_compiling() else self._read(plan, both)
        rows = self._exchanged(rows, numbers, number if plan.counts is None else None, True, shared)
        if groups:
            outputs = apply_grouped(experts, rows, theirs.view(self.group.size, -1).sum(0))
        else:
            received = numbers[len(counts) :]
            outputs = self._apply_each(rows, [sum(received[first :: len(experts)]) for first in range(len(experts))])
        return self._combine(tokens, plan, self._exchanged(outputs, numbers, number, False, shared))

    def _exchanged(self, rows: Tensor, numbers: Numbers, number: int | None, outward: bool, shared: SharedWork) -> Tensor:
        """The rows that this rank receives (`exchange`). While they travel, half of the shared expert computes if that
        overlaps."""
        if not self.overlaps:
            return exchange(rows, numbers, number, outward, self.group)
        by = Exchange(numbers, outward, self.group)
        started = start_exchange(rows, by)
        shared.step()
        return finish_exchange(started, by)

    def _combine(self, tokens: Tensor, plan: Dispatch, results: Tensor) -> Tensor:
        weighted = results if self.spec.weighted_inputs else results * plan.weights[:, None]
        return torch.zeros_like(tokens).index_add(0, plan.rows, weighted)

    def _counts(self, plan: Dispatch) -> Tensor:
        """Number of this rank's rows for each expert [experts]."""
        experts = self.spec.num_experts
        return plan.rows.new_full((experts,), len(plan.rows) // experts) if plan.counts is None else plan.counts

    def _read(self, plan: Dispatch, counts: Tensor) -> list[int]:
        """Numbers of rows for experts, on the host."""
        rows, experts = len(plan.rows), self.spec.num_experts
        if plan.counts is None:
            return [rows // experts] * len(counts)
        return rows_of(counts, rows * len(counts) // experts)

    def _apply_each(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Apply this rank's experts to rows sorted by expert, even to none, so that every rank has the same graph and its
        gradients come in the same order."""
        pieces = torch.split(rows, list(sizes))
        return torch.cat([expert(piece) for expert, piece in zip(self.experts.values(), pieces, strict=True)])


def _numbers_of(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen, int64 [experts]."""
    flat = chosen.flatten()
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


def _in_best_groups(ranked: Tensor, spec: ModelSpec) -> Tensor:
    """The values [..., experts], -inf outside of each token's best groups: those with the best expert, or with the best two
    [DeepSeek-AI 2024, DeepSeek-V2, 2.2.2; DeepSeek-V3, 2.1.2].
    """
    grouped = ranked.view(*ranked.shape[:-1], spec.router_groups, -1)
    best = grouped.topk(min(2 if spec.sigmoid_routing else 1, grouped.shape[-1]), dim=-1).values.sum(-1)
    group_mask = torch.zeros_like(best).scatter_(-1, best.topk(spec.router_groups_kept, dim=-1).indices, 1)
    return grouped.masked_fill(group_mask[..., None] == 0, float("-inf")).flatten(-2)


def dispatch_capped(chosen: Tensor, weights: Tensor, experts: int, capacity: int) -> Dispatch:
    """Dispatch at most `capacity` rows per expert and sequence, in token order; `chosen`, `weights` [batch, tokens, choices].

    An unused row refers to the first token with weight 0: it contributes nothing, and its gradient is zero.
    """
    batch, tokens, choices = chosen.shape
    choice_mask = _one_hot(chosen.flatten(1), experts)
    before = (choice_mask.cumsum(1) - choice_mask).gather(-1, chosen.flatten(1)[..., None]).squeeze(-1)
    sequence = torch.arange(batch, device=chosen.device)[:, None]
    slots = (chosen.flatten(1) * batch + sequence) * capacity + before
    overflow_slot = experts * batch * capacity
    slots = torch.where(before < capacity, slots, overflow_slot).flatten()
    empty = batch * tokens * choices
    assigned = torch.full((overflow_slot + 1,), empty, device=chosen.device)
    assigned = assigned.scatter(0, slots, torch.arange(empty, device=chosen.device))[:overflow_slot]
    filled = assigned < empty
    assigned = torch.where(filled, assigned, 0)
    return Dispatch(assigned // choices, weights.flatten()[assigned] * filled, None)


def _one_hot(chosen: Tensor, experts: int) -> Tensor:
    """[batch, choices] to ones and zeros [batch, choices, experts], without reading values on the host."""
    return chosen.new_zeros(*chosen.shape, experts).scatter_(-1, chosen[..., None], 1)


def add_balance_gradient(
    scores: Tensor, spec: ModelSpec, scale: float, total: Callable[[Tensor], Tensor] = lambda counts: counts
) -> Tensor:
    """The router's scores [batch, tokens, experts], unchanged; backward adds the gradient of the balance loss times `scale`.

    The loss of a layer is `load_balance` x the mean over sequences of E sum_i f_i P_i: E experts, f_i the fraction of a
    sequence's choices that select expert i, P_i the mean probability that the router gives it [Fedus et al. 2022, Switch
    Transformers, 2.2; per sequence as in DeepSeek-AI 2024, DeepSeek-V3, 2.1.2]. The mean is 1 if all experts get equally many
    tokens. It is computed per sequence, so that sums over micro-batches and ranks are those of the whole batch. If the tokens
    are a share of the sequences, `total` sums counts [batch, 1, experts] over all shares.
    """
    factor = scale * spec.load_balance
    result: Tensor = _Balanced.apply(scores, spec.experts_per_token, factor, total)  # type: ignore[no-untyped-call]
    return result


def set_loss_scale(modules: Sequence[nn.Module], scale: float) -> None:
    """Set the factor of the loss of a micro-batch in every expert layer."""
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, Experts):
                inner.loss_scale = scale


class _CountedWeights(torch.autograd.Function):
    """The weights of each token's experts, unchanged. Backward adds `counts` to `loads`: once for each micro-batch, also if its
    forward is computed again."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, counts: Tensor, loads: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.loads = loads
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        ctx.loads.add_(counts)
        return gradients[0], None, None


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, choices: int, scale: float, total: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.choices, ctx.scale, ctx.total = choices, scale, total
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (scores,) = ctx.saved_tensors
        batch, _, experts = scores.shape
        chosen = scores.topk(ctx.choices, dim=-1).indices.flatten(1)
        precise = torch.promote_types(scores.dtype, torch.float32)
        counts = ctx.total(_one_hot(chosen, experts).sum(1, keepdim=True).to(precise))
        choices = counts.sum(-1, keepdim=True)
        shares = counts / choices
        probabilities = scores.softmax(dim=-1, dtype=precise)
        # d/d score_j of sum_i f_i p_i is p_j (f_j - sum_i f_i p_i); f is a count without a gradient.
        slope = probabilities * (shares - (probabilities * shares).sum(-1, keepdim=True))
        slope = slope * (ctx.scale * experts * ctx.choices / batch) / choices
        return gradients[0] + slope.to(scores.dtype), None, None, None


class RouterBalance:
    """Moves the biases of this rank's routers after each step [Wang et al. 2024, Auxiliary-Loss-Free Load Balancing, 2.2;
    DeepSeek-AI 2024, DeepSeek-V3, 2.1.2]: bias += rate x sign(mean load - load).

    1. Loads are the numbers of choices of a step in the whole batch. Each layer counts those of its tokens in backward, so that
       a recomputed micro-batch counts once (`Experts.count_loads`).
    2. After the step they are summed over the ranks with other tokens: those of data and context and, if fewer ranks than the
       tensor ranks divide each expert, the tensor ranks too. These may count a token several times, each token equally often,
       which changes no sign. All layers of a rank take one message for each group.
    """

    def __init__(self, modules: Iterable[nn.Module], rate: float, groups: ParallelGroups) -> None:
        inner = (layer for module in modules for layer in module.modules())
        self._layers = [layer for layer in inner if isinstance(layer, Experts) and layer.correction is not None]
        self._rate = rate
        apart = groups.expert_tensor.size < groups.tensor.size
        self._groups = [groups.shard, groups.replica, *([groups.tensor] if apart else [])]
        for layer in self._layers:
            layer.count_loads()

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by the loads counted since the last call. Every rank must call it."""
        if not self._layers:
            return
        loads = torch.stack([_loads(layer) for layer in self._layers])
        for group in self._groups:
            group.all_reduce(loads).wait()
        # The mean times the number of experts, so that the sign is that of whole numbers.
        signs = (loads.sum(-1, keepdim=True) - loads * loads.shape[-1]).sign()
        for layer, sign in zip(self._layers, signs, strict=True):
            assert layer.correction is not None
            layer.correction.add_(sign, alpha=self._rate)
        self.drop()

    def drop(self) -> None:
        """Forget the loads counted so far."""
        for layer in self._layers:
            _loads(layer).zero_()


def _loads(layer: Experts) -> Tensor:
    assert layer.loads is not None  # `count_loads` has made it
    return layer.loads
