"""A scan against a full sort: the same configurations in the same order, equal ones in the order of the space."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.step import least_seconds_of, predict, seconds_of
from autotune.prediction.planning.memory_fit import memory_limits_of
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from autotune.prediction.planning.scan import Bounds, scan, without_buckets
from autotune.prediction.planning.scan_results import KEPT, SpacePart
from autotune.prediction.planning.ties import plain_parts
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

FEW = {"checkpoint_every_k": "1,2", "virtual_stages": "1,2", "micro_batch_size": "1,4", "offload_optimizer": "none"}
SPACES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "experts": ("mixtral-8x7b", "dgx-h100:2", {"pins": FEW | {"pipeline_schedule": "1f1b,zbv"}}),
    "latent": ("deepseek-v2-lite", "dgx-h100:2", {"pins": FEW | {"pipeline_schedule": "1f1b,interleaved_1f1b"}}),
    "contexts": ("llama-3-8b", "gb200-nvl72:2", {"pins": FEW | {"offload_param": "none"}}),
    "windows": ("gemma-3-4b", "dgx-a100:1", {"pins": FEW | {"zero_stage": "1,3"}}),
    "experts folded": ("deepseek-v2-lite", "dgx-h100:2", {
        "pins": FEW | {"pipeline_schedule": "1f1b", "offload_param": "none", "context_parallel_size": 1}
    }),
    "few fit": ("llama-3-70b", "dgx-h100:4", {"pins": FEW | {"pipeline_schedule": "1f1b"}}),
    "layouts": ("llama-3-8b", "dgx-h100:1", {"pins": FEW | {"pipeline_layout": ",10-22,16-16", "zero_stage": "0,1"}}),
    "kernels": ("gpt2-xl", "dgx-h100:1", {
        "pins": FEW | {"attention_backend": "math,best", "context_parallel_size": 1, "pipeline_parallel_size": 1}
    }),
    "adapters": ("llama-3-8b", "dgx-h100:1", {
        "pins": FEW | {"lora_rank": "0,16", "context_parallel_size": 1, "pipeline_schedule": "1f1b"}
    }),
}  # fmt: skip


def asked(name: str) -> Question:
    model, cluster, fields = SPACES[name]
    given = {"global_batch_size": 64, "sequence_length": 1024} | fields
    return question_of(model_of(model, None, None, None), cluster_of(cluster, None, None), **given)


def every(question: Question) -> list[tuple[float, float, int, TrialConfig, bool]]:
    """Seconds, bytes and place in the space of every configuration, and whether it fits."""
    configs = list(without_buckets(space_of(question)).enumerate())
    limits, found = memory_limits_of(question), []
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, config in enumerate(configs):
        groups.setdefault((config.precision, config.attention_backend, config.lora_rank), []).append(place)
    for places in groups.values():
        own, count = [configs[place] for place in places], len(places)
        prediction = predict(
            cases_of(question.model, question.cluster, question.workload, own, question.engine), question.rates
        )
        seconds, needed = np.broadcast_to(prediction.seconds, count), np.broadcast_to(prediction.memory.needed, count)
        fits = limits.holds(needed, np.broadcast_to(prediction.memory.host, count))
        columns = zip(places, seconds.tolist(), needed.tolist(), fits.tolist(), strict=True)
        found += [(s, m, place, configs[place], f) for place, s, m, f in columns]
    return found


Predicted = tuple[float, float, int, TrialConfig]


def ranked(predicted: list[tuple[float, float, int, TrialConfig, bool]], slowest: float | None) -> list[Predicted]:
    """Those that fit and are fast enough, sorted."""
    found = [item[:4] for item in predicted if item[4] and (slowest is None or item[0] <= slowest)]
    return sorted(found, key=lambda item: item[:3] if slowest is None else (item[1], item[0], item[2]))


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("name", sampled(sorted(SPACES), every=4))
def test_the_bound_of_the_time_is_one(name: str) -> None:
    question = asked(name)
    configs = list(without_buckets(space_of(question)).enumerate())[::7]
    alike = [config for config in configs if config.attention_backend == configs[0].attention_backend]
    cases = cases_of(question.model, question.cluster, question.workload, alike, question.engine)
    least, seconds = least_seconds_of(cases, question.rates), seconds_of(cases, question.rates)
    assert np.all(least <= seconds)
    assert np.median(least / seconds) > 0.5


@pytest.mark.prove(every=6)
@pytest.mark.parametrize("name", sampled(sorted(SPACES), every=4))
@pytest.mark.parametrize("by_memory", [False, True])
def test_the_leaders_are_those_of_a_full_sort(name: str, by_memory: bool) -> None:
    question = asked(name)
    space, limits = space_of(question), memory_limits_of(question)
    predicted = every(question)
    slowest = ranked(predicted, None)[0][0] * 1.3 if by_memory else None
    expected = ranked(predicted, slowest)
    apart = [SpacePart(values=values, most=15) for values in plain_parts(space)]
    scanned = scan(question, space, limits, slowest=slowest, bounds=Bounds(), apart=apart)
    assert [dataclasses.astuple(leader)[1:] for leader in scanned.leaders] == [item[:2] for item in expected[:KEPT]]
    assert [leader.config for leader in scanned.leaders] == [item[3] for item in expected[:KEPT]]
    for part, leaders in zip(apart, scanned.apart, strict=True):
        own = [item[3] for item in expected if all(getattr(item[3], knob) in allowed for knob, allowed in part.values.items())]
        assert [leader.config for leader in leaders] == own[:15]
    for knob, values in scanned.at_best.items():
        for value, found in values.items():
            having = [item for item in predicted if getattr(item[3], knob) == value]
            assert found.fits is any(item[4] for item in having)
            assert found.fits or found.needed == min(item[1] for item in having)
            first = next((item for item in expected if getattr(item[3], knob) == value), None)
            assert (found.leader is None) is (first is None)
            if first is not None and found.leader is not None:
                assert (found.leader.seconds, found.leader.memory)[by_memory] == first[by_memory]
