"""A recipe's run against its earlier runs."""

import dataclasses
import json
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autotune.errors import RequestError
from autotune.outcome.regression import RecipeRun, RunComparison, add_run, compare, compare_in_turn, junit, read_history
from executor.measurement.timeline import PARTS

SHARES = {"compute": 0.6, "communication": 0.2, "data": 0.05, "host": 0.15}


def run_of(draws: random.Random, slow: str = "", by: float = 0.05, noise: float = 0.005) -> RecipeRun:
    """A run of a step of 0.1 s whose runs, and trials, vary by `noise`."""
    whole = 0.1 * (1 + draws.gauss(0, noise))
    seconds = tuple((1 + by * bool(slow)) * whole * (1 + draws.gauss(0, noise)) for _ in range(5))
    parts = tuple(
        {part: share * whole * (1 + draws.gauss(0, 2 * noise)) + 0.1 * by * (part == slow) for part, share in SHARES.items()}
        for _ in range(5)
    )
    return RecipeRun(
        recipe="a", machine="2 x H100", versions={"torch": "2.13.0"}, commit="c0ffee", time="2026-11-30T00:00:00+00:00",
        seconds=seconds, calm_seconds=tuple(0.98 * value for value in seconds), parts=parts,
    )  # fmt: skip


def test_planted_slowdowns_are_found_with_their_part_and_equal_runs_pass() -> None:
    draws = random.Random(0)
    found = alarms = right = 0
    for number in range(400):
        history = [run_of(draws) for _ in range(12)]
        part = PARTS[number % len(PARTS)]
        slow = compare(run_of(draws, part), history, 0.01)
        found += slow.is_regression
        right += slow.is_regression and slow.part == part
        alarms += compare(run_of(draws), history, 0.0).is_regression
    assert found >= 380
    assert right >= 0.9 * found
    assert alarms <= 8  # 1 % of 400, and three standard deviations


def noisy_run(draws: random.Random, slow: str = "") -> RecipeRun:
    """A run on a machine on which the products take another time in each run, by 5 % of the step."""
    run, other = run_of(draws, slow), 0.1 * draws.gauss(0, 0.05)
    return dataclasses.replace(
        run,
        seconds=tuple(seconds + other for seconds in run.seconds),
        calm_seconds=tuple(seconds + other for seconds in run.calm_seconds),
        parts=tuple({**parts, "compute": parts["compute"] + other} for parts in run.parts),
    )


def test_a_part_shows_a_slowdown_that_the_whole_step_hides() -> None:
    draws = random.Random(3)
    alarms = 0
    for number in range(100):
        history = [noisy_run(draws) for _ in range(12)]
        part = ("communication", "data", "host")[number % 3]
        slow = compare(noisy_run(draws, part), history, 0.01)
        assert slow.is_regression
        assert slow.part == part
        if slow.in_part:
            assert f"by its {part}, a step is" in slow.lines()[0]
        alarms += compare(noisy_run(draws), history, 0.01).is_regression
    assert alarms <= 4


PRODUCT = "compute aten::mm [[512, 512], [512, 512]]"
SUM = "communication gloo:all_reduce"


def calling(run: RecipeRun, draws: random.Random, **more: float) -> RecipeRun:
    """The run with what it calls, and by how many calls more; seconds of a call vary by 5 %."""
    calls = {PRODUCT: (60.0, 0.001), SUM: (10.0, 0.002)}
    trials = len(run.seconds)
    for name in more:
        calls[name] = (calls.get(name, (0.0, 0.0))[0] + more[name], calls.get(name, (0.0, 0.0005))[1])
    return dataclasses.replace(run, calls={
        name: ((count,) * trials, seconds * (1 + draws.gauss(0, 0.05))) for name, (count, seconds) in calls.items()
    })  # fmt: skip


@pytest.mark.parametrize("is_in_turn", [False, True])
def test_more_calls_are_found_where_the_time_of_a_step_varies_too_much(is_in_turn: bool) -> None:
    draws = random.Random(8)

    def verdict(now: RecipeRun, usual: list[RecipeRun]) -> RunComparison:
        return compare_in_turn(now, usual[0], "../main", 0.01) if is_in_turn else compare(now, usual, 0.01)

    for name in (PRODUCT, SUM, "compute aten::exp [[512]]"):
        more = {PRODUCT: 5.0, SUM: 2.5}.get(name, 10.0)  # 5 % of a step each
        history = [calling(run_of(draws, noise=0.03), draws) for _ in range(12)]
        found = verdict(calling(run_of(draws, name.split()[0], noise=0.03), draws, **{name: more}), history)
        assert found.is_regression
        assert found.part == name.split()[0]
        assert found.by_calls or not found.in_part
        assert found.by_calls == ("if nothing overlaps them" in found.lines()[1])
        before = 60.0 if name == PRODUCT else 10.0 if name == SUM else 0.0
        assert found.changed_calls == {name: (before, before + more)}
        assert f"calls in a step: {name}: {before:.4g} -> {before + more:.4g}" in found.lines()
    equal = verdict(calling(run_of(draws, noise=0.03), draws), history)
    assert (equal.is_regression, equal.changed_calls) == (False, {})


