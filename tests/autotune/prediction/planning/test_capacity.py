"""What fits, against arithmetic by hand, facts that everybody knows, and the sizes one by one."""

import dataclasses

import pytest

from autotune.errors import RequestError
from autotune.prediction.planning.capacity import (
    SHARDING_LEVELS,
    TOKENS,
    Capacity,
    Remedy,
    ShardingLevel,
    ShardingLevelAnswer,
    ShardingLevels,
    capacity,
    fits,
)
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_of
from search_spaces.errors import IllegalConfigError
from search_spaces.spaces import Pin
from tests.sampling import sampled

SEVEN_BILLION = 6_738_415_616
"""Parameters of Llama-2-7B."""
ADAPTERS = 32 * 16 * 2 * (4096 + 4096)
"""Of rank 16 on its queries and values."""


def asked(model: str, cluster: str, lora: int | None = None, engine: str = "native", **pins: Pin) -> Question:
    return question_of(model_of(model, lora, None, None), cluster_of(cluster, None, None), engine=engine, pins=pins)


def level(found: Capacity, stage: int, offloaded: int = 0) -> ShardingLevelAnswer:
    return next(a for a in found.levels if (a.level.zero_stage, a.level.offloaded) == (stage, offloaded))


@pytest.mark.prove
def test_states_of_seven_billion_are_what_everybody_counts() -> None:
    """2 bytes of parameters and 12 of Adam's state [Rajbhandari 2020]; 16 with gradients of 2, this engine's are of 4."""
    tags = level(capacity(asked("llama-2-7b", "1x300GB")), 0).estimate.fullest.by_tag
    assert tags["parameters"] == pytest.approx(2 * SEVEN_BILLION, rel=1e-3)
    assert tags["gradients"] == pytest.approx(4 * SEVEN_BILLION, rel=1e-3)
    assert tags["optimizer_state"] == pytest.approx(12 * SEVEN_BILLION, rel=1e-3)
    published = 112e9 / 7e9  # bytes a parameter in "full fine-tuning of 7B needs 112 GB"
    states = tags["parameters"] + tags["gradients"] / 2 + tags["optimizer_state"]
    assert states == pytest.approx(published * SEVEN_BILLION, rel=1e-3)


@pytest.mark.prove
def test_what_is_frozen_has_neither_gradients_nor_state() -> None:
    tags = level(capacity(asked("llama-2-7b", "1x300GB", lora=16)), 0).estimate.fullest.by_tag
    assert tags["parameters"] == pytest.approx(2 * (SEVEN_BILLION + ADAPTERS), rel=1e-3)
    assert tags["gradients"] == pytest.approx(4 * ADAPTERS)
    assert tags["optimizer_state"] == pytest.approx(12 * ADAPTERS)
    assert tags["activations"] > 1e9


@pytest.mark.nightly
def test_seven_billion_needs_what_is_known_of_it() -> None:
    """121 GB of states: none on one card of 80 GB; with the optimizer over 8, 13.5 + 27 + 10 GB. On 2 x 24 GB not without
    offloading, half of the states being 61 GB; with adapters it is 13.5 GB and fits one card."""
    whole, small = capacity(asked("llama-2-7b", "8x80GB")), capacity(asked("llama-2-7b", "2x24GB"))
    assert not level(whole, 0).fits
    assert whole.needed is not None
    assert whole.needed.level == ShardingLevel(zero_stage=1)
    assert not any(answer.fits for answer in small.levels if not answer.level.offloaded)
    adapted = capacity(asked("llama-2-7b", "2x24GB", lora=16)).needed
    assert adapted is not None
    assert adapted.level == SHARDING_LEVELS[0]
    assert 14e9 < adapted.needed < 24 * 2**30


@pytest.mark.prove
@pytest.mark.parametrize("lora", sampled([None, 16], every=2))
def test_what_is_told_fits_and_one_more_does_not(lora: int | None) -> None:
    question = asked("llama-2-7b", "8x40GB", lora)
    sharding_levels, found = ShardingLevels(question, PROBABILITY), capacity(question)
    for answer in found.levels:
        for size, tokens, does in (
            (answer.micro_batch_size, 4096, True),
            (answer.micro_batch_size + 1, 4096, False),
            (1, answer.sequence_length, True),
            (1, answer.sequence_length + TOKENS, False),
        ):
            if not size or not tokens:
                continue
            ways = sharding_levels.ways(answer.level, size)
            chances = [item.fit_probability for item in estimates(sharding_levels.question_at(ways[0], tokens), ways)]
            assert (max(chances) >= PROBABILITY - 1e-9) is does, (answer.level, size, tokens)


