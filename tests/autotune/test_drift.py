"""A machine that changes its speed while a job runs: it is noticed, and does not decide who wins."""

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import table
from played import run, searched

from autotune.explain.explain import explain
from autotune.loop.listener import LoopListener
from autotune.loop.loop import run_job
from autotune.objective.intervals import CPU_SPREAD, Repeat, Spread
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.outcome.standings import Reading, drift_in, standings_of
from autotune.outcome.verdict import decide
from autotune.request.rows import request_to_row
from autotune.session.resolve import GPU_SPREAD
from autotune.session.session import Session
from autotune.strategies.strategy import known_hashes
from autotune.strategies.walks import GridStrategy
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from storage.store import Store
from tests.sampling import sampled

CHANGES_AT = 15
"""The trial that is the first on the other machine."""


class Drifting(ReplayRunner):
    """Every trial from `since` on has `speed` times its rate; trials that cannot reach the best end early, as on ranks."""

    def __init__(self, speed: float, since: int = CHANGES_AT, answer: Any = table.measured) -> None:
        super().__init__(answer)
        self.speed, self.since, self.made = speed, since, 0

    def _answer(self, request: TrialRequest) -> TrialResult:
        result = super()._answer(request)
        self.made += 1
        if result.samples_per_second is None or self.made <= self.since:
            return result
        rate = result.samples_per_second.mean * self.speed
        slowed = table.ok(rate, result.peak_memory_bytes or 0, attempt=request.attempt)
        if request.rate_to_beat is None or rate * 1.1 >= request.rate_to_beat:
            return slowed
        assert slowed.samples_per_second is not None
        bound = dataclasses.replace(slowed.samples_per_second, high=rate * 1.1)
        return dataclasses.replace(slowed, outcome=Outcome.PRUNED, samples_per_second=bound)


def session_of(folder: Path, **changes: Any) -> Session:
    best_at = changes.pop("best_at", None)
    session = table.session(folder, **{"trials": 24, "strategy": "grid", "confirm_repeats": 1, "racing": False, **changes})
    return session if best_at is None else dataclasses.replace(session, strategy=InTurn(best_at))


def winner(session: Session, snapshot: JobSnapshot) -> TrialRecord:
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    assert verdict is not None
    return verdict.best


def true_rate(trial: TrialRecord) -> float:
    """On a machine that stays as it is."""
    return measured_rate(trial.config)


def measured_rate(config: TrialConfig) -> float:
    measured = table.measured(config).samples_per_second
    assert measured is not None
    return measured.mean


def is_right(session: Session, snapshot: JobSnapshot) -> bool:
    """Whether the configuration won that is the fastest on a machine that stays as it is."""
    return true_rate(winner(session, snapshot)) == max(map(true_rate, searched(snapshot)))


def told(store: Store, snapshot: JobSnapshot) -> list[str]:
    return [str(event.payload["message"]) for event in store.events.of(snapshot.job.id) if event.kind == "drift_found"]


class InTurn(GridStrategy):
    """The order of the space, but for the best, which comes at a place of its own: no order that hashes decide."""

    def __init__(self, best_at: int) -> None:
        super().__init__()
        self._best_at = best_at

    def propose(self, candidates: Any, history: Any, pending: Any, count: int, seed: int) -> list[TrialConfig]:
        order = list(candidates.enumerate())
        best = max(order, key=measured_rate)
        order.remove(best)
        order.insert(self._best_at, best)
        known = known_hashes(history, pending)
        return [config for config in order if config.hash not in known][:count]


SLOWER = {"best_at": 20, "speed": 0.65}
"""The best is measured after the change, and looks worse than what was measured before."""
FASTER = {"best_at": 4, "speed": 1.6}
"""The best is measured before the change, and what was measured after it looks better."""


