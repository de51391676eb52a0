"""Pipelines of models whose layers differ: every rank against the real engine on tensors without data."""

import dataclasses
import itertools

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import predict, seconds_of
from autotune.prediction.equations.uneven import layout_overrides, paces_of, rank_seconds, shares_of
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question
from executor.dry.dry_run import dry_run_places
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.knob import Value
from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.trial import DryRun
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

LATENT = dataclasses.replace(
    resolve_model("deepseek-v2-lite"), num_layers=8, num_experts=8, experts_per_token=2, vocab_size=32000,
    dense_layers=(True,) * 3 + (False,) * 5,
)  # fmt: skip
ALTERNATING = dataclasses.replace(resolve_model("mixtral-8x7b"), num_layers=8, dense_layers=(True, False), dense_ffn_size=4096)
UNIFORM = dataclasses.replace(LATENT, dense_layers=(), dense_ffn_size=0)
WINDOWS = dataclasses.replace(resolve_model("gemma-3-4b"), num_layers=8, vocab_size=32000, sliding_window=256)
CLUSTER = resolve_cluster("dgx-a100:1")
RATES = Coefficients()


def asked(model: ModelSpec, samples: int = 16) -> Question:
    return Question(model=model, cluster=CLUSTER, global_batch_size=samples, sequence_length=1024, coefficients=RATES)


def made(**knobs: Value) -> TrialConfig:
    return TrialConfig(precision="bf16").replace(knobs)


def run(model: ModelSpec, config: TrialConfig) -> DryRun:
    return dry_run_places(model, config, asked(model).workload, CLUSTER.world_size, backend="nccl")


# With layers that are alike, rank 0 is 10 % off under gpipe, and rank 2 of 4-2-1-1, which has a single layer, 21 %.
CASES: list[tuple[ModelSpec, dict[str, Value], float]] = [
    (LATENT, {"pipeline_parallel_size": 2, "zero_stage": 0}, 0.06),
    (LATENT, {"pipeline_parallel_size": 2, "zero_stage": 1}, 0.09),
    (LATENT, {"pipeline_parallel_size": 2, "zero_stage": 2}, 0.15),
    (LATENT, {"pipeline_parallel_size": 2, "zero_stage": 3}, 0.15),
    (LATENT, {"pipeline_parallel_size": 2, "zero_stage": 1, "pipeline_schedule": "gpipe"}, 0.16),
    (LATENT, {"pipeline_parallel_size": 2, "zero_stage": 1, "pipeline_schedule": "zbv", "virtual_stages": 2}, 0.06),
    (
        LATENT,
        {"pipeline_parallel_size": 2, "zero_stage": 1, "pipeline_schedule": "interleaved_1f1b", "virtual_stages": 2},
        0.06,
    ),
    (LATENT, {"pipeline_parallel_size": 4, "zero_stage": 0}, 0.09),
    (LATENT, {"pipeline_parallel_size": 4, "zero_stage": 1}, 0.10),
    (LATENT, {"pipeline_parallel_size": 4, "zero_stage": 1, "pipeline_schedule": "zbv", "virtual_stages": 2}, 0.10),
    (LATENT, {"pipeline_parallel_size": 4, "zero_stage": 1, "pipeline_layout": "4-2-1-1"}, 0.22),
    (ALTERNATING, {"pipeline_parallel_size": 4, "zero_stage": 1, "pipeline_layout": "1-3-3-1"}, 0.10),
    (WINDOWS, {"pipeline_parallel_size": 4, "zero_stage": 1}, 0.12),
]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("model", "knobs", "within"), sampled(CASES, every=99), ids=lambda value: getattr(value, "name", str(value))
)
def test_memory_of_every_rank(model: ModelSpec, knobs: dict[str, Value], within: float) -> None:
    config = made(**knobs)
    (found,) = estimates(asked(model), [config])
    real = run(model, config).ranks
    for rank, own in zip(found.ranks, real, strict=True):
        allocated = rank.total - rank.by_tag["reserved"] - rank.by_tag["context"]
        assert allocated == pytest.approx(own.peak_memory_bytes, rel=within), rank.pipeline_rank
    fullest = max(rank.peak_memory_bytes for rank in real)
    assert found.fullest.total - found.fullest.by_tag["reserved"] - found.fullest.by_tag["context"] == pytest.approx(
        fullest, rel=within
    )


