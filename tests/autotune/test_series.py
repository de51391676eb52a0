"""Series of jobs on a table of measurements: cheapest size, fewest ranks, longest samples; what is skipped and refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import table

import autotune
from autotune import tuning
from autotune.errors import RequestError
from autotune.request.rows import request_from_fields
from autotune.series import SeriesRequest, SeriesResult
from autotune.series_run import Bracket, run_series, scaled
from autotune.session.session import Session
from autotune.tuning import TuneResult, run_new_job
from search_spaces.outcome import JobState, Outcome
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import open_store
from tests.sampling import sampled

RATES = {1: 40.0, 2: 100.0, 4: 130.0}
"""Samples/s of the best configuration by ranks: costs a rank-hour 1/40, 1/50, 1/32.5."""


def answer(session: Session) -> Callable[[TrialConfig], TrialResult]:
    return lambda config: table.ok(RATES[session.world_size] - config.zero_stage)


@pytest.fixture(autouse=True)
def table_instead_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "make_runner", lambda session: table.runner(answer(session)))


class Told:
    """A forecast of fixed rates."""

    def __init__(self, rates: dict[int, Interval | None] | None = None, longest: int | None = None) -> None:
        self._rates, self._longest = rates or {}, longest

    def rate(self, session: Session) -> Interval | None:
        return self._rates.get(session.world_size)

    def longest(self, session: Session) -> int | None:
        return self._longest


def fields(folder: Path, **changes: Any) -> dict[str, Any]:
    model = table.request(folder).model
    return {"model": model, "trials": 2, "strategy": "grid", "sequence_length": 64, "confirm_repeats": 0} | changes


def run(folder: Path, forecast: Told, sweep: Callable[[Session], TuneResult] | None = None, **series: Any) -> SeriesResult:
    given = series.pop("fields", {})
    asked = SeriesRequest(fields=fields(folder, **given), **series)
    return run_series(asked, sweep or (lambda session: run_new_job(session, str(folder / "db"))), forecast)


def test_devices_ends_at_the_first_size_that_reaches_the_rate(tmp_path: Path) -> None:
    found = run(tmp_path, Told(), objective="devices", rate=60.0, ranks=(4, 1, 2))
    assert [entry.ranks for entry in found.entries] == [1, 2]
    assert found.answer is not None
    assert found.answer.ranks == 2
    assert found.answer.samples_per_second is not None
    assert found.answer.samples_per_second.low >= 60.0
    assert "2 ranks reach 60 samples/s: 100.4 [" in found.message
    assert (found.best_config or {})["job"]["request"]["ranks"] == 2


def test_a_rate_is_reached_only_with_its_interval(tmp_path: Path) -> None:
    found = run(tmp_path, Told(), objective="devices", rate=99.9, ranks=(1, 2))
    assert found.answer is None
    assert "no size reaches 99.9 samples/s: the most is 100.4 [" in found.message
    assert "raise --confirm-repeats" in found.message


def test_a_rate_that_nobody_reaches_is_told_with_the_best_and_a_remedy(tmp_path: Path) -> None:
    found = run(tmp_path, Told(), objective="devices", rate=1e6, ranks=(1, 2))
    assert (found.answer, found.best_config, len(found.entries)) == (None, None, 2)
    assert "the most is 100.4 [" in found.message
    assert "on 2 ranks; add ranks" in found.message


@pytest.mark.prove
def test_cost_is_per_million_tokens_and_its_edges_are_those_of_the_rate_turned(tmp_path: Path) -> None:
    found = run(tmp_path, Told(), objective="cost", price=3.0, ranks=(1, 2, 4))
    assert [entry.ranks for entry in found.entries] == [1, 2, 4]
    assert found.answer is not None
    assert found.answer.ranks == 2
    cost, rate = found.answer.cost, found.answer.samples_per_second
    assert cost is not None
    assert rate is not None
    assert cost.mean == pytest.approx(3.0 * 2 / 3600 / (rate.mean * 64) * 1e6)
    # The baseline of equals is a little more likely the best of them, so that its rate is above the 100 of all measurements.
    assert rate.mean == pytest.approx(100.35, rel=1e-3)
    assert cost.low == pytest.approx(3.0 * 2 / 3600 / (rate.high * 64) * 1e6)
    assert cost.low <= cost.mean <= cost.high


def test_a_size_whose_predicted_band_cannot_win_is_skipped_and_told(tmp_path: Path) -> None:
    hopeless, vague = Interval(mean=41.0, low=40.0, high=42.0), Interval(mean=80.0, low=40.0, high=160.0)
    rates = {1: vague, 2: Interval(mean=100.0, low=90.0, high=110.0), 4: hopeless}
    found = run(tmp_path, Told(rates), objective="cost", price=3.0, ranks=(1, 2, 4))
    assert {entry.ranks: entry.job_id is not None for entry in found.entries} == {1: True, 2: True, 4: False}
    assert found.entries[0].ranks == 1  # whose predicted cost is the least: 1/80 of a rank-hour
    told = next(entry.message for entry in found.entries if entry.ranks == 4)
    assert told.startswith("skipped: predicted to cost at least ")
    assert "of 2 ranks" in told


def test_a_size_at_which_the_states_cannot_fit_is_skipped(tmp_path: Path) -> None:
    limit = table.session(tmp_path).model.parameter_count * 9
    found = run(tmp_path, Told(), objective="cost", price=1.0, ranks=(1, 2), fields={"memory_limit": limit})
    assert [(entry.ranks, entry.job_id is None) for entry in found.entries] == [(1, True), (2, False)]
    assert "skipped: memory_limit: every configuration" in found.entries[0].message


@pytest.mark.prove
def test_scale_tells_efficiency_and_where_more_ranks_are_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RATES, 4, 60.0)
    found = run(tmp_path, Told(), objective="scale", ranks=(4, 1, 2))
    assert [entry.ranks for entry in found.entries] == [1, 2, 4]
    assert found.answer is not None
    assert found.answer.ranks == 2
    shares = [entry.efficiency for entry in found.entries]
    assert [share and round(share.mean, 3) for share in shares] == [1.0, 1.25, 0.375]
    rates = [entry.samples_per_second for entry in found.entries]
    assert rates[0] is not None
    assert rates[2] is not None
    assert shares[2] is not None
    assert shares[2].low == pytest.approx(rates[2].low / rates[0].high / 4)
    assert found.message == (
        "most samples/s on 2 ranks: 100.4, 2.50 times as many as 1 rank; "
        "warning: 4 ranks are slower than 2 (60.21 against 100.4 samples/s); use 2"
    )


def test_scale_compares_the_same_ranks_on_more_nodes(tmp_path: Path) -> None:
    asked = SeriesRequest(objective="scale", fields=fields(tmp_path), ranks=(2,))
    one = asked.session(ranks=2)
    two = dataclasses.replace(one, cluster=dataclasses.replace(one.cluster, nodes=2, devices_per_node=1))

    def sweep(session: Session) -> TuneResult:
        rate = 100.0 / session.cluster.nodes
        return run_new_job(session, str(tmp_path / "db"), runner_of=lambda _: table.runner(lambda _: table.ok(rate)))

    found = scaled(asked, (one, two), sweep)
    assert [(entry.ranks, entry.nodes) for entry in found.entries] == [(2, 1), (2, 2)]
    assert [entry.document()["nodes"] for entry in found.entries] == [1, 2]
    assert found.message == (
        "most samples/s on 2 ranks: 100.4; warning: 2 ranks on 2 nodes are slower than 2 (50.18 against 100.4 samples/s); use 2"
    )


@pytest.mark.prove
@pytest.mark.parametrize(("begin", "end"), sampled([(128, 384), (None, 384), (4096, 384), (384, 384)], every=4))
def test_the_longest_sequence_is_found_from_wherever_predictions_begin(tmp_path: Path, begin: int | None, end: int) -> None:
    lengths, trials = list[int](), list[int]()

    def sweep(session: Session) -> TuneResult:
        tokens = session.request.sequence_length
        lengths.append(tokens)

        def runs(config: TrialConfig) -> TrialResult:
            trials.append(tokens)
            return table.ok(50.0, tokens * 1000) if tokens < 500 else table.ended(Outcome.INFEASIBLE, "out of memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "make_runner", lambda _: table.runner(runs))
            return run_new_job(session, str(tmp_path / "db"))

    given = {"memory_limit": 2_000_000_000, "pins": {"micro_batch_size": 1}}
    found = run(tmp_path, Told(longest=begin), sweep, objective="sequence", fields=given)
    assert found.answer is not None
    assert found.answer.sequence_length == end
    assert "384 tokens run, and no tried configuration runs 512 (step 128)" in found.message
    assert len(lengths) == len(set(lengths))
    assert trials.count(384) == 1  # ended by the first that runs


def test_not_even_the_first_step_is_told(tmp_path: Path) -> None:
    def sweep(session: Session) -> TuneResult:
        return TuneResult(
            job_id="1", state=JobState.SUCCEEDED, reason="NOTHING_FEASIBLE", message="", best=None, best_config=None, gain=None
        )

    found = run(tmp_path, Told(), sweep, objective="sequence", fields={"memory_limit": 2_000_000_000}, step=64)
    assert (found.answer, len(found.entries)) == (None, 1)
    assert "not even 64 tokens run; raise the memory limit" in found.message


@pytest.mark.parametrize("longest", range(65))
def test_a_bracket_ends_at_the_longest_from_any_start(longest: int) -> None:
    for begin in (1, 7, 33, 64):
        bracket, steps, tried = Bracket(most=64), begin, 0
        while steps is not None:
            bracket, tried = bracket.after(steps, ran=steps <= longest), tried + 1
            steps = bracket.next
        assert bracket.runs == longest
        assert tried <= 13


def test_a_stopped_job_ends_the_series(tmp_path: Path) -> None:
    def sweep(session: Session) -> TuneResult:
        return TuneResult(
            job_id="7", state=JobState.PAUSED, reason="interrupted", message="", best=None, best_config=None, gain=None
        )

    for series in ({"objective": "cost", "price": 1.0}, {"objective": "devices", "rate": 1.0}):
        found = run(tmp_path, Told(), sweep, ranks=(1, 2), **series)
        assert (found.interrupted, found.answer, len(found.entries)) == (True, None, 1)
        assert "stopped in job 7" in found.message


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no price": ({"objective": "cost", "ranks": (1, 2)}, "price: is missing for the objective cost; give what a device costs"),
    "no rate": ({"objective": "devices", "ranks": (1, 2)}, "rate: is missing for the objective devices; give the samples/s"),
    "free": ({"objective": "cost", "price": 0.0, "ranks": (1,)}, "price: 0.0 is not positive"),
    "paid": ({"objective": "cost", "price": -2.5, "ranks": (1,)}, "price: -2.5 is not positive"),
    "endless": ({"objective": "devices", "rate": float("inf"), "ranks": (1,)}, "rate: inf is not positive"),
    "no number": ({"objective": "devices", "rate": float("nan"), "ranks": (1,)}, "rate: nan is not positive"),
    "half a token": ({"objective": "sequence", "step": 0.5}, "step: 0.5 is not positive"),
    "another's": ({"objective": "devices", "rate": 1.0, "price": 1.0, "ranks": (1,)}, "price: belongs to the objective cost"),
    "no sizes": ({"objective": "cost", "price": 1.0}, "ranks: is missing for the objective cost; give the sizes"),
    "twice": ({"objective": "cost", "price": 1.0, "ranks": (2, 2)}, "ranks: 2,2 are not different whole numbers"),
    "none": ({"objective": "cost", "price": 1.0, "ranks": (0, 2)}, "ranks: 0,2 are not different whole numbers"),
    "several": ({"objective": "sequence", "ranks": (1, 2)}, "ranks: has several values for the objective sequence"),
    "no limit": ({"objective": "sequence"}, "memory_limit: is missing for the objective sequence"),
    "unknown": ({"objective": "speed"}, "objective: 'speed' is not a series; use one of cost, devices, sequence, scale"),
    "no batch": (
        {"objective": "cost", "price": 1.0, "ranks": (1, 3), "fields": {"global_batch_size": 8}},
        "global_batch_size: zero has no legal configuration",
    ),
    "for": ({"objective": "sequence", "fields": {"answer_for": "4x2"}}, "answer_for: does not go with the objective sequence"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_any_job(tmp_path: Path, name: str) -> None:
    series, told = BAD[name]
    with pytest.raises(RequestError) as caught:
        run(tmp_path, Told(), **series)
    assert told in str(caught.value)
    assert not (tmp_path / "db").exists()


def test_a_single_job_names_the_way_to_a_series(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="objective: cost is a series of jobs of several sizes, not one job; run it with"):
        request_from_fields(fields(tmp_path, objective="cost"))


@pytest.mark.prove
def test_tune_series_from_python_predicts_and_writes_the_answer(tmp_path: Path) -> None:
    out, database = tmp_path / "best.json", str(tmp_path / "db")
    found = autotune.tune_series(
        **fields(tmp_path), objective="cost", price=2.5, ranks=[1, 2], out=out, database=database
    )  # fmt: skip
    assert found.answer is not None
    assert json.loads(out.read_text()) == found.best_config
    json.dumps(found.document())
    with open_store(database) as store:
        assert len(store.jobs.newest()) == sum(entry.job_id is not None for entry in found.entries)