def test_calls_that_replace_others_at_the_same_cost_are_no_regression_but_named() -> None:
    draws = random.Random(9)
    for _ in range(50):
        history = [calling(run_of(draws, noise=0.03), draws) for _ in range(12)]
        now = calling(run_of(draws, noise=0.03), draws, **{PRODUCT: -30.0, "compute fused": 60.0})
        same = compare(now, history, 0.01)
        assert not same.by_calls
        assert same.changed_calls == {PRODUCT: (60.0, 30.0), "compute fused": (0.0, 60.0)}
        assert f"calls in a step: {PRODUCT}: 60 -> 30" in same.lines()


def test_calls_whose_number_varies_from_run_to_run_are_no_regression() -> None:
    draws = random.Random(10)
    runs = [calling(run_of(draws, noise=0.03), draws, **{PRODUCT: draws.gauss(0.0, 5.0)}) for _ in range(113)]
    for number in range(100):
        assert not compare(runs[number], runs[number + 1 : number + 13], 0.01).in_part


def in_turn(draws: random.Random, slow: str) -> tuple[RecipeRun, RecipeRun]:
    """Trials of two folders beside each other, on a machine whose speed varies by 20 % from pair to pair."""
    speeds = [1 + draws.gauss(0, 0.2) for _ in range(8)]
    runs = []
    for part in (slow, ""):
        trials = [run_of(draws, part) for _ in speeds]
        runs.append(dataclasses.replace(
            trials[0],
            seconds=tuple(speed * run.seconds[0] for speed, run in zip(speeds, trials, strict=True)),
            calm_seconds=tuple(speed * run.calm_seconds[0] for speed, run in zip(speeds, trials, strict=True)),
            parts=tuple(
                {name: speed * value for name, value in run.parts[0].items()} for speed, run in zip(speeds, trials, strict=True)
            ),
        ))  # fmt: skip
    return runs[0], runs[1]


def test_trials_in_turn_show_a_slowdown_on_a_machine_whose_speed_varies() -> None:
    draws = random.Random(6)
    found = alarms = right = 0
    for number in range(400):
        part = PARTS[number % len(PARTS)]
        slow = compare_in_turn(*in_turn(draws, part), "../main", 0.01)
        found += slow.is_regression
        right += slow.is_regression and slow.part == part
        alarms += compare_in_turn(*in_turn(draws, ""), "../main", 0.0).is_regression
    assert found >= 380
    assert right >= 0.9 * found
    assert alarms <= 10
    assert "slower than in ../main (8 pairs of trials in turn)" in slow.lines()[0]


def test_runs_of_another_machine_or_recipe_are_not_compared() -> None:
    draws = random.Random(1)
    others = [dataclasses.replace(run_of(draws), machine="2 x A100") for _ in range(9)]
    others += [dataclasses.replace(run_of(draws), recipe="b") for _ in range(9)]
    result = compare(run_of(draws, "host", by=0.5), others, 0.01)
    assert (result.runs, result.slowdown, result.is_regression) == (0, None, False)
    assert "0 of 4 earlier runs" in result.lines()[0]


def test_a_slowdown_below_the_tolerance_is_none_and_changed_versions_are_named() -> None:
    draws = random.Random(2)
    history = [run_of(draws, noise=1e-5) for _ in range(6)]
    now = dataclasses.replace(run_of(draws, "compute", by=0.008, noise=1e-5), versions={"torch": "2.14.0"})
    assert not compare(now, history, 0.01).is_regression
    assert compare(now, history, 0.01).lines()[1] == "it is within the tolerance of 1.0% (--tolerance)"
    strict = compare(now, history, 0.001)
    assert strict.is_regression
    assert strict.part == "compute"
    assert "changed since the last run: torch 2.13.0 -> 2.14.0" in strict.lines()


def test_without_profiled_steps_the_part_is_unknown() -> None:
    draws = random.Random(3)
    history = [dataclasses.replace(run_of(draws), parts=()) for _ in range(6)]
    result = compare(run_of(draws, "data", by=0.3), history, 0.01)
    assert result.is_regression
    assert result.part is None
    assert result.lines()[1] == "part: unknown, since no step of these runs was profiled"


def test_the_history_is_a_file_of_lines_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert read_history(path) == []
    runs = [run_of(random.Random(4)) for _ in range(2)]
    for run in runs:
        add_run(path, run)
    assert read_history(path) == runs
    path.write_text(path.read_text(encoding="utf-8") + json.dumps({"recipe": "a"}) + "\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"line 3 of .* is no run"):
        read_history(path)


def test_junit_has_a_failure_for_a_regression_only() -> None:
    draws = random.Random(5)
    history = [run_of(draws) for _ in range(8)]
    bad, good = (
        ElementTree.fromstring(junit("best.json", compare(run_of(draws, slow), history, 0.01), 3.0)) for slow in ("data", "")
    )
    failure = bad.find("testcase/failure")
    assert failure is not None
    assert failure.get("message", "").startswith("REGRESSION: ")
    assert "part: data" in (failure.text or "")
    assert (bad.get("failures"), good.get("failures")) == ("1", "0")