@pytest.mark.prove
@pytest.mark.parametrize("racing", [False, True])
@pytest.mark.parametrize("rounds", sampled([3, 0, 1], every=3))
@pytest.mark.parametrize("case", [SLOWER, FASTER], ids=["slower", "faster"])
def test_the_right_one_wins_although_the_machine_changed(
    tmp_path: Path, store: Store, case: dict[str, Any], rounds: int, racing: bool
) -> None:
    changes = {"best_at": case["best_at"], "confirm_repeats": rounds, "racing": racing}
    session = session_of(tmp_path, **changes)
    snapshot = run(session, store, Drifting(case["speed"]))
    assert is_right(session, snapshot)
    [message] = told(store, snapshot)
    assert message.startswith(f"the machine became {abs(case['speed'] - 1) * 100:.0f} % ")
    best = winner(session, snapshot)
    assert (best.number > CHANGES_AT) is (case is SLOWER)
    assert best.outcome is Outcome.OK
    # What was measured on another machine won by a measurement beside the baseline alone.
    document = build_best_config(session, snapshot)["best"]["measured"]
    if best.number > CHANGES_AT:
        stated = document["samples_per_second"]
        assert stated["low"] <= true_rate(best) * case["speed"] <= stated["high"]
        assert stated["mean"] == pytest.approx(true_rate(best) * case["speed"], rel=0.05)  # one measurement, and 4 % assumed
    assert snapshot.spent == 24


@pytest.mark.prove
@pytest.mark.parametrize("rounds", sampled([0, 1, 3], every=3))
@pytest.mark.parametrize("case", [SLOWER, FASTER], ids=["slower", "faster"])
def test_without_controls_the_change_decides(tmp_path: Path, store: Store, case: dict[str, Any], rounds: int) -> None:
    session = session_of(tmp_path, control_every=0, best_at=case["best_at"], confirm_repeats=rounds)
    assert not is_right(session, run(session, store, Drifting(case["speed"])))


@pytest.mark.prove
def test_the_baseline_is_measured_again_after_every_ten_trials_and_at_the_end(tmp_path: Path, store: Store) -> None:
    session = session_of(tmp_path, confirm_repeats=0)
    snapshot = run(session, store, table.runner())
    controls = [trial for trial in snapshot.trials if trial.purpose is Purpose.CONTROL]
    assert [trial.number for trial in controls] == [10, 21, 26]
    assert [trial.repeat for trial in controls] == [1, 2, 3]
    assert {trial.config for trial in controls} == {snapshot.trials[0].config}
    assert not any(trial.counted for trial in controls)
    confirmed = run(session_of(tmp_path), store, table.runner())
    assert [trial.number for trial in confirmed.trials if trial.purpose is Purpose.CONTROL] == [10, 21]
    assert [trial.purpose for trial in confirmed.trials[-3:]] == [Purpose.CONFIRM] * 3


@pytest.mark.prove
@pytest.mark.parametrize("changes", [{"trials": 9}, {"control_every": 0}, {"objective": "memory"}])
def test_there_are_none_in_short_jobs_and_where_nobody_wants_them(
    tmp_path: Path, store: Store, changes: dict[str, Any]
) -> None:
    snapshot = run(session_of(tmp_path, confirm_repeats=0, **changes), store, Drifting(0.65, since=5))
    assert not any(trial.purpose is Purpose.CONTROL for trial in snapshot.trials)
    assert told(store, snapshot) == []


@pytest.mark.prove
def test_controls_do_not_race_and_count_as_repeats_of_the_baseline(tmp_path: Path, store: Store) -> None:
    class Asked(Drifting):
        def submit(self, request: TrialRequest) -> str:
            asked.append(request)
            return super().submit(request)

    asked: list[TrialRequest] = []
    session = session_of(tmp_path, confirm_repeats=0, racing=True)
    snapshot = run(session, store, Asked(1.0))
    controls = [asked[trial.number] for trial in snapshot.trials if trial.purpose is Purpose.CONTROL]
    assert len(controls) == 3
    assert all(request.rate_to_beat is None for request in controls)
    standings = standings_of(snapshot, session.ranking, session.prior, session.baselines)
    assert standings is not None
    assert standings.repeats_of(snapshot.trials[0]) == 4


@pytest.mark.prove
def test_a_machine_that_stays_is_told_of_by_nobody(tmp_path: Path, store: Store) -> None:
    session = session_of(tmp_path)
    snapshot = run(session, store, table.runner())
    assert told(store, snapshot) == []
    assert winner(session, snapshot).number == max(searched(snapshot), key=true_rate).number


class Dies(LoopListener):
    """As a killed process: after so many trials."""

    def __init__(self, trials: int) -> None:
        self._left = trials

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


