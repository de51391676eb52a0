"""What ranks print comes out of the runner while they run, whole where it is little and bounded where it is much."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from runner_contract import ENVIRONMENT, TRIAL_FUNCTION, printed, request_for, results, watch

from executor.runners.local import LocalRunner
from executor.runners.rank_process import HeadAndTail
from search_spaces.outcome import Outcome
from search_spaces.trial import LogLines, TrialResult


@pytest.fixture(scope="module")
def printing(forked_ranks: None) -> Iterator[LocalRunner]:
    with LocalRunner(2, environment=ENVIRONMENT, trial_function=TRIAL_FUNCTION) as runner:
        yield runner


def finished(runner: LocalRunner, what: str) -> list:
    attempt = runner.submit(request_for(what))
    seen = watch(runner, results)
    assert all(event.attempt == attempt for _, event in seen)
    return seen


def test_what_is_printed_belongs_to_the_trial_that_runs(printing: LocalRunner) -> None:
    for _ in range(3):
        assert printed(finished(printing, f"chatter:{Path(__file__)}"), 1).startswith("rank 1 begins")
    assert printed(finished(printing, "measure"), 0) == ""


def test_a_flood_is_bounded_on_its_way_and_what_is_missing_is_counted(printing: LocalRunner) -> None:
    finished(printing, "measure")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = finished(printing, "flood@1")
    assert results(seen)[0].outcome is Outcome.OK
    parts = [event for _, event in seen if isinstance(event, LogLines)]
    text = printed(seen, 1)
    assert text.startswith("line 0 of the flood")
    assert text.endswith("the end of the flood\n")
    assert len(text) + sum(part.left_out for part in parts) == 10_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


def test_the_last_words_of_a_rank_that_dies_are_heard(printing: LocalRunner) -> None:
    seen = finished(printing, "leave@1")
    assert printed(seen, 1) == "leaving without a word\n"
    assert isinstance(seen[-1][1], TrialResult), "the result comes last"


def test_head_and_tail_keep_both_ends() -> None:
    kept: HeadAndTail[str] = HeadAndTail(4, 3)
    for letter in "abcdefghij":
        kept.add(letter, 1)
    assert kept.take() == [*((0, letter) for letter in "abcd"), (3, "h"), (0, "i"), (0, "j")]
    assert kept.take() == []
    kept.add("longer than both", 16)
    kept.add("and another", 11)
    kept.add("x", 1)
    assert kept.take() == [(0, "longer than both"), (11, "x")]
