"""Stages of models whose layers differ: never slower or fuller than with means of all layers."""

import itertools
from typing import Any
from unittest.mock import patch

import pytest

from autotune.prediction.planning import stage_program
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.memory_fit import MemoryLimits, memory_limits_of
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from autotune.prediction.planning.question_space import space_of
from autotune.prediction.planning.stage_program import solved
from search_spaces.rules.table import check_config
from search_spaces.trial_config import TrialConfig
from tests.sampling import sampled

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"expert_parallel_size": 32}, "deepseek-v2": {"expert_parallel_size": 32},
    "llama-4-maverick-17b-128e": {"expert_parallel_size": 16}, "gemma-3-27b": {},
}  # fmt: skip
PIPELINES = ((8, 1), (8, 2), (16, 1))
"""Ranks, and stages of each."""
SHARES = (1.0, 0.9)
"""Of the memory of a device."""
CASES = [case for case in itertools.product(MODELS, PIPELINES, SHARES) if case[1] != (16, 1) or case[2] == 1.0]


def answer(question: Question, config: TrialConfig, limits: MemoryLimits) -> StepEstimate | None:
    found = solved(question, config, limits)
    return None if found is None else estimates(question, [found])[0]


@pytest.mark.prove(every=4)
@pytest.mark.parametrize(("model", "pipeline", "share"), sampled(CASES, every=5))
def test_own_layers_are_never_worse_than_means(model: str, pipeline: tuple[int, int], share: float) -> None:
    ranks, virtual = pipeline
    fields = {"global_batch_size": 512, "sequence_length": 4096}
    question = question_of(model_of(model, None, None, None), cluster_of("dgx-h100:64", None, None), **fields)
    whole = memory_limits_of(question)
    limits = MemoryLimits(device=whole.device * share, host=whole.host)
    config = TrialConfig(
        precision="bf16", pipeline_parallel_size=ranks, virtual_stages=virtual, zero_stage=1,
        pipeline_schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
    ).replace(MODELS[model])  # fmt: skip
    with patch.object(stage_program, "improved", lambda *given: given[-1]):
        means = answer(question, config, limits)
    own = answer(question, config, limits)
    assert own is not None or share < 1
    if own is None or means is None:
        return
    assert own.fullest.needed <= limits.device
    assert own.step_seconds.mean <= means.step_seconds.mean * 1.000001 or means.fullest.needed > limits.device
    assert check_config(own.config, space_of(question).context) == []
