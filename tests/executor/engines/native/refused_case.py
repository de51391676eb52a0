"""Cases that an engine refuses, run nevertheless, to show what becomes of them."""

from collections.abc import Mapping

from benchmarks.common.gang import Gang, TaskError
from benchmarks.correctness.parity_cases import CAPABILITIES, Case
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig

WRONG = 1e-6
RANKS = 4
PIPELINE: dict[str, Value] = {
    "precision": "fp64", "pipeline_parallel_size": 2, "virtual_stages": 2, "micro_batch_size": 2, "zero_stage": 3,
    "param_persistence_threshold": 0,
}  # fmt: skip
SCHEDULES: tuple[dict[str, Value], ...] = (
    {"curriculum_start_length": 8, "curriculum_steps": 2},
    {"random_ltd_start_tokens": 8, "random_ltd_steps": 2},
)
MODELS = {"native": "gpt2", "fsdp2": "llama"}
"""Engine -> the model that shows it: LayerNorm's backward reads its weight, which is released (a linear layer's weight gradient
does not); FSDP2 trains any model on, wrongly."""


def case(engine: str, knobs: Mapping[str, Value]) -> Case:
    return Case(engine=engine, ranks=RANKS, model=MODELS[engine], config=TrialConfig().replace(knobs), refused=True)


def off(gang: Gang, tried: Case) -> float:
    """How far the weights are off one process; infinite where training fails."""
    try:
        return max(report.off for report in gang.run(tried))
    except TaskError:
        return float("inf")


def refused_alone(rule: str, tried: Case) -> None:
    """The case is refused by this rule and by no other, so that what it shows is about this rule."""
    refusals = CAPABILITIES[tried.engine].refusals(tried.config, RANKS)
    assert [refusal.rule for refusal in refusals] == [rule]
