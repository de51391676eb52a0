"""The two smaller counts of micro-batches, for every schedule, and of layers."""

import dataclasses

import pytest

from search_spaces.models.huggingface import resolve_model
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.training.fewer import at_full, fewer_layers, fewer_micro_batches
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


def counts(most: int | None, batch: int = 64, world: int = 2, **knobs: object) -> tuple[int, int] | None:
    return fewer_micro_batches(TrialConfig(**knobs), Workload(global_batch_size=batch, sequence_length=8), world, most)


def pipeline(ranks: int, schedule: str, virtual: int = 1) -> dict[str, object]:
    return {"pipeline_parallel_size": ranks, "pipeline_schedule": schedule, "virtual_stages": virtual}


def test_full_steps_where_nothing_is_saved_or_wanted() -> None:
    assert counts(None) is None
    assert counts(32) is None  # a step has 32 of them
    assert counts(2) is None  # there are no two counts between 2 and 2


def test_both_accumulate_and_are_as_far_apart_as_can_be() -> None:
    assert counts(8) == (2, 8)
    assert counts(8, micro_batch_size=2) == (2, 8)


@pytest.mark.parametrize(
    ("schedule", "virtual", "expected"),
    [
        ("1f1b", 1, (4, 8)), ("gpipe", 1, (4, 8)), ("interleaved_1f1b", 2, (4, 8)), ("looped_bfs", 2, (4, 8)),
        ("zbv", 2, None), ("dualpipev", 2, None), ("interleaved_zero_bubble", 2, None),
    ],
)  # fmt: skip
def test_both_fill_the_pipeline_in_whole_rounds(schedule: str, virtual: int, expected: tuple[int, int] | None) -> None:
    assert counts(11, world=4, **pipeline(4, schedule, virtual)) == expected
    assert counts(17, world=4, **pipeline(4, schedule, virtual)) == ((4, 16) if expected else (8, 16))


def test_a_full_step_that_is_no_whole_number_of_rounds_is_timed_itself() -> None:
    assert counts(8, batch=31, world=2, **pipeline(2, "1f1b")) is None


def deep(layers: int) -> ModelSpec:
    model = resolve_model("llama-tiny")
    assert isinstance(model, ModelSpec)
    return dataclasses.replace(model, num_layers=layers)


def test_two_depths_stand_for_a_deep_model_where_they_are_fewer_layers_together() -> None:
    assert fewer_layers(TrialConfig(), deep(32), 6) == (2, 6)
    assert fewer_layers(TrialConfig(), deep(8), 6) is None
    assert fewer_layers(TrialConfig(), deep(32), 2) is None
    assert fewer_layers(TrialConfig(), deep(32), None) is None
    assert fewer_layers(TrialConfig(), FactoryModel(reference="m:f", parameter_count=1), 6) is None


def test_every_stage_and_every_group_of_checkpointed_layers_is_whole_at_both_depths() -> None:
    stages = TrialConfig(pipeline_parallel_size=2, pipeline_schedule="interleaved_1f1b", virtual_stages=2)
    assert fewer_layers(stages, deep(32), 10) == (4, 8)
    assert fewer_layers(stages, deep(30), 10) is None
    third = TrialConfig(activation_checkpointing="full", checkpoint_every_k=3)
    assert fewer_layers(third, deep(30), 10) == (3, 9)
    both = third.replace({"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"})
    assert fewer_layers(both, deep(36), 13) == (6, 12)


def test_what_is_there_once_is_counted_once() -> None:
    assert at_full(32, (2, 6), 3.0 + 2 * 0.5, 3.0 + 6 * 0.5) == pytest.approx(3.0 + 32 * 0.5)
