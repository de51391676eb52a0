"""The answer of a job: the baseline competes, unlucky trials get another chance, and probabilities mean what they say."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import table
from played import run

from autotune.loop.confirmation import next_round
from autotune.loop.loop import run_job
from autotune.objective.intervals import Spread
from autotune.objective.posterior import Observation, posterior_of
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.outcome.standings import NOT_MEASURED, standings_of
from autotune.outcome.verdict import JobVerdict, answer_document, decide
from autotune.request.rows import request_to_row
from autotune.session.session import Session
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from storage.store import Store
from tests.sampling import sampled

Rates = dict[tuple[int, int], tuple[float, float]]
"""(stage, micro-batch) -> samples/s in the search, and in every repeat."""
OTHERS = (60.0, 60.0)


class Scripted(ReplayRunner):
    """A configuration's first measurement is the search's; all later ones are repeats. Repeats differ by 1 %."""

    def __init__(self, rates: Rates, baseline: TrialConfig) -> None:
        super().__init__(self._measure)
        self._rates, self._baseline = rates, baseline.hash
        self.seen: dict[str, int] = {}

    def _measure(self, config: TrialConfig) -> TrialResult:
        count = self.seen.get(config.hash, 0)
        self.seen[config.hash] = count + 1
        plain = config.activation_checkpointing == "none"
        first, again = self._rates.get((config.zero_stage, config.micro_batch_size), OTHERS) if plain else OTHERS
        return table.ok(first if count == 0 else again * (1.01 if count % 2 else 0.99))


def play(folder: Path, store: Store, rates: Rates, **changes: Any) -> tuple[Session, JobSnapshot, JobVerdict]:
    session = table.session(folder, trials=24, **changes)
    snapshot = run(session, store, Scripted(rates, session.baselines[0]))
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    assert verdict is not None
    return session, snapshot, verdict


def confirmations(snapshot: JobSnapshot) -> list[TrialRecord]:
    return [trial for trial in snapshot.trials if trial.purpose is Purpose.CONFIRM]


@pytest.mark.prove
def test_what_was_lucky_in_the_search_does_not_replace_a_better_baseline(tmp_path: Path, store: Store) -> None:
    rates = {(0, 1): (100.0, 104.0), (1, 2): (118.0, 94.0), (2, 4): (116.0, 93.0)}
    session, snapshot, verdict = play(tmp_path, store, rates)
    document = build_best_config(session, snapshot)
    assert verdict.keeps and verdict.best.config == session.baselines[0]
    assert (verdict.gain and verdict.gain.mean) == 1.0
    assert document["decision"]["keeps_baseline"] and document["best"]["config"] == document["baseline"]["config"]
    assert verdict.runner_up_ratio is not None and verdict.runner_up_ratio.high < 1.05
    assert document["decision"] == answer_document(verdict)
    row = store.jobs.get(snapshot.job.id).answer
    assert row == {name: value for name, value in document["decision"].items() if name != "standings"}


class Resuming(Scripted):
    """A script: once the fastest configuration has run, every later trial ends at once, as after its last epoch."""

    def _measure(self, config: TrialConfig) -> TrialResult:
        if TrialConfig(zero_stage=1, micro_batch_size=2).hash in self.seen:
            return TrialResult(attempt="", outcome=Outcome.FAILED, message="no measurement", cause=NOT_MEASURED)
        return super()._measure(config)


@pytest.mark.prove
def test_a_trial_that_ended_without_a_measurement_leaves_no_probability(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=24)
    snapshot = run(session, store, Resuming({(0, 1): (100.0, 100.0), (1, 2): (900.0, 900.0)}, session.baselines[0]))
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    assert verdict is not None and verdict.keeps
    assert verdict.probability_best is None
    decision = answer_document(verdict)
    fastest = snapshot.search_trial(TrialConfig(zero_stage=1, micro_batch_size=2))
    assert fastest is not None
    (measured,) = (row for row in decision["unresolved"] if row["trial"] == fastest.number)
    assert measured["rate"]["mean"] == pytest.approx(900.0)
    assert verdict.best.number not in {row["trial"] for row in decision["unresolved"]}
    ended = [trial.number for trial in snapshot.searched if trial.outcome is Outcome.FAILED]
    assert {row["trial"] for row in decision["unresolved"] if row["rate"] is None} == {*ended}


@pytest.mark.prove
def test_what_was_unlucky_in_the_search_gets_another_chance(tmp_path: Path, store: Store) -> None:
    """Two lucky ones stand above it, and fall back when they are measured again."""
    rates = {(0, 1): (80.0, 80.0), (1, 2): (112.0, 101.0), (2, 2): (111.0, 100.0), (1, 4): (108.0, 125.0)}
    _, snapshot, verdict = play(tmp_path, store, rates)
    assert (verdict.best.config.zero_stage, verdict.best.config.micro_batch_size) == (1, 4)
    assert not verdict.keeps and verdict.gain is not None and verdict.gain.low > 1.3
    assert len(confirmations(snapshot)) <= 9


@pytest.mark.prove
def test_a_gain_that_is_not_sure_keeps_the_baseline(tmp_path: Path, store: Store) -> None:
    _, _, verdict = play(tmp_path, store, {(0, 1): (100.0, 100.0), (1, 2): (101.0, 100.3)}, confirm_repeats=1)
    assert verdict.keeps and verdict.tie
    assert verdict.runner_up_ratio is not None and verdict.runner_up_ratio.low < 1.0 < verdict.runner_up_ratio.high


@pytest.mark.prove
def test_repeats_end_when_the_answer_is_separated(tmp_path: Path, store: Store) -> None:
    _, snapshot, verdict = play(tmp_path, store, {(0, 1): (100.0, 100.0), (1, 2): (300.0, 300.0)})
    assert verdict.probability_best > 0.99 and verdict.expected_loss < 0.001
    assert len(confirmations(snapshot)) < 9


@pytest.mark.nightly
def test_never_more_repeats_than_three_times_the_rounds(tmp_path: Path, store: Store) -> None:
    alike = {(stage, size): (100.0, 100.0) for stage in range(4) for size in (1, 2, 4)}
    for rounds in (0, 1, 2):
        _, snapshot, verdict = play(tmp_path, store, alike, confirm_repeats=rounds)
        assert len(confirmations(snapshot)) <= 3 * rounds
        assert verdict.keeps


def test_a_baseline_beyond_the_headroom_still_competes(tmp_path: Path, store: Store) -> None:
    """It is what the user has, and it runs."""

    def answer(config: TrialConfig) -> TrialResult:
        own = config == session.baselines[0]
        return table.ok(100.0 if own else 90.0, 9_900_000 if own else 5_000_000)

    session = table.session(tmp_path, trials=6, memory_limit=10_000_000)
    snapshot = run(session, store, table.runner(answer))
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    assert verdict is not None and verdict.keeps


class KilledAt(Scripted):
    """The process ends when the trial of that number is to start."""

    def __init__(self, rates: Rates, baseline: TrialConfig, number: int) -> None:
        super().__init__(rates, baseline)
        self._left = number

    def submit(self, request: TrialRequest) -> str:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return super().submit(request)


@pytest.mark.prove
@pytest.mark.parametrize("killed_at", sampled([26, 25, 28], every=3))
def test_a_round_goes_on_in_another_process(tmp_path: Path, store: Store, killed_at: int) -> None:
    rates = {(0, 1): (100.0, 100.0), (1, 2): (104.0, 103.0), (2, 2): (103.5, 103.5), (1, 4): (103.0, 104.0)}
    session = table.session(tmp_path, trials=24)
    whole = run(session, store, Scripted(rates, session.baselines[0]))
    job = store.jobs.create(request_to_row(session.request))
    runner = KilledAt(rates, session.baselines[0], killed_at)
    with pytest.raises(KeyboardInterrupt):
        run_job(session, store, job.id, runner)
    runner._left = 1000
    assert run_job(session, store, job.id, runner).state is JobState.SUCCEEDED
    again = read_snapshot(store, job.id)
    made = [[(trial.config_hash, trial.repeat) for trial in confirmations(snapshot)] for snapshot in (whole, again)]
    assert made[0] == made[1]
    assert next_round(session, again) == []


def observed(rates: list[list[float]], block: Callable[[int], int] = lambda number: 0) -> list[Observation]:
    return [
        Observation(candidate=place, rate=rate, within=0.0, block=block(number))
        for place, repeats in enumerate(rates)
        for number, rate in enumerate(repeats)
    ]


def test_the_same_measurements_give_the_same_draws() -> None:
    seen = observed([[100.0, 101.0], [110.0], [90.0]])
    first, second = (posterior_of(seen, 3, Spread(), 0) for _ in range(2))
    assert (first.draws == second.draws).all()
    assert sum(first.probability_best(place) for place in range(3)) == pytest.approx(1.0)


def test_drift_between_rounds_does_not_blur_what_is_compared_inside_of_them() -> None:
    """Two configurations, 5 % apart in each of four rounds; the machine's speed differs by up to 60 % between rounds."""
    speeds = [1.0, 0.6, 1.3, 0.8]
    rates = [[100.0 * speed for speed in speeds], [105.0 * speed for speed in speeds]]
    found = posterior_of(observed(rates, lambda number: number + 1), 2, Spread())
    assert found.ratio(1, 0).mean == pytest.approx(1.05, abs=0.015)
    assert found.probability_best(1) > 0.9


