"""Counted FLOPs and bytes of multi-token prediction equal their closed forms."""

import dataclasses
from typing import Any

import pytest

from executor.dry.dry_run import dry_run
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import configured
from search_spaces.trial import DryRank, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

SPEC = ModelSpec(
    name="dry", family="llama", num_layers=2, hidden_size=32, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
    ffn_hidden_size=48, vocab_size=64, sequence_length=32,
)  # fmt: skip
TOKENS = 8 * 32
WORKLOAD = Workload(global_batch_size=8, sequence_length=32)


def run(ranks: int = 1, rank: int = 0, spec: ModelSpec = SPEC, **knobs: Any) -> DryRank:
    return dry_run(spec, TrialConfig(micro_batch_size=4).replace(knobs), WORKLOAD, ranks, rank)


def sent(found: DryRank, operation: str, dimension: str) -> int:
    return sum(one.bytes for one in found.collectives if (one.operation, one.mesh_dimension) == (operation, dimension))


@pytest.mark.prove
@pytest.mark.parametrize("modules", sampled([2, 1], every=2))
def test_flops_are_those_of_a_layer_the_projection_and_the_logits(modules: int) -> None:
    layer = run(spec=dataclasses.replace(SPEC, num_layers=3)).flops_per_step
    plain, found = run().flops_per_step, run(mtp_layers=modules).flops_per_step
    assert layer is not None and plain is not None and found is not None
    beside = 6 * TOKENS * (2 * SPEC.hidden_size**2 + SPEC.vocab_size * SPEC.hidden_size)
    assert found - plain == modules * (layer - plain + beside)


def test_flops_per_token_are_by_the_same_convention() -> None:
    spec, deeper = configured(SPEC, TrialConfig(mtp_layers=2)), dataclasses.replace(SPEC, num_layers=3)
    layer = deeper.flops_per_token(32) - SPEC.flops_per_token(32)
    norms, beside = 3 * SPEC.hidden_size, 2 * SPEC.hidden_size**2 + SPEC.vocab_size * SPEC.hidden_size
    assert spec.flops_per_token(32) - SPEC.flops_per_token(32) == 2 * (layer + 6 * (beside + norms))
    layer_parameters = deeper.parameter_count - SPEC.parameter_count
    assert spec.parameter_count - SPEC.parameter_count == 2 * (layer_parameters + 2 * SPEC.hidden_size**2 + norms)


@pytest.mark.prove
def test_gradients_of_all_parameters_are_sent() -> None:
    spec = configured(SPEC, TrialConfig(mtp_layers=1))
    assert sent(run(ranks=2, mtp_layers=1), "all_reduce", "data") == 4 * spec.parameter_count


@pytest.mark.prove
def test_the_last_stage_shares_the_table_and_has_the_modules() -> None:
    knobs = {"pipeline_parallel_size": 2, "pipeline_split": "even", "micro_batch_size": 2}
    plain, first, last = run(2, 0, **knobs), run(2, 0, mtp_layers=1, **knobs), run(2, 1, mtp_layers=1, **knobs)
    table = 4 * SPEC.vocab_size * SPEC.hidden_size
    for rank in (first, last):
        assert sent(rank, "all_reduce", "pipeline") == sent(plain, "all_reduce", "pipeline") + table
    assert sent(first, "send", "pipeline") == sent(plain, "send", "pipeline")
    assert first.flops_per_step == plain.flops_per_step
    spec = configured(SPEC, TrialConfig(mtp_layers=1))
    held = last.memory_by_tag["optimizer_state"] // 8  # two moments in fp32
    layer = dataclasses.replace(SPEC, num_layers=2).parameter_count - dataclasses.replace(SPEC, num_layers=1).parameter_count
    tables = SPEC.vocab_size * SPEC.hidden_size
    assert held == pytest.approx(layer + 2 * tables + SPEC.hidden_size + spec.mtp_parameters, abs=64)
