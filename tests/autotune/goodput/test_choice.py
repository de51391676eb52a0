"""Tests of the user's terms, and of how a layout is run."""

import dataclasses
from typing import Any

import pytest

from autotune.errors import RequestError
from autotune.goodput.choice import RunLayout, choices, rates_of
from autotune.goodput.closed_form import expected
from autotune.goodput.run import CheckpointKind, Recovery, SavedState
from autotune.goodput.terms import GoodputTerms, parse_terms, terms_of

LAYOUT = RunLayout(
    nodes=2048,
    devices_per_node=8,
    step_seconds=10.0,
    tokens_per_step=16e6,
    state=SavedState(total_bytes=6e12, saved_bytes_per_device=4e8, loaded_bytes_per_device=4e8),
    copies=16,
    replicas=16,
)


def ways(layout: RunLayout = LAYOUT, *settings: str) -> dict[Recovery, Any]:
    terms = parse_terms(settings)
    found = choices(layout, terms, rates_of(terms, layout.nodes))
    kept = [choice.tokens_kept_per_device_hour for choice in found]
    assert kept == sorted(kept, reverse=True)
    return {choice.run.recovery: choice for choice in found}


def test_every_recovery_that_the_layout_allows_is_offered() -> None:
    assert set(ways()) == set(Recovery)
    assert set(ways(dataclasses.replace(LAYOUT, copies=1))) == {Recovery.RESTART, Recovery.REPLAN}
    assert set(ways(dataclasses.replace(LAYOUT, copies=1, replicas=1))) == {Recovery.RESTART}


def test_one_node_has_no_peers() -> None:
    alone = dataclasses.replace(LAYOUT, nodes=1, copies=1, replicas=1)
    assert ways(alone)[Recovery.RESTART].run.checkpoint.kind is not CheckpointKind.PEERS
    assert ways(alone, "checkpoint=peers") == {}


def test_no_other_spares_or_checkpoints_keep_more() -> None:
    best = ways()[Recovery.RESTART]
    for kind in CheckpointKind:
        for spares in (0, 1, 2, 4, 8, 16, 32):
            other = ways(LAYOUT, f"checkpoint={kind}", f"spares={spares}", "recovery=restart")[Recovery.RESTART]
            assert other.tokens_kept_per_device_hour <= best.tokens_kept_per_device_hour


def test_a_choice_says_what_it_keeps() -> None:
    choice = ways(LAYOUT, "tokens=1e12", "spares=4")[Recovery.RESTART]
    document = choice.document()
    assert document["devices"] == (2048 + 4) * 8
    assert document["interval_seconds"] == pytest.approx(document["interval_steps"] * 10.0)
    assert document["hours"] * 3600 * choice.tokens_kept_per_second == pytest.approx(1e12)
    assert document["effective"] == pytest.approx(expected(choice.run).effective, rel=0.01)
    quantiles = document["hours_quantiles"]
    assert quantiles["0.05"] < quantiles["0.5"] < quantiles["0.95"]


def test_terms_are_read_by_their_types() -> None:
    terms = parse_terms(["spares=0,2", "recovery=restart,drop", "tokens=1e12", "failures=rsc2", "restart_seconds=60"])
    assert terms == GoodputTerms(
        spares=(0, 2), recovery=(Recovery.RESTART, Recovery.DROP), tokens=1e12, failures="rsc2", restart_seconds=60.0
    )
    assert terms_of({"spares": [0, 2], "tokens": 1e12}) == GoodputTerms(spares=(0, 2), tokens=1e12)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("spare=1", "goodput: 'spare' is not known; use one of failures, "),
        ("spares", "spares: has no value; write spares=VALUE"),
        ("spares=1.5", "spares: '1.5' is not known; use a number"),
        ("spares=-1", "spares: -1 is out of range; give 0 or more"),
        ("write_bandwidth=0", "write_bandwidth: 0 is out of range; give more than 0"),
        ("in_place_share=2", "in_place_share: 2 is out of range; give 0 to 1"),
        ("tokens=nan", "tokens: nan is out of range; give 0 or more"),
        ("recovery=retry", "recovery: 'retry' is not known; use restart, migrate, drop, replan"),
    ],
)
def test_a_faulty_term_is_refused_in_one_line(setting: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_terms([setting])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_service_reads_no_logs() -> None:
    with pytest.raises(RequestError, match=r"failures: 'log\.csv' is not known; use one of llama3"):
        terms_of({"failures": "log.csv"})
