"""What fits, against arithmetic by hand, facts that everybody knows, and the sizes one by one."""

import dataclasses

import pytest

from autotune.errors import RequestError
from autotune.prediction.planning.conditional import fit_conditions
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.fit import (
    TIE,
    TOKENS,
    Fit,
    Remedy,
    SetupAnswer,
    anything_fits,
    fit,
    hours_of,
    largest_model,
    run_amount,
)
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.question import Question, cluster_of, model_of, question_about
from autotune.prediction.planning.training_setups import EVERY_METHOD, fine_tuning
from autotune.question.question import METHODS, PlanningFields
from search_spaces.errors import IllegalConfigError
from search_spaces.spaces import Pin

SEVEN_BILLION = 6_738_415_616
"""Parameters of Llama-2-7B."""
ADAPTERS = 32 * 16 * 4 * (4096 + 4096)
"""Of rank 16 on its queries, keys, values and outputs of attention."""


def asked(model: str, cluster: str, lora: int | None = None, bits: int | None = None, **fields: object) -> Question:
    pins: dict[str, Pin] = fields.pop("pins", {})  # type: ignore[assignment]
    inputs = PlanningFields(model=model, lora_rank=lora, simple="transformers", pins=pins, **fields)  # type: ignore[arg-type]
    question = question_about(inputs, model_of(model, lora, None, bits), cluster_of(cluster, None, None))
    return fine_tuning(question, inputs, ())


def setup(result: Fit, method: str, sharding: str, recomputes: bool = False) -> SetupAnswer:
    (answer,) = (
        item
        for item in result.answers
        if (item.setup.method.name, item.setup.sharding.name, item.setup.recomputes) == (method, sharding, recomputes)
    )
    return answer


def states(answer: SetupAnswer) -> tuple[float, float]:
    """Bytes of parameters, and of the optimizer's state."""
    tags = answer.least.fullest.by_tag
    return tags["parameters"], tags["optimizer_state"]


def test_the_methods_of_the_table_are_those_that_users_name() -> None:
    assert tuple(EVERY_METHOD) == METHODS


def test_states_of_seven_billion_are_what_everybody_counts() -> None:
    """fp32 masters: 4 bytes, and 8 of Adam's; all in bf16: 2 and 4; LoRA: 2 of what is frozen, and 4 and 8 of adapters in
    fp32; QLoRA: half a byte and scales of 64 and of 256 blocks, and tables in fp32."""
    result = fit(asked("llama-2-7b", "1x300GB"))
    assert states(setup(result, "full", "one card")) == pytest.approx((4 * SEVEN_BILLION, 8 * SEVEN_BILLION), rel=1e-3)
    assert states(setup(result, "full-bf16", "one card")) == pytest.approx((2 * SEVEN_BILLION, 4 * SEVEN_BILLION), rel=1e-3)
    adapted = states(setup(result, "lora", "one card"))
    assert adapted == pytest.approx((2 * SEVEN_BILLION + 4 * ADAPTERS, 8 * ADAPTERS), rel=1e-3)
    tables = 2 * 32000 * 4096
    quantised, _ = states(setup(result, "qlora", "one card"))
    frozen = (SEVEN_BILLION - tables) * (0.5 + 1 / 64 + 4 / (64 * 256)) + 4 * tables + 4 * ADAPTERS
    assert quantised == pytest.approx(frozen, rel=2e-3)


@pytest.mark.prove
def test_seven_billion_fits_where_everybody_trains_it() -> None:
    """Full fine-tuning takes 14 to 16 bytes a parameter: neither one card of 80 GB nor two of 24 hold it without offloading;
    LoRA fits 24 GB, QLoRA 12."""
    assert not any(
        item.fits for item in fit(asked("llama-2-7b", "1xa100"), methods=["full"]).answers if not item.least.host_memory_bytes
    )
    small = fit(asked("llama-2-7b", "2x24GB", sequence_length=2048))
    assert all(item.least.host_memory_bytes for item in small.fitting if item.setup.method.name == "full")
    alone = fit(asked("llama-2-7b", "1x24GB", sequence_length=2048))
    assert {"lora", "qlora"} <= {item.setup.method.name for item in alone.fitting if not item.least.host_memory_bytes}
    assert fit(asked("llama-2-7b", "1x12GB", sequence_length=1024), methods=["qlora"]).fitting


