"""Choices of experts that follow stated loads: what ranks send and compute by the closed forms of the loads."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.gang import Gang
from executor.dry.dry_run import dry_run
from executor.engine import RankContext
from executor.engines.native.engine import NativeEngine
from executor.errors import EngineRefusalError
from executor.measurement.flop_counter import FlopCounter
from executor.parallel.collectives import ProcessGroup
from executor.parallel.experts import Experts
from executor.parallel.model import build_transformer
from search_spaces.models.model import ModelSpec
from search_spaces.training.expert_loads import expert_counts, layer_shares
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

RANKS, SAMPLES, TOKENS, HIDDEN, FFN, VOCABULARY = 2, 8, 16, 32, 48, 64
LOADS = ((5.0, 3.0, 1.0, 1.0), (1.0, 1.0, 1.0, 4.0))
SPEC = ModelSpec(
    name="loads", family="mixtral", num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ffn_hidden_size=FFN, vocab_size=VOCABULARY, sequence_length=TOKENS, num_experts=4, experts_per_token=1,
    normalised_routing=False, expert_loads=LOADS,
)  # fmt: skip
WORKLOAD = Workload(global_batch_size=SAMPLES, sequence_length=TOKENS)


def experts_of(spec: ModelSpec, seed: int = 0) -> list[Experts]:
    model = build_transformer(spec, TOKENS, seed, torch.float32)
    return [module for module in model.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize("more", [{}, {"normalised_routing": True}, {"sigmoid_routing": True}, {"experts_per_token": 2}])
def test_tokens_of_every_sample_follow_the_loads_and_the_router_weights_them(more: dict[str, Any]) -> None:
    even = {"expert_loads": ((5.0, 3.0, 1.0, 1.0), (1.0, 2.0, 1.0, 4.0))}
    spec = dataclasses.replace(SPEC, **{**(even if "experts_per_token" in more else {}), **more})
    for layer, experts in enumerate(experts_of(spec)):
        scores = torch.randn(3, TOKENS, 4, requires_grad=True)
        chosen, weights = experts._route(scores)
        counts = expert_counts(layer_shares(spec, layer), TOKENS, spec.experts_per_token)
        for sample in chosen:
            assert Counter(sample.flatten().tolist()) == Counter(dict(enumerate(counts)))
            assert all(len(set(token)) == spec.experts_per_token for token in sample.tolist())
        if spec.normalised_routing:
            assert torch.allclose(weights, scores.gather(-1, chosen).softmax(-1))
        else:
            shares = scores.sigmoid() if spec.sigmoid_routing else scores.softmax(-1)
            assert torch.allclose(weights, shares.gather(-1, chosen))


def test_modules_for_multi_token_prediction_follow_the_last_row() -> None:
    *_, experts = experts_of(dataclasses.replace(SPEC, mtp_layers=1))
    counts = expert_counts([load / sum(LOADS[-1]) for load in LOADS[-1]], TOKENS, 1)
    assert experts.drawn is not None
    assert Counter(experts.drawn.flatten().tolist()) == Counter(dict(enumerate(counts)))


def test_choices_depend_on_the_seed_and_the_layer_alone() -> None:
    first, again, other = (experts_of(SPEC, seed) for seed in (0, 0, 1))
    drawn = [[experts.drawn for experts in layers] for layers in (first, again, other)]
    assert all(torch.equal(one, same) for one, same in zip(drawn[0], drawn[1], strict=True))  # type: ignore[arg-type]
    assert not torch.equal(drawn[0][0], drawn[2][0])  # type: ignore[arg-type]
    assert not any("drawn" in name for name in build_transformer(SPEC, TOKENS, 0, torch.float32).state_dict())
    model = build_transformer(SPEC, TOKENS, 0, torch.float32)
    model.set_length(8)
    (experts, _) = model._experts().values()
    assert experts.drawn is not None and experts.drawn.shape == (8, 1)


def measured(rank: int, knobs: dict[str, Any]) -> tuple[int, list[int]]:
    """FLOPs of a step, and bytes that each exchange of rows gets from others and from itself."""
    context = RankContext(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))
    session = NativeEngine().build(context, SPEC, TrialConfig(micro_batch_size=2).replace(knobs), WORKLOAD)
    for step in range(2):
        session.prepare(step)
        session.train_step()
    session.prepare(2)
    found: list[int] = []
    real = ProcessGroup.all_to_all

    def counted(group: ProcessGroup, output: Tensor, *args: Any, **options: Any) -> Any:
        if output.is_floating_point():
            found.append(output.numel() * output.element_size())
        return real(group, output, *args, **options)

    with patch.object(ProcessGroup, "all_to_all", counted), FlopCounter() as counter:
        session.train_step()
    session.close()
    assert counter.total is not None
    return counter.total, found


@pytest.fixture(scope="module")
def gang(forked_ranks: None) -> Iterator[Gang]:
    with Gang(RANKS, measured) as ranks:
        yield ranks


def rows_of_rank(layer: int, rank: int, samples: int) -> int:
    counts = expert_counts(layer_shares(SPEC, layer), TOKENS, 1)
    return samples * sum(counts[2 * rank : 2 * rank + 2])


@pytest.mark.prove
def test_bytes_and_flops_of_ranks_are_those_of_the_loads(gang: Gang) -> None:
    for rank, (flops, received) in enumerate(gang.run({"expert_parallel_size": 2})):
        rows = [rows_of_rank(layer, rank, SAMPLES) for layer in range(2)]
        own = SAMPLES // RANKS * TOKENS
        matrices = 2 * own * HIDDEN * (2 * (2 * 32 + 2 * 16) + 2 * 4 + VOCABULARY)
        attention = 2 * 4 * (SAMPLES // RANKS) * TOKENS**2 * 32
        assert flops == 3 * (matrices + sum(rows) * 3 * 2 * HIDDEN * FFN) + attention * 7 // 2
        # A micro-batch is half of a rank's samples. Rows come to the experts in forward, and their gradients in backward; what
        # goes back is as many rows as the rank sent.
        there = [rows_of_rank(layer, rank, SAMPLES // 2) * HIDDEN * 4 for layer in range(2)]
        assert Counter(received) == Counter({there[0]: 4, there[1]: 4, own // 2 * HIDDEN * 4: 8})


@pytest.mark.prove
def test_ranks_that_hold_all_experts_compute_alike(gang: Gang) -> None:
    (first, none), (second, _) = gang.run({})
    assert first == second and not none


def test_a_dry_run_does_not_know_the_rows_of_a_rank() -> None:
    with pytest.raises(EngineRefusalError, match="differs from rank to rank; leave expert_loads out"):
        dry_run(SPEC, TrialConfig(micro_batch_size=2, expert_parallel_size=2), WORKLOAD, RANKS)
