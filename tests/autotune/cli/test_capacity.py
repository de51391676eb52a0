"""`autotune capacity`: the answers, the one document, where nothing fits."""

import json

import pytest
from called import Command


@pytest.mark.prove
def test_answers_are_told_with_every_rung(command: Command) -> None:
    answer = command("capacity", "llama-2-7b", "--cluster", "2x24GB", "--lora-rank", 16)
    assert (answer.status, answer.err) == (0, "")
    assert "6,738,415,616 parameters, LoRA of rank 16) on 2x24GB: 2 x 23.7 GiB, 142 GiB of main memory" in answer.out
    assert "\nneeds ZeRO 0, full recomputation: " in answer.out
    assert "\nlargest micro-batch: " in answer.out
    assert "\nlongest samples: " in answer.out
    assert "nothing was run" in answer.out


def test_json_is_one_document(command: Command) -> None:
    answer = command("capacity", "opt-1.3b", "--cluster", "8x40GB", "--json")
    found = json.loads(answer.out)
    assert (answer.status, answer.err, found["sequence_length"]) == (0, "", 2048)
    assert found["needed"]["fits"]
    assert found["needed"]["offload_optimizer"] is False
    assert found["longest_samples"]["sequence_length"] == 2048
    assert len(found["levels"]) == 9


@pytest.mark.prove
def test_where_nothing_fits_the_shortfall_and_what_would_do_are_told(command: Command) -> None:
    answer = command("capacity", "llama-2-7b", "--cluster", "2x11GB")
    assert (answer.status, answer.err) == (3, "")
    assert "nothing fits: the nearest is ZeRO 3, " in answer.out
    assert " per card" in answer.out
    assert "possible remedies: " in answer.out
    assert "low-rank adapters (--lora-rank 16)" in answer.out


@pytest.mark.prove
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("llama-2-7b", "--cluster", "2x24"), "or give 2xMEMORY, such as 2x24GB"),
        (("llama-2-7b", "--cluster", "2x24GB", "--fit-probability", 2), "fit_probability: 2.0 is not between 0 and 1"),
        (("llama-2-7b", "--cluster", "2x24GB", "--frozen-bits", 4), "frozen_bits: says how adapters are"),
        (("mine:factory", "--cluster", "2x24GB"), "there is no module 'mine'"),
    ],
)
def test_bad_input_is_one_line(command: Command, words: tuple[object, ...], says: str) -> None:
    answer = command("capacity", *words)
    assert (answer.status, answer.out, len(answer.err.splitlines())) == (2, "", 1)
    assert says in answer.err
