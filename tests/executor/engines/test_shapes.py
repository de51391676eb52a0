"""Engines that are called directly refuse what they would have to round down: nobody trains a smaller model by mistake."""

import itertools

import pytest
import torch

from executor.dry.dry_run import dry_run
from executor.engine import RankContext
from executor.errors import EngineRefusalError
from executor.trial.run import ENGINES
from search_spaces.knob import Value
from search_spaces.models.model import ModelSpec
from search_spaces.rules.table import RULES, SHAPES
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

SIZES: dict[str, int] = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4,
    "ffn_hidden_size": 48, "vocab_size": 96, "sequence_length": 16,
}  # fmt: skip
MOE = {"num_experts": 3, "experts_per_token": 1}
TP, PP, CP = ({f"{name}_parallel_size": 2} for name in ("tensor", "pipeline", "context"))
CASES: dict[str, tuple[str, dict[str, int], dict[str, Value], dict[str, int]]] = {
    "vocabulary": ("tensor-divides", {"vocab_size": 101}, {**TP}, {}),
    "ffn": ("tensor-divides", {"ffn_hidden_size": 51}, {**TP}, {}),
    "heads": ("tensor-divides", {"num_attention_heads": 3, "num_key_value_heads": 3}, {**TP}, {}),
    "kv heads": ("tensor-divides", {"num_key_value_heads": 1}, {**TP}, {}),
    "width of experts": ("expert-slices", {**MOE, "ffn_hidden_size": 51}, {**TP}, {}),
    "experts": ("experts-divide", MOE, {"expert_parallel_size": 2}, {}),
    "tokens at experts": ("expert-tokens", MOE, {**TP, "expert_tensor_parallel_size": 1}, {"sequence_length": 15}),
    "layers": ("pipeline-layers", {"num_layers": 1}, {**PP}, {}),
    "stages": ("pipeline-layers", {"num_layers": 3}, {**PP, "virtual_stages": 2, "pipeline_schedule": "zbv"}, {}),
    "sequence over context ranks": ("sequence-divides", {}, {**CP}, {"sequence_length": 14}),
    "sequence over tensor ranks": ("sequence-divides", {}, {**TP, "sequence_parallel": True}, {"sequence_length": 15}),
    "heads over context ranks": (
        "ulysses-heads", {"num_key_value_heads": 1}, {**CP, "context_parallel_method": "ulysses"}, {}
    ),
    "global batch": ("batch-divides", {}, {"micro_batch_size": 3}, {}),
    "micro-batches": ("pipeline-micro-batches", {}, {**PP, "pipeline_schedule": "1f1b", "micro_batch_size": 8}, {}),
    "world": ("world-divides", {}, {"tensor_parallel_size": 4}, {}),
}  # fmt: skip


def asked(name: str) -> tuple[str, ModelSpec, TrialConfig, Workload]:
    rule, sizes, knobs, work = CASES[name]
    spec = ModelSpec(name="tiny", family="llama", **{**SIZES, **sizes})
    workload = Workload(**{"global_batch_size": 8, "sequence_length": 16, **work})
    return rule, spec, TrialConfig().replace({"micro_batch_size": 1, **knobs}), workload


def asked_of(engine: str, name: str) -> TrialConfig:
    return asked(name)[2].replace(ENGINES[engine].capability.starting_values() if engine != "native" else {})


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (engine, name)
        for engine, name in itertools.product(ENGINES, CASES)
        if not ENGINES[engine].capability.refusals(asked_of(engine, name), 2)
    ],
)
def test_an_engine_refuses_what_it_would_round_down(engine: str, name: str) -> None:
    rule, spec, _, workload = asked(name)
    context = RankContext(rank=0, world_size=2, device=torch.device("cpu"))
    with pytest.raises(EngineRefusalError, match="; ") as told:
        ENGINES[engine].build(context, spec, asked_of(engine, name), workload)
    assert told.value.rule == rule


@pytest.mark.parametrize("name", ["vocabulary", "ffn"])
def test_a_dry_run_refuses_it_too(name: str) -> None:
    rule, spec, config, workload = asked(name)
    with pytest.raises(EngineRefusalError, match=r"2 ranks do not divide .*choose a tensor_parallel_size") as told:
        dry_run(spec, config, workload, world_size=2)
    assert told.value.rule == rule


def test_every_rule_of_shapes_is_a_rule() -> None:
    assert {rule.name for rule in RULES} >= SHAPES
