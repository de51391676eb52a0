"""Schedules of the data: how they grow, the points that tell a whole run's cost, and what they make of FLOPs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.canonical import canonical
from search_spaces.capability import SpaceContext
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.rules.table import check_config
from search_spaces.training.data_schedule import (
    GRANULARITY,
    flops_per_sample,
    is_scheduled,
    kept_at,
    length_at,
    points_of,
    useful_samples,
    useful_share,
)
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

LLAMA = resolve_model("llama-tiny")
RUN = Workload(global_batch_size=8, sequence_length=128, training_steps=1000)
CURRICULUM = TrialConfig(curriculum_start_length=32, curriculum_steps=300)
RANDOM_LTD = TrialConfig(random_ltd_start_tokens=64, random_ltd_steps=500)


@st.composite
def runs(draw: st.DrawFn) -> tuple[TrialConfig, Workload]:
    start = draw(st.integers(1, 30)) * GRANULARITY
    whole, steps = start + draw(st.integers(1, 300)), draw(st.integers(1, 200))
    run = Workload(global_batch_size=4, sequence_length=whole, training_steps=steps + draw(st.integers(1, 200)))
    if draw(st.booleans()):
        return TrialConfig(curriculum_start_length=start, curriculum_steps=steps), run
    return TrialConfig(random_ltd_start_tokens=start, random_ltd_steps=steps), run


@given(runs())
def test_a_schedule_grows_in_eights_from_its_start_to_whole_samples(run: tuple[TrialConfig, Workload]) -> None:
    config, workload = run
    steps = config.curriculum_steps + config.random_ltd_steps
    grown = [kept_at(config, workload, step) for step in range(steps + 1)]
    assert grown[0] == config.curriculum_start_length + config.random_ltd_start_tokens
    assert grown == sorted(grown)
    assert all(value % GRANULARITY == 0 for value in grown[:-1])
    assert grown[-1] == workload.sequence_length
    lengths = {length_at(config, workload, step) for step in range(steps)}
    assert config.curriculum_start_length or lengths == {workload.sequence_length}


@given(runs(), st.tuples(*[st.floats(0, 10)] * 3))
def test_three_points_tell_the_cost_of_a_whole_run(run: tuple[TrialConfig, Workload], cost: tuple[float, ...]) -> None:
    """Whatever a step costs, constantly, by the token and by its square."""
    config, workload = run
    assert workload.training_steps is not None

    def seconds(tokens: int) -> float:
        return cost[0] + cost[1] * tokens / 100 + cost[2] * (tokens / 100) ** 2

    tokens = [kept_at(config, workload, step) for step in range(workload.training_steps)]
    points = points_of(config, workload)
    assert 2 <= len(points) <= 3
    assert all(kept_at(config, workload, point.step) == point.kept for point in points)
    assert sum(point.weight for point in points) == pytest.approx(1)
    told = sum(point.weight * seconds(point.kept) for point in points)
    values = len(Counter(tokens))
    if values <= 2 or len(points) == 3:
        assert told == pytest.approx(sum(map(seconds, tokens)) / len(tokens))


@given(runs())
def test_tokens_that_layers_drop_count_and_those_of_shorter_samples_do_not(run: tuple[TrialConfig, Workload]) -> None:
    config, workload = run
    assert workload.training_steps is not None
    trained = [length_at(config, workload, step) for step in range(workload.training_steps)]
    share = sum(trained) / len(trained) / workload.sequence_length
    assert useful_share(config, workload) == pytest.approx(share)
    assert useful_samples(config, workload) == pytest.approx(4 * share)


def test_a_workload_may_stand_at_a_point_of_the_run() -> None:
    first = Workload(global_batch_size=8, sequence_length=128, training_steps=1000, schedule_step=0)
    assert useful_share(CURRICULUM, first) == 0.25
    assert useful_share(RANDOM_LTD, first) == 1.0


def test_nothing_is_scheduled_by_default() -> None:
    assert not is_scheduled(TrialConfig())
    (point,) = points_of(TrialConfig(), RUN)
    assert (point.length, point.kept, point.weight) == (128, 128, 1.0)
    assert flops_per_sample(LLAMA, TrialConfig(), RUN) == LLAMA.flops_per_token(128) * 128


def test_the_middle_layers_flops_are_those_of_the_tokens_that_they_see() -> None:
    """6 FLOPs a weight and seen token, 12 a query element and pair of tokens; the embedding and the head see all."""
    here = Workload(global_batch_size=8, sequence_length=128, training_steps=1000, schedule_step=0)
    queries, middle = LLAMA.num_attention_heads * LLAMA.head_dim, LLAMA.num_layers - 2
    norm = LLAMA.hidden_size  # the final one, which the convention counts as a matrix, is shared out over the layers
    weights = LLAMA.layer_parameters + norm / LLAMA.num_layers
    spared = middle * (6 * weights * (128 - 64) + 12 * queries * (128**2 - 64**2))
    assert flops_per_sample(LLAMA, RANDOM_LTD, here) == pytest.approx(LLAMA.flops_per_token(128) * 128 - spared)
    short = flops_per_sample(LLAMA, CURRICULUM, here)
    assert short == pytest.approx(LLAMA.flops_per_token(32) * 128)  # of a whole sample's worth of tokens
    assert flops_per_sample(LLAMA, RANDOM_LTD, RUN) < flops_per_sample(LLAMA, TrialConfig(), RUN)


def context(workload: Workload = RUN) -> SpaceContext:
    cluster = resolve_cluster("local", ranks=4)
    return SpaceContext(model=LLAMA, cluster=cluster, workload=workload, world_size=4)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            {"curriculum_start_length": 128, "curriculum_steps": 9},
            "curriculum_start_length=128 is not shorter than the",
        ),
        ({"curriculum_start_length": 60, "curriculum_steps": 9}, "curriculum_start_length=60 is not a multiple of 8 tokens"),
        ({"curriculum_start_length": 64}, "curriculum_steps is 0"),
        ({"curriculum_start_length": 64, "curriculum_steps": 1000}, "curriculum_steps=1000 leaves no full-length steps"),
        ({"random_ltd_start_tokens": 200, "random_ltd_steps": 9}, "random_ltd_start_tokens=200 is not shorter"),
        ({"random_ltd_start_tokens": 64, "random_ltd_steps": 2000}, "random_ltd_steps=2000 leaves no full-length steps"),
    ],
)
def test_what_is_refused_names_the_field_and_the_remedy(knobs: dict[str, int], said: str) -> None:
    (refusal,) = check_config(TrialConfig(**knobs), context())  # type: ignore[arg-type]
    assert said in refusal.message
    assert refusal.remedy.startswith(
        ("set it to a multiple of 8 below --sequence-length", "state the run's steps (--training-steps)")
    )


def test_steps_of_no_schedule_are_no_other_configuration() -> None:
    assert canonical(TrialConfig(curriculum_steps=9, random_ltd_steps=9), context()) == TrialConfig()
    assert canonical(CURRICULUM, context()) == CURRICULUM
