"""Published pairs of runs: predicted changes have the measured signs, and no sure verdict is wrong."""

import tomllib

from benchmarks.prediction.bridge_pairs import PAIRS, Change, Predicted, changes, page, predicted


def test_a_sign_is_right_in_its_direction_and_nothing_is_nothing() -> None:
    def change(measured: float, expected: float) -> Change:
        return Change(group="group", run="run", quantity="peak", measured=measured, predicted=expected)

    assert change(-0.02, -0.5).right and change(0.1, 0.001).right and change(0.0001, -0.01).right
    assert not (change(-0.02, 0.01).right or change(0.1, 0.0).right or change(0.0001, 0.05).right)


def test_both_targets_are_met() -> None:
    groups = tomllib.loads(PAIRS.read_text("utf-8"))["group"]
    answers = {
        group["name"]: {run["name"]: predicted(group, run) for run in group["runs"] if "unlike" not in run} for group in groups
    }
    lines, holds = page(groups, answers)
    assert holds, lines


def test_a_sure_verdict_that_is_wrong_is_named() -> None:
    group = {
        "name": "group", "page": "page", "cluster": "cluster",
        "runs": [{"name": "first", "gb": 2.0, "ran": True}, {"name": "second", "gb": 1.0, "ran": False}],
    }  # fmt: skip
    answers = {
        "group": {name: Predicted(gb=gb, seconds=1.0, probability=0.99) for name, gb in (("first", 2.0), ("second", 1.5))}
    }
    assert [change.right for change in changes(group, answers["group"])] == [True]
    lines, holds = page([group], answers)
    assert not holds
    assert any("second: it fits with a probability of 0.99; it ran out of memory" in line for line in lines)
