"""Windows and exchanged heads in predictions: by the closed forms, and the same from a grid as one by one."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.activations import layer_bytes
from autotune.prediction.equations.cases import Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.compute import attention_forward, micro_batch
from autotune.prediction.equations.kernels import attention_slowdown
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.training.windows import AttentionWindow
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MODEL, CLUSTER = resolve_model("llama-3-8b"), resolve_cluster("dgx-a100:2")
WORK = Workload(global_batch_size=64, sequence_length=8192)
RATES = Coefficients()
HEAD = np.full(1, 128.0)


def cases(*configs: dict[str, Any]) -> Cases:
    made = [TrialConfig(precision="bf16").replace(knobs) for knobs in configs]
    return cases_of(MODEL, CLUSTER, WORK, made, "native")


def test_attention_takes_as_long_as_the_pairs_that_are_visited() -> None:
    windows = (512, 2048)
    found = attention_forward(cases({}, *({"attention_window": tokens} for tokens in windows)), RATES)
    causal = WORK.sequence_length**2 / 2
    shares = np.array([1.0, *(AttentionWindow(tokens).visited_pairs(WORK.sequence_length) / causal for tokens in windows)])
    slowdown = attention_slowdown(shares * WORK.sequence_length, HEAD)
    assert found / found[0] == pytest.approx(shares * slowdown / slowdown[0])


def test_a_model_with_a_window_of_its_own_is_predicted_as_one_that_is_given_it() -> None:
    own = dataclasses.replace(MODEL, sliding_window=512)
    plain = cases_of(own, CLUSTER, WORK, [TrialConfig(precision="bf16")], "native")
    assert attention_forward(plain, RATES) == attention_forward(cases({"attention_window": 512}), RATES)


def test_attention_within_chunks_takes_as_long_as_the_pairs_that_are_seen() -> None:
    """In some of the layers; the others attend to everything before them."""
    chunked = dataclasses.replace(MODEL, sliding_window=1000, chunked_attention=True, whole_layers=(False, False, False, True))
    whole, within = (
        attention_forward(cases_of(model, CLUSTER, WORK, [TrialConfig(precision="bf16")], "native"), RATES)[0]
        for model in (MODEL, chunked)
    )
    pairs = 8 * 1000 * 1001 / 2 + 192 * 193 / 2
    share = 0.25 + 0.75 * pairs / (WORK.sequence_length**2 / 2)
    slower, usual = (attention_slowdown(np.full(1, part * WORK.sequence_length), HEAD)[0] for part in (share, 1.0))
    assert within / whole == pytest.approx(share * slower / usual)


def test_global_tokens_cost_something() -> None:
    few, more = attention_forward(
        cases({"attention_window": 512}, {"attention_window": 512, "attention_global_tokens": 256}), RATES
    )
    assert few < more


def test_exchanged_heads_are_fewer_bytes_with_many_ranks() -> None:
    """Beyond 1 + heads / key-value heads, which are 4 here."""

    def seconds(ranks: int) -> tuple[float, float]:
        methods = ({"context_parallel_size": ranks, "context_parallel_method": way} for way in ("gather", "ulysses"))
        gathered, exchanged = micro_batch(cases(*methods), RATES).layer_communication
        return gathered, exchanged

    assert seconds(2)[0] < seconds(2)[1]
    assert seconds(8)[0] > seconds(8)[1]


def test_gathered_keys_are_kept_whole_and_exchanged_ones_in_shares() -> None:
    gathered, exchanged = layer_bytes(
        cases(*({"context_parallel_size": 8, "context_parallel_method": way} for way in ("gather", "ulysses")))
    )
    width = MODEL.num_key_value_heads * MODEL.head_dim
    assert gathered - exchanged == pytest.approx(2 * 2 * (8 - 1) * width)


def test_a_window_changes_nothing_else() -> None:
    plain, narrow = cases({}), cases({"attention_window": 512})
    for part in ("hardware", "layouts", "software"):
        for field in dataclasses.fields(getattr(plain, part)):
            one, other = (np.asarray(getattr(getattr(held, part), field.name)) for held in (plain, narrow))
            assert np.array_equal(one, other), field.name