@pytest.mark.prove
def test_larger_cards_never_hold_less() -> None:
    small, large = (capacity(asked("opt-1.3b", cluster)) for cluster in ("2x11GB", "2x24GB"))
    for one, other in zip(small.levels, large.levels, strict=True):
        assert other.micro_batch_size >= one.micro_batch_size
        assert other.sequence_length >= one.sequence_length
    assert large.longest is not None
    assert large.longest.sequence_length == 2048  # what it has positions for


@pytest.mark.prove
def test_no_more_is_offloaded_than_is_needed() -> None:
    found = capacity(asked("opt-1.3b", "2x24GB"))
    assert found.needed is not None
    assert found.needed.level.offloaded == 0
    assert found.most_samples is not None
    assert found.most_samples.level.offloaded == 0
    assert found.most_samples.micro_batch_size == max(a.micro_batch_size for a in found.levels if not a.level.offloaded)


@pytest.mark.prove
def test_where_nothing_fits_each_way_out_does() -> None:
    question = asked("llama-2-7b", "2x11GB")
    found = capacity(question)
    assert found.needed is None
    assert found.nearest.lacks_card > 0
    ways = {way.remedy: way.value for way in found.ways_out}
    assert {Remedy.CARD_MEMORY, Remedy.NODES, Remedy.ADAPTERS} <= set(ways)
    cluster = question.cluster
    for memory, does in ((ways[Remedy.CARD_MEMORY] + 1, True), (ways[Remedy.CARD_MEMORY] - 2**20, False)):
        device = dataclasses.replace(cluster.device, memory_bytes=memory)
        assert fits(dataclasses.replace(question, cluster=dataclasses.replace(cluster, device=device)), PROBABILITY) is does
    for nodes, does in ((ways[Remedy.NODES], True), (ways[Remedy.NODES] // 2, False)):
        assert fits(dataclasses.replace(question, cluster=dataclasses.replace(cluster, nodes=nodes)), PROBABILITY) is does


@pytest.mark.prove
def test_main_memory_is_counted_where_states_are_offloaded() -> None:
    """1.3 billion on 2 x 11 GB need the optimizer's 12 bytes a parameter in main memory: 15.8 GB."""
    question = asked("opt-1.3b", "2x11GB")
    needed = capacity(question).needed
    assert needed is not None
    assert needed.level.offload_optimizer
    assert needed.estimate.host_memory_bytes == pytest.approx(12 * 1.3157e9, rel=0.01)
    poor = dataclasses.replace(question, cluster=dataclasses.replace(question.cluster, host_memory_bytes=8 * 2**30))
    found = capacity(poor)
    assert found.needed is None
    ways = {way.remedy: way.value for way in found.ways_out}
    assert ways[Remedy.HOST_MEMORY] > 15.8e9


def test_pins_hold_on_every_rung() -> None:
    found = capacity(asked("llama-2-7b", "8x80GB", zero_stage="3", activation_checkpointing="full", micro_batch_size="2"))
    assert {answer.level.zero_stage for answer in found.levels} == {3}
    assert {answer.estimate.config.activation_checkpointing for answer in found.levels} == {"full"}
    assert found.micro_batch_size == 2
    assert {answer.level.zero_stage for answer in capacity(asked("opt-125m", "2x11GB", engine="ddp")).levels} == {0}
    with pytest.raises(RequestError, match="zero_stage: has several values"):
        capacity(asked("opt-125m", "2x11GB", zero_stage="1,2"))
    with pytest.raises(IllegalConfigError, match="world-divides"):
        capacity(asked("opt-125m", "2x11GB", tensor_parallel_size="5"))
    with pytest.raises(IllegalConfigError, match="no ZeRO stage or offloading is possible"):
        capacity(asked("opt-125m", "2x11GB", zero_stage="0", offload_param="cpu"))


def test_on_one_card_a_stage_is_named_only_for_what_it_offloads() -> None:
    for pins, stages in (({}, [0, 1, 3, 3]), ({"zero_stage": 2}, [2, 2])):
        assert [answer.level.zero_stage for answer in capacity(asked("llama-2-7b", "1x300GB", **pins)).levels] == stages
