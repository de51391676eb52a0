"""Predicted memory of pipeline stages of users' modules, compared with real ranks."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.module_memory import module_bytes
from autotune.prediction.equations.module_pipeline import PipelineLayout, cut_stage, stages_of
from executor.dry.module_profile import profile_module
from executor.runners.local import LocalRunner
from search_spaces.clusters.presets import local_cluster
from search_spaces.models.model import FactoryModel
from search_spaces.outcome import Outcome
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

WORKLOAD, RANKS = Workload(global_batch_size=16, sequence_length=64), 4
QUICK = Fidelity(min_steps=1, max_steps=1, max_warmup_steps=2)
ROOT = Path(__file__).parents[3]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}, {title}, stage {stage}": (name, {**knobs, "zero_stage": stage, "pipeline_parallel_size": 2})
    for name in ("decoder", "tied")
    for title, knobs in {
        "1f1b": {"micro_batch_size": 2},
        "gpipe": {"micro_batch_size": 4, "pipeline_schedule": "gpipe"},
        "recomputed": {"micro_batch_size": 2, "activation_checkpointing": "full"},
    }.items()
    for stage in range(4)
}


@pytest.fixture(scope="module")
def described() -> dict[str, FactoryModel]:
    return {
        name: profile_module(f"benchmarks.prediction.plan_modules:{name}", WORKLOAD, ("fp32",)) for name in ("decoder", "tied")
    }


@pytest.fixture(scope="module")
def ranks(forked_ranks: None) -> Iterator[LocalRunner]:
    with LocalRunner(RANKS, device="cpu", environment={"PYTHONPATH": str(ROOT)}) as runner:
        yield runner


@pytest.mark.prove
def test_the_stages_of_a_module_hold_its_parameters_and_moments(described: dict[str, FactoryModel]) -> None:
    for name, twice in (("decoder", 0), ("tied", 1)):
        profile = described[name].profile
        assert profile is not None and profile.starts == (0, 1, 2, 3)
        trace = profile.traces["fp32"]
        layouts = [
            PipelineLayout(ranks=2, virtual_stages=1, schedule=1, pipeline_rank=place, micro_batches=4) for place in range(2)
        ]
        stages = [
            cut_stage(profile, trace, "none", 1, False, blocks)
            for layout in layouts
            for _, blocks in stages_of(profile, layout)
        ]
        assert [(stage.first, stage.last) for stage in stages] == [(True, False), (False, True)]
        assert sum(len(stage.profile.trained) for stage in stages) == len(profile.trained) + twice
        kept = sum(float(stage.curve[stage.turn - 1, 3]) for stage in stages)
        whole = max(moment.level[1] for moment in trace.moments["none"])
        assert kept == pytest.approx(whole, rel=0.25)


@pytest.mark.prove
def test_later_ranks_of_1f1b_hold_fewer_micro_batches(described: dict[str, FactoryModel]) -> None:
    config = TrialConfig(pipeline_parallel_size=4, micro_batch_size=1)
    cases = cases_of(described["decoder"], local_cluster(RANKS), WORKLOAD, [config], "native")
    held = [float(module_bytes(cases, cases.layouts.pipeline * 0 + place)["activations"][0]) for place in range(3)]
    assert held[0] > held[1] > held[2]


@pytest.mark.prove
@pytest.mark.parametrize("case", sampled(CASES, every=14))
def test_the_peak_is_that_of_real_ranks(ranks: LocalRunner, described: dict[str, FactoryModel], case: str) -> None:
    name, knobs = CASES[case]
    model, config, cluster = described[name], TrialConfig(**knobs), local_cluster(RANKS)
    request = TrialRequest(
        attempt=case, model=dataclasses.replace(model, profile=None), config=config, workload=WORKLOAD, world_size=RANKS,
        fidelity=QUICK, timeout_seconds=120,
    )  # fmt: skip
    result = ranks.run(request)
    assert result.outcome is Outcome.OK, result.message
    measured = max(rank.peak_memory_bytes for rank in result.ranks)
    predicted = float(memory(cases_of(model, cluster, WORKLOAD, [config], "native"), rates_for(cluster, "native")).allocated[0])
    assert predicted == pytest.approx(measured, rel=0.03)