@pytest.mark.prove
def test_what_lies_between_blocks_of_any_speed_says_nothing_of_the_noise() -> None:
    """300 cases of three configurations in two rounds, on a machine that drifts and is far noisier than assumed."""
    draw = random.Random(3)
    held = 0
    for _ in range(300):
        truth, speeds = [[draw.gauss(0.0, spread) for _ in range(count)] for spread, count in ((0.1, 3), (0.4, 2))]
        rates = [[100.0 * math.exp(rate + speed + draw.gauss(0.0, 0.1)) for speed in speeds] for rate in truth]
        found = posterior_of(observed(rates, lambda number: number + 1), 3, Spread(relative=0.04), drifted=True).ratio(1, 0)
        held += found.low <= math.exp(truth[1] - truth[0]) <= found.high
    assert held > 0.75 * 300  # the speeds of rounds taken as noise: 64 %


def test_the_first_of_many_equals_was_lucky() -> None:
    draw = random.Random(1)
    rates = [[100.0 * math.exp(draw.gauss(0.0, 0.05))] for _ in range(30)]
    first = max(range(30), key=lambda place: rates[place][0])
    found = posterior_of(observed(rates), 30, Spread(relative=0.05))
    assert found.rate(first).mean < rates[first][0] * 0.97
    assert found.probability_best(first) < 0.5


