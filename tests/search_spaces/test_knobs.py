"""Knobs: one for every field of TrialConfig, and how their values are read."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.canonical import SEARCH_ORDER, canonical_reads
from search_spaces.errors import KnobValueError, UnknownNameError
from search_spaces.knob import Numerics, Value, ValueKind
from search_spaces.knob_values import KNOBS, check_value, parse_value
from search_spaces.space import EXPRESSIONS
from search_spaces.trial_config import KNOB_NAMES, TrialConfig


def test_every_field_is_a_knob_in_order() -> None:
    assert tuple(KNOBS) == KNOB_NAMES


@pytest.mark.parametrize("name", KNOB_NAMES)
def test_knob_matches_its_field(name: str) -> None:
    knob = KNOBS[name]
    types = {ValueKind.INT: int, ValueKind.BOOL: bool, ValueKind.FLOAT: float, ValueKind.CHOICE: str}
    assert type(knob.default) is types[knob.kind]
    assert check_value(name, knob.default) == knob.default
    assert not knob.description.endswith("..")
    assert parse_value(name, str(knob.default)) == knob.default


def test_no_value_is_a_word_for_a_domain() -> None:
    """Such a value could not be pinned: all values of the knob would be."""
    assert not {value for knob in KNOBS.values() for value in knob.choices or ()} & set(EXPRESSIONS)


def test_search_order_puts_what_is_read_first() -> None:
    assert sorted(SEARCH_ORDER) == sorted(KNOB_NAMES)
    for position, name in enumerate(SEARCH_ORDER):
        assert set(canonical_reads(name)) <= set(SEARCH_ORDER[:position])


def test_what_changes_results() -> None:
    assert {name for name, knob in KNOBS.items() if knob.numerics is Numerics.CHANGES} == {
        "precision", "fp8_recipe", "reduce_dtype", "script", "accumulation_dtype", "optimizer", "lora_rank", "lora_targets",
        "frozen_dtype", "adapter_size", "prefix_length", "prompt_length", "attention_window", "attention_global_tokens",
        "curriculum_start_length", "curriculum_steps", "random_ltd_start_tokens", "random_ltd_steps",
        "gather_dtype", "onebit_warmup_steps", "pack_sequences", "mtp_layers", "mtp_loss_weight",
        "router_bias_update_rate",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("reduce_bucket_size", "5e8", 500_000_000),
        ("reduce_bucket_size", "1_000_000", 1_000_000),
        ("reduce_bucket_size", " 7 ", 7),
        ("reduce_bucket_size", "9007199254740993", 9007199254740993),
        ("prefetch_bucket_size", "0", 0),
        ("overlap_comm", "ON", True),
        ("overlap_comm", "false", False),
        ("offload_ratio", ".5", 0.5),
        ("offload_ratio", "1", 1.0),
        ("precision", "BF16", "bf16"),
        ("zero_stage", "3", 3),
    ],
)
def test_values_that_are_read(name: str, text: str, value: Value) -> None:
    read = parse_value(name, text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reduce_bucket_size", "-5"),
        ("reduce_bucket_size", "0"),
        ("reduce_bucket_size", "1.5"),
        ("reduce_bucket_size", "1__0"),
        ("reduce_bucket_size", "1e400"),
        ("reduce_bucket_size", "nan"),
        ("reduce_bucket_size", ""),
        ("reduce_bucket_size", "true"),
        ("zero_stage", "4"),
        ("overlap_comm", "1"),
        ("offload_ratio", "1.01"),
        ("precision", "int8"),
        ("pipeline_schedule", "fastest"),
    ],
)
def test_values_that_are_refused_with_the_domain(name: str, text: str) -> None:
    with pytest.raises(KnobValueError, match="give ") as caught:
        parse_value(name, text)
    assert caught.value.field == name
    assert "\n" not in str(caught.value)


def test_values_of_the_wrong_type_are_refused() -> None:
    for name, value in (("zero_stage", True), ("overlap_comm", 1), ("precision", 16), ("offload_ratio", float("nan"))):
        with pytest.raises(KnobValueError):
            check_value(name, value)
    with pytest.raises(UnknownNameError, match="zero_stage"):
        check_value("zero_stge", 1)


@given(st.integers(min_value=1, max_value=10**12))
def test_whole_numbers_come_back(number: int) -> None:
    assert parse_value("reduce_bucket_size", str(number)) == number
    assert parse_value("reduce_bucket_size", f"{number:_}") == number


@given(st.sampled_from(KNOB_NAMES), st.text(max_size=12))
def test_any_text_is_read_or_refused(name: str, text: str) -> None:
    try:
        value = parse_value(name, text)
    except KnobValueError:
        return
    assert check_value(name, value) == value
    assert dataclasses.replace(TrialConfig(), **{name: value})


def test_a_configuration_prints_what_differs_from_the_defaults_and_is_made_again_by_it() -> None:
    config = TrialConfig(zero_stage=3, micro_batch_size=4, pipeline_schedule="gpipe", compile_blocks=True)
    printed = str(config)
    assert printed == "TrialConfig(zero_stage=3, micro_batch_size=4, pipeline_schedule='gpipe', compile_blocks=True)"
    assert eval(printed) == config
    assert repr(TrialConfig()) == "TrialConfig()"


def test_numbers_of_tokens_have_units() -> None:
    assert parse_value("attention_window", "4k") == 4096
    with pytest.raises(KnobValueError):
        parse_value("micro_batch_size", "4k")
