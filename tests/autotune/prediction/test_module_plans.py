"""Predictions for users' modules, compared with the modules themselves and with dry runs of the engine."""

import dataclasses
import functools
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from autotune.errors import RequestError
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.fit import fit
from autotune.prediction.planning.largest import largest
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import cluster_of, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from executor.batches import FactoryData
from executor.dry.dry_run import dry_run
from executor.dry.module_profile import profile_module, with_profile
from executor.errors import FactoryError
from executor.measurement.flop_counter import FlopCounter
from executor.user_module.factory import load_factory
from search_spaces.clusters.presets import local_cluster
from search_spaces.models.model import FactoryModel
from search_spaces.models.module_profile import MomentKind, at
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

WORKLOAD, RANKS, MODULES = Workload(global_batch_size=16, sequence_length=64), 2, "benchmarks.prediction.plan_modules"
SMALL = {"reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000, "param_persistence_threshold": 0}


@functools.cache
def profiled(name: str) -> FactoryModel:
    return profile_module(f"{MODULES}:{name}", WORKLOAD, ("fp32", "bf16"))


def allocated(model: FactoryModel, knobs: dict[str, Any]) -> float:
    cluster, config = local_cluster(RANKS), TrialConfig(**knobs)
    return float(memory(cases_of(model, cluster, WORKLOAD, [config], "native"), rates_for(cluster, "native")).allocated[0])


@pytest.mark.prove
@pytest.mark.parametrize("name", sampled(["tied", "mlp", "conv", "decoder", "frozen"], every=5))
def test_parameters_and_flops_are_those_of_the_module(name: str) -> None:
    model = profiled(name)
    assert model.profile is not None
    user = load_factory(f"{MODULES}:{name}", WORKLOAD)
    parameters = dict(user.module.named_parameters()).values()
    trained = [parameter.numel() for parameter in parameters if parameter.requires_grad]
    assert [parameter.elements for parameter in model.profile.trained] == trained
    assert model.profile.frozen == sum(parameter.numel() for parameter in parameters) - sum(trained)
    batch = FactoryData(batch=user.batch, seed=WORKLOAD.seed).micro_batch(0, 0, 5)
    with FlopCounter() as counter:
        user.module(**batch).backward()
    trace = model.profile.traces["fp32"]
    works = [work for part in (trace.outer, *trace.blocks) for work in (part.forward, part.backward)]
    assert sum(at(work.flops, 5) for work in works) == counter.total
    if name in ("mlp", "conv"):  # torch's counter has no formula for the CPU's attention
        with FlopCounterMode(display=False) as torch_counter:
            user.module(**batch).backward()
        assert torch_counter.get_total_flops() == counter.total


PEAKS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {"micro_batch_size": 8}),
    ("conv", {"micro_batch_size": 4}),
    ("decoder", {"micro_batch_size": 8}),
    ("decoder", {"micro_batch_size": 4, "activation_checkpointing": "full"}),
    ("decoder", {"micro_batch_size": 4, "activation_checkpointing": "selective", "checkpoint_every_k": 2}),
    ("decoder", {"micro_batch_size": 4, "precision": "bf16"}),
    ("decoder", {"micro_batch_size": 4, **SMALL, "prefetch_bucket_size": 100_000}),
    ("decoder", {"micro_batch_size": 8, **SMALL, "overlap_comm": False, "prefetch_bucket_size": 0}),
    ("tied", {"micro_batch_size": 4}),
    ("frozen", {"micro_batch_size": 4}),
]


@pytest.mark.prove(every=8)
@pytest.mark.parametrize(
    ("name", "knobs", "stage"), sampled([(name, knobs, stage) for name, knobs in PEAKS for stage in range(4)], every=5)
)
def test_the_peak_is_that_of_a_dry_run(name: str, knobs: dict[str, Any], stage: int) -> None:
    model, config = profiled(name), {**knobs, "zero_stage": stage}
    dry = dry_run(dataclasses.replace(model, profile=None), TrialConfig(**config), WORKLOAD, RANKS)
    assert allocated(model, config) == pytest.approx(dry.peak_memory_bytes, rel=0.03)