@pytest.mark.prove
def test_probabilities_mean_what_they_say() -> None:
    """600 cases of six configurations, three measurements each. In a third of them the baseline is the best."""
    draw = random.Random(7)
    stated, true = [], []
    for _ in range(600):
        truth = [draw.gauss(0.0, 0.06) for _ in range(6)]
        best = truth.index(max(truth))
        wanted = 0 if draw.random() < 1 / 3 else draw.randrange(1, 6)
        truth[best], truth[wanted] = truth[wanted], truth[best]
        rates = [[100.0 * math.exp(rate + draw.gauss(0.0, 0.04)) for _ in range(3)] for rate in truth]
        found = posterior_of(observed(rates), 6, Spread(), 0)
        best = int(found.means().argmax())
        stated.append(found.probability_best(best))
        true.append(truth[best] == max(truth))
    assert sum(stated) / len(stated) == pytest.approx(sum(true) / len(true), abs=0.1)


def test_standings_name_every_contender_once(tmp_path: Path, store: Store) -> None:
    session, snapshot, verdict = play(tmp_path, store, {(0, 1): (100.0, 100.0), (1, 2): (120.0, 120.0)})
    standings = standings_of(snapshot, session.ranking, session.prior, session.baselines)
    assert standings is not None
    hashes = [trial.config_hash for trial in standings.contenders]
    assert len(hashes) == len(set(hashes)) == len(answer_document(verdict)["standings"])
    assert answer_document(verdict)["standings"][0]["trial"] == verdict.best.number