@pytest.mark.parametrize("layout", ["6-2", "5-1-1-1", "1-2-2-3"])
@pytest.mark.parametrize("model", [LATENT, ALTERNATING], ids=["latent", "alternating"])
def test_states_are_those_of_the_parameters_that_each_rank_holds(model: ModelSpec, layout: str) -> None:
    """With nothing divided over data: 18 bytes of each parameter."""
    config = made(pipeline_parallel_size=layout.count("-") + 1, zero_stage=0, pipeline_layout=layout)
    (found,) = estimates(asked(model), [config])
    starts = np.cumsum([0, *(rank.layers for rank in found.ranks)])
    for rank, (first, end) in zip(found.ranks, itertools.pairwise(starts), strict=True):
        expected = sum(_layer_parameters(model, layer) for layer in range(first, end))
        expected += model.vocab_size * model.hidden_size * ((rank.pipeline_rank == 0) + (end == model.num_layers))
        states = sum(rank.by_tag[tag] for tag in ("parameters", "gradients", "optimizer_state"))
        assert states == pytest.approx(18 * expected, rel=1e-3)


def _layer_parameters(model: ModelSpec, layer: int) -> int:
    single = dataclasses.replace(
        model, num_layers=1, dense_layers=() if model.has_experts(layer) else (True,), tied_embeddings=True
    )
    return single.parameter_count - single.input_embedding_parameters - single.hidden_size


@pytest.mark.nightly
def test_the_pace_of_each_rank_follows_its_own_layers() -> None:
    """FLOPs of the engine, rank by rank, where time is that of the products."""
    config = made(pipeline_parallel_size=2, zero_stage=1, pipeline_layout="6-2")
    question = asked(LATENT)
    real = [float(rank.flops_per_step or 0) for rank in run(LATENT, config).ranks]
    cases = cases_of(LATENT, CLUSTER, question.workload, [config], "native")
    cases = dataclasses.replace(cases, hardware=dataclasses.replace(cases.hardware, bandwidth=np.full(1, 1e18)))
    fast = dataclasses.replace(RATES, kernel_seconds=0.0, rows_half=0.0, width_half=0.0)
    paces = paces_of(cases, fast, marked=False)
    seconds = [float(rank_seconds(paces, share, layout_overrides(cases)[0])[0][0]) for share in shares_of(cases)]
    assert seconds[0] / seconds[1] == pytest.approx(real[0] / real[1], rel=0.1)


def test_models_of_alike_layers_have_no_kinds() -> None:
    for model, kinds in ((UNIFORM, 0), (LATENT, 2), (ALTERNATING, 2), (WINDOWS, 2)):
        config = made(pipeline_parallel_size=2)
        cases = cases_of(model, CLUSTER, asked(model).workload, [config], "native")
        assert len(cases.kinds) == kinds
        assert (cases.ranks is None) is (kinds == 0)


def test_a_pipeline_is_predicted_beside_others_as_by_itself() -> None:
    configs = [made(pipeline_parallel_size=pp, zero_stage=stage) for pp in (1, 2, 4) for stage in (0, 1)]
    workload = asked(LATENT).workload
    together = predict(cases_of(LATENT, CLUSTER, workload, configs, "native"), RATES)
    for place, config in enumerate(configs):
        alone = predict(cases_of(LATENT, CLUSTER, workload, [config], "native"), RATES)
        assert together.seconds[place] == pytest.approx(alone.seconds[0], rel=1e-12)
        assert together.memory.total[place] == pytest.approx(alone.memory.total[0], rel=1e-12)


def test_dense_layers_in_the_first_stage_take_less_memory_than_the_mean() -> None:
    """The rank that holds them is not the fullest, and a layout that gives it more layers is faster."""
    configs = [made(pipeline_parallel_size=2, zero_stage=0, pipeline_layout=layout) for layout in ("4-4", "6-2")]
    (even, _) = estimates(asked(LATENT), configs)
    assert even.fullest.pipeline_rank == 1
    seconds = seconds_of(cases_of(LATENT, CLUSTER, asked(LATENT).workload, configs, "native"), RATES)
    assert len(set(seconds.tolist())) == 2