@pytest.mark.prove
def test_the_trace_ends_as_it_begins() -> None:
    model = profiled("decoder")
    assert model.profile is not None
    for trace in model.profile.traces.values():
        for moments in trace.moments.values():
            assert moments[0].mark is MomentKind.FORWARD and moments[-1].mark is MomentKind.END
            assert at(moments[-1].level, 8) <= 8  # the loss
            assert sum(moment.mark is MomentKind.GRADIENT for moment in moments) == len(model.profile.trained)


def test_a_profile_survives_the_way_through_json() -> None:
    model = profiled("mlp")
    again = from_plain(FactoryModel, to_plain(model))
    assert again == model
    assert to_plain(again) == to_plain(model)
    assert allocated(again, {"zero_stage": 2}) == allocated(model, {"zero_stage": 2})


def test_a_module_that_reads_values_is_refused_in_one_line() -> None:
    with pytest.raises(
        FactoryError, match=r"its module layers.1 \(Gate\) reads the value of a tensor .*; measure it by trials"
    ) as error:
        profiled("reads_value")
    assert "\n" not in str(error.value)
    model = with_profile(FactoryModel(reference=f"{MODULES}:reads_value", parameter_count=1), WORKLOAD, ("fp32",))
    assert model.profile is None
    with pytest.raises(RequestError, match="reads the value of a tensor"):
        question_of(model, cluster_of("dgx-h100", None, None))


@pytest.mark.nightly
def test_a_plan_has_only_legal_configurations() -> None:
    question = question_of(profiled("decoder"), cluster_of("dgx-h100", None, None), global_batch_size=64)
    found = plan(question, PlanOptions(top=3))
    space = space_of(question)
    assert found.plans and found.configurations > 100
    for each in found.plans:
        assert not space.check(each.estimate.config)
        assert each.estimate.config.context_parallel_size == 1
    mine = found.plans[0].estimate
    assert estimates(question, [mine.config])[0].step_seconds == mine.step_seconds


@pytest.mark.prove
def test_more_work_takes_longer_and_sharding_saves_memory() -> None:
    model, cluster = profiled("decoder"), cluster_of("dgx-h100:2", None, None)
    configs = [TrialConfig(zero_stage=stage, precision="bf16") for stage in range(4)]
    cases = cases_of(model, cluster, Workload(global_batch_size=64, sequence_length=64), configs, "native")
    held = memory(cases, rates_for(cluster, "native")).by_tag["optimizer_state"]
    assert held[0] > held[1] == held[2] == held[3]
    again = [TrialConfig(micro_batch_size=4, activation_checkpointing=policy) for policy in ("none", "full")]
    seconds = seconds_of(cases_of(model, local_cluster(2), WORKLOAD, again, "native"), rates_for(local_cluster(2), "native"))
    assert seconds[0] < seconds[1]


@pytest.mark.prove
def test_what_fits_and_the_largest_micro_batch() -> None:
    question = question_of(profiled("decoder"), cluster_of("dgx-h100", None, None, None))
    found = fit(question)
    assert {answer.setup.sharding.name for answer in found.answers} > {"DDP", "ZeRO-2", "ZeRO-3"}
    assert max(answer.micro_batch_size for answer in found.fitting) > 100
    assert all(answer.sequence_length is None for answer in found.answers)
    assert largest(question, "micro_batch_size", 0.95).value >= 1
    with pytest.raises(RequestError, match="is described as it is"):
        largest(question, "sequence_length", 0.95)


def test_a_service_runs_no_factory_for_a_prediction() -> None:
    with pytest.raises(RequestError, match="is code, which is not run here"):
        model_of(f"{MODULES}:mlp", None, None, None)