@pytest.mark.prove
@pytest.mark.parametrize("cluster", ["1x24GB", "4xa100"])
def test_what_is_told_fits_and_one_more_does_not(cluster: str) -> None:
    result = fit(asked("llama-2-7b", cluster, sequence_length=2048))
    assert result.fitting
    for answer in result.fitting:
        question, tokens = answer.setup.question, answer.sequence_length
        assert tokens is not None
        larger = answer.micro_batch_size + max(answer.micro_batch_size // 8, 1)  # sizes are tried in eighths of a doubling
        for size, length, does in (
            (answer.micro_batch_size, 2048, True),
            (larger + 1, 2048, False),
            (1, tokens, True),
            (1, tokens + TOKENS, False),
        ):
            batch = 2 * size * question.cluster.world_size
            changed = dataclasses.replace(question, global_batch_size=batch, sequence_length=length)
            (estimate,) = estimates(changed, [answer.setup.config(size)])
            assert (estimate.fit_probability >= PROBABILITY - 1e-9) is does, (answer.setup.name, size, length)


@pytest.mark.prove
def test_the_fastest_is_no_slower_and_the_leanest_no_larger_than_any() -> None:
    result = fit(asked("llama-3-8b", "4xa100"))
    assert result.fastest is not None and result.leanest is not None
    for answer in result.fitting:
        assert (1 - TIE) * answer.estimate.samples_per_second.low <= result.fastest.estimate.samples_per_second.low
        assert answer.least.fullest.needed >= result.leanest.least.fullest.needed
        assert answer.estimate.fit_probability >= PROBABILITY
        assert answer.estimate.config.micro_batch_size <= answer.micro_batch_size
    assert result.leanest.setup.name in result.worthwhile()


@pytest.mark.prove
def test_where_nothing_fits_each_remedy_does() -> None:
    question = asked("llama-2-7b", "1x8GB", pins={"zero_stage": 0})
    result = fit(question, methods=["qlora"])
    assert result.fastest is None
    cluster, lengths = question.cluster, result.remedies[Remedy.SHORTER_SAMPLES]
    assert anything_fits(dataclasses.replace(question, sequence_length=lengths), PROBABILITY, ["qlora"])
    memory = result.remedies[Remedy.CARD_MEMORY]
    for size, does in ((memory + 1, True), (memory - 2**20, False)):
        device = dataclasses.replace(cluster.device, memory_bytes=size)
        larger = dataclasses.replace(question, cluster=dataclasses.replace(cluster, device=device))
        assert anything_fits(larger, PROBABILITY, ["qlora"]) is does


@pytest.mark.prove
def test_the_largest_model_fits_and_the_next_does_not() -> None:
    question = asked("llama-2-7b", "1x24GB", sequence_length=2048)
    largest = largest_model(question, PROBABILITY, ["qlora"])
    assert largest is not None
    assert largest.model.parameter_count > SEVEN_BILLION
    assert fit(largest, methods=["qlora"]).fitting


def test_a_run_is_stated_in_one_way() -> None:
    question = asked("llama-2-7b", "1x24GB", sequence_length=2048, document_lengths=(512, 1536))
    for fields, samples in (
        ({"training_steps": 100}, 6400),
        ({"run_tokens": 2048 * 500}, 500),
        ({"dataset_rows": 1000, "epochs": 3.0}, 1500),  # of 1,024 tokens, packed
    ):
        amount = run_amount(question, PlanningFields(model="llama-2-7b", **fields))  # type: ignore[arg-type]
        assert amount is not None
        assert amount.samples == samples
        (estimate,) = estimates(question, [question.config()])
        assert hours_of(amount, estimate).mean == pytest.approx(samples / estimate.samples_per_second.mean / 3600)
    assert run_amount(question, PlanningFields()) is None
    padded = run_amount(asked("llama-2-7b", "1x24GB"), PlanningFields(dataset_rows=1000))
    assert padded is not None
    assert (padded.samples, padded.text) == (1000, "1 epoch of 1,000 rows, each padded to 4,096 tokens")
    with pytest.raises(RequestError, match="epochs: says what --training-steps says too"):
        run_amount(question, PlanningFields(training_steps=1, epochs=1.0))
    with pytest.raises(RequestError, match="dataset_rows: is missing"):
        run_amount(question, PlanningFields(epochs=1.0))


def test_documents_are_packed_as_the_libraries_do() -> None:
    whole = fit(asked("llama-2-7b", "1x24GB", sequence_length=2048), methods=["qlora"])
    for lengths in ((200, 400, 300, 500), (512,), (2048,)):  # of which the first leave a third of a row free, taken once
        packed = fit(asked("llama-2-7b", "1x24GB", sequence_length=2048, document_lengths=lengths), methods=["qlora"])
        rates = [answer.fastest.estimate.samples_per_second.mean for answer in (packed, whole) if answer.fastest]
        assert 0.97 < rates[0] / rates[1] < 1.2  # attention reads less
    pins: dict[str, Pin] = {"pack_sequences": False}
    question = asked("llama-2-7b", "1x24GB", sequence_length=2048, document_lengths=(512,), pins=pins)
    padded = fit(question, methods=["qlora"])
    assert padded.fastest is not None
    assert whole.fastest is not None
    assert padded.fastest.estimate.samples_per_second.mean * 4 == pytest.approx(
        whole.fastest.estimate.samples_per_second.mean, rel=1e-6
    )
    amount = run_amount(question, PlanningFields(dataset_rows=4))
    assert amount is not None
    assert amount.text == "1 epoch of 4 rows of 512 tokens, padded to 2,048"
    half = run_amount(
        asked("llama-2-7b", "1x24GB", sequence_length=2048, document_lengths=(1100, 1030)), PlanningFields(dataset_rows=4)
    )
    assert half is not None
    assert half.text.endswith("packed to 2,048, which are 52% full")


@pytest.mark.prove
def test_pins_and_stated_adapters_hold_in_every_way() -> None:
    pins: dict[str, Pin] = {"zero_stage": 3, "activation_checkpointing": "full", "micro_batch_size": 2}
    result = fit(asked("llama-2-7b", "8xa100", pins=pins))
    assert {item.setup.base.zero_stage for item in result.answers} == {3}
    assert {item.estimate.config.activation_checkpointing for item in result.answers} == {"full"}
    assert {item.estimate.config.micro_batch_size for item in result.answers} == {2}
    adapted = fit(asked("llama-2-7b", "1x24GB", lora=8, bits=4))
    assert {item.setup.method.name for item in adapted.answers} == {"qlora"}
    assert {item.setup.question.shape.lora_rank for item in adapted.answers} == {8}
    with pytest.raises(RequestError, match="methods: full is not possible with llama-2-7b as it is stated"):
        fit(asked("llama-2-7b", "1x24GB", lora=8), methods=["full"])
    with pytest.raises(RequestError, match="methods: 'none' is not known"):
        fit(asked("llama-2-7b", "1x24GB"), methods=["none"])
    with pytest.raises(RequestError, match="zero_stage: has several values"):
        fit(asked("llama-2-7b", "2x24GB", pins={"zero_stage": (1, 2)}))
    with pytest.raises(IllegalConfigError, match="no way of training is possible"):
        fit(asked("llama-2-7b", "2x24GB", pins={"zero_stage": 1}))


@pytest.mark.prove
def test_a_verdict_that_hangs_on_an_assumed_length_says_so() -> None:
    for cluster, fits in (("1x8GB", True), ("1x4GB", False)):
        result = fit(asked("llama-2-7b", cluster, pins={"zero_stage": 0}), methods=["qlora", "lora"])
        assert not result.fitting
        conditions = fit_conditions(result, ["qlora", "lora"])
        assert any(item.changes_verdict for item in conditions.results) is fits
        assert conditions.assumed[0].name == "sequence_length"


@pytest.mark.prove
@pytest.mark.parametrize(("cluster", "name"), [("4xa100", "device"), ("2x32GB", "host_memory_bytes")])
def test_the_answer_at_an_alternative_is_that_of_a_question_with_it(cluster: str, name: str) -> None:
    question = asked("llama-2-7b", cluster, sequence_length=2048)
    conditions = fit_conditions(fit(question), ())
    item = next(item for item in conditions.results if item.assumption.name == name)
    if name == "device":
        stated = asked("llama-2-7b", f"4x{item.value}", sequence_length=2048)
    else:
        stated = dataclasses.replace(question, cluster=dataclasses.replace(question.cluster, host_memory_bytes=item.value))
    fastest = fit(stated).fastest
    assert fastest is not None
    assert item.tokens_per_second == pytest.approx(fastest.estimate.tokens_per_second)


def test_frozen_parameters_that_are_on_the_host_are_fetched_twice_for_each_micro_batch() -> None:
    question = asked("llama-2-7b", "1x4090", sequence_length=2048)
    answer = setup(fit(question, methods=["lora"]), "lora", "ZeRO-3, all offloaded", recomputes=True)
    fetched = 2 * 2 * (SEVEN_BILLION + ADAPTERS) / question.cluster.device.host_link
    batches = question.global_batch_size // answer.estimate.config.micro_batch_size
    assert answer.estimate.breakdown_seconds["offload"] == pytest.approx(batches * fetched, rel=0.02)


@pytest.mark.prove
def test_what_the_libraries_do_is_stated_by_name() -> None:
    def least(*libraries: str) -> SetupAnswer:
        question = asked("llama-3-8b", "1xa100", sequence_length=2048, libraries=libraries)
        return setup(fit(question, methods=["lora"]), "lora", "one card", recomputes=True)

    plain = least().least.fullest
    assert least("loss=projection").least.fullest.needed < plain.needed
    copied = least("reference=copy").least.fullest.by_tag["parameters"] - plain.by_tag["parameters"]
    assert copied == pytest.approx(2 * 8.03e9, rel=0.01)
    rates = [
        item.estimate.samples_per_second.mean
        for item in (least(), least("sequences=2"), least("sequences=2", "reference=copy"))
    ]
    assert rates[0] / rates[1] == pytest.approx(2, rel=0.05)
    assert rates[1] / rates[2] == pytest.approx(4 / 3, rel=0.05)  # forward, recomputed forward, and a backward for inputs alone
    for words, problem in (
        ("loss=cheap", "loss=cheap is not known; use one of whole, "),
        ("colour=red", "'colour' is not known; use some of "),
        ("tower=big", "tower=big is not a number"),
        ("paged", "'paged' is not NAME=VALUE"),
    ):
        with pytest.raises(RequestError, match=f"libraries: {problem}"):
            least(words)


def test_the_trainer_does_not_compile_and_takes_fp16_where_there_is_no_bf16() -> None:
    result = fit(asked("opt-125m", "1xt4", sequence_length=512))
    assert {answer.setup.method.name for answer in result.answers} == {"full", "lora", "lora-8bit", "qlora"}
    for answer in result.answers:
        config = answer.setup.base
        assert (config.precision, config.compile_blocks, config.expandable_segments) == ("fp16", False, False)
    recent = fit(asked("opt-125m", "1x4090", sequence_length=512), among=("lora, one card",))
    assert recent.answers[0].setup.base.precision == "bf16"


def test_what_was_never_compared_with_a_run_is_no_headline() -> None:
    """Rates of 8-bit weights have a wide interval, so that a slower way with a narrow one is named."""
    result = fit(asked("llama-3-8b", "1x4090", sequence_length=2048), methods=("lora-8bit", "qlora"))
    eight_bits = result.best_of("lora-8bit").estimate
    assert result.fastest is not None and result.fastest.setup.method.name == "qlora"
    assert eight_bits.samples_per_second.mean > result.fastest.estimate.samples_per_second.mean
    assert "no published run has products of 8-bit weights" in eight_bits.doubts


def test_nothing_is_offloaded_for_a_gain_within_the_error() -> None:
    result = fit(asked("mistral-7b", "1x4090", sequence_length=2048), methods=("qlora",))
    best = result.fastest
    rates = {answer.setup.name: answer.estimate.samples_per_second.mean for answer in result.fitting}
    assert best is not None and best.setup.name == "qlora, one card, recomputed"
    assert best.setup.name == result.best_of("qlora").setup.name
    assert rates[best.setup.name] >= 0.95 * max(rates.values())