@pytest.mark.prove
@pytest.mark.parametrize("trials", sampled([10, 11, 21, 22, 26, 28], every=6))
def test_a_process_that_takes_over_finds_the_same_and_tells_it_once(tmp_path: Path, store: Store, trials: int) -> None:
    def machine() -> Drifting:
        return Drifting(0.65, since=max(CHANGES_AT - trials, 0))

    session = session_of(tmp_path)
    job = store.jobs.create(request_to_row(session.request)).id
    with pytest.raises(KeyboardInterrupt):
        run_job(session, store, job, Drifting(0.65), listener=Dies(trials))
    run_job(session, store, job, machine())
    snapshot, unbroken = read_snapshot(store, job), run(session, store, Drifting(0.65))
    assert [(t.config, t.purpose, t.repeat) for t in snapshot.trials] == [
        (t.config, t.purpose, t.repeat) for t in unbroken.trials
    ]
    assert len(told(store, snapshot)) == 1
    assert told(store, snapshot) == told(store, unbroken)
    assert snapshot.job.state is JobState.SUCCEEDED


@pytest.mark.prove
def test_the_explanation_says_what_happened(tmp_path: Path, store: Store) -> None:
    session = session_of(tmp_path)
    snapshot = run(session, store, Drifting(0.65))
    [note] = [note for note in explain(store, snapshot.job.id).notes if "machine" in note]
    assert note.startswith("the machine became 35 % slower between trial 10 and trial 21")
    assert note.endswith("measured again beside it, and no other trial could win")


@pytest.mark.prove
def test_where_trials_run_side_by_side_the_baseline_that_ran_alone_is_no_measure(tmp_path: Path, store: Store) -> None:
    """Beside others everything takes half as long again, from the second trial on."""

    class Crowded(Drifting):
        def __init__(self) -> None:
            super().__init__(0.65, since=1)
            self._slots, self._seconds = 3, 0.02

    session = session_of(tmp_path, confirm_repeats=0)
    snapshot = run(session, store, Crowded())
    assert any(trial.purpose is Purpose.CONTROL for trial in snapshot.trials)
    assert told(store, snapshot) == []


def readings(rng: random.Random, count: int, spread: float) -> list[Reading]:
    found = []
    for number in range(count):
        rate = 100.0 * math.exp(rng.gauss(0.0, math.hypot(spread, 0.01)))
        found.append(Reading(number=10 * number, repeat=Repeat(rate=rate, within=0.01)))
    return found


@pytest.mark.prove
@pytest.mark.parametrize(("spread", "bound"), [(1.0, 4), (1.5, 20)])
def test_noise_is_seldom_taken_for_drift(spread: float, bound: int) -> None:
    """200 jobs of 60 trials: seven readings and three of the rounds. Machines as noisy as expected, and half as noisy again."""
    rng = random.Random(8)
    for prior in (CPU_SPREAD, GPU_SPREAD):
        alarms = [drift_in(readings(rng, 10, spread * prior), Spread(relative=prior)).found for _ in range(200)]
        assert sum(alarms) <= bound


def test_a_step_and_the_way_back_are_two_levels_and_what_lies_between_is_touched() -> None:
    rates = [(0, 100.0), (10, 101.0), (20, 60.0), (30, 61.0), (40, 100.0)]
    found = drift_in([Reading(number=n, repeat=Repeat(rate=r, within=0.001)) for n, r in rates], Spread(relative=0.01))
    assert [(level.first, level.last) for level in found.levels] == [(0, 10), (20, 30), (40, 40)]
    assert [number for number in range(45) if not found.touches(number)] == [*range(11)]
    assert [round(found.least_speed(number), 2) for number in (5, 15, 25, 35, 42)] == [1.0, 0.6, 0.6, 0.6, 1.0]
    assert found.cuts() == [11, 20, 31, 40]


@pytest.mark.prove
def test_a_round_keeps_its_members_when_its_own_baseline_shows_the_drift(tmp_path: Path, store: Store) -> None:
    session = session_of(tmp_path, trials=14, strategy="random", confirm_repeats=3, racing=True)
    snapshot = run(session, store, Drifting(20.0, since=3))
    rounds = [trial.repeat for trial in snapshot.trials if trial.purpose is Purpose.CONFIRM]
    assert rounds and max(rounds.count(number) for number in rounds) <= 3
