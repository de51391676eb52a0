"""Rows of a failure table: how they match, and what is told of one that has no meaning."""

import pytest

from search_spaces.errors import FailureTableError
from search_spaces.failure import Evidence, FailureRow, FailureTable, Sign, rows_from
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain

BASE = FailureTable(
    rows_from(
        {
            "killed": {"outcome": "LOST", "remedy": "look", "signals": ["SIGKILL"], "exit_codes": [137], "signs": ["oom_kill"]},
            "rest": {"outcome": "FAILED", "remedy": "look"},
        },
        FailureTable(()),
    )
)


@pytest.mark.parametrize(
    ("end", "name"),
    [
        (Evidence(exit_code=-9, signs=(Sign.OOM_KILL,)), "killed"),
        (Evidence(exit_code=137, signs=(Sign.OOM_KILL, Sign.HANG)), "killed"),
        (Evidence(exit_code=-9), "rest"),
        (Evidence(signs=(Sign.OOM_KILL,)), "rest"),
        (Evidence(exit_code=-99), "rest"),
        (Evidence(), "rest"),
    ],
)
def test_how_it_ended_and_every_sign_are_asked_for(end: Evidence, name: str) -> None:
    assert BASE.find(end)[0].name == name


@pytest.mark.parametrize(
    ("fields", "end", "matches"),
    [
        ({"message": ["^b"]}, Evidence(message="a\nbc"), True),
        ({"message": ["^b"]}, Evidence(output="b"), False),
        ({"said": ["b"]}, Evidence(output="abc"), True),
        ({"said": ["b"]}, Evidence(traceback="abc"), False),
        ({"message": ["x"], "traceback": ["b"]}, Evidence(traceback="abc"), True),
        ({"exceptions": ["OSError"], "message": ["b"]}, Evidence(exceptions=("OSError",), message="a"), False),
    ],
)
def test_one_pattern_is_enough(fields: dict, end: Evidence, matches: bool) -> None:
    (row,) = rows_from({"mine": {"outcome": "LOST", "remedy": "look", **fields}}, BASE)
    assert row.matches(end) is matches


def test_a_row_that_is_known_keeps_what_is_not_given() -> None:
    (row,) = rows_from({"killed": {"outcome": "INFEASIBLE", "retries": 2, "verify": True}}, BASE)
    assert (row.outcome, row.retries, row.verify, row.signals) == (Outcome.INFEASIBLE, 2, True, ("SIGKILL",))
    assert from_plain(FailureRow, to_plain(row)) == row


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"mine": {"outcome": "LOST"}}, "failures.mine.remedy: is missing; a row of a new name needs outcome and remedy"),
        ({"mine": 1}, "failures.mine: 1 is not a row; write [mine] and its fields below it"),
        ({"killed": {"retrys": 1}}, "failures.killed.retrys: is not a field of a row; did you mean retries?"),
        ({"killed": {"retries": -1}}, "failures.killed.retries: -1 is not a number of attempts; give 0 or more"),
        ({"killed": {"verify": True}}, "failures.killed.verify: needs an attempt to verify with; give retries of 1 or more"),
        ({"killed": {"signals": ["SIGNO"]}}, "failures.killed.signals: 'SIGNO' is not a signal; write SIGKILL, SIGTERM, …"),
        ({"killed": {"signals": "SIGKILL"}}, "failures.killed.signals: 'SIGKILL' is not a list; write [ … ]"),
        ({"killed": {"outcome": "LOSS"}}, "failures.killed.outcome: 'LOSS' is not known; use one of OK"),
        ({"killed": {"outcome": "OK"}}, "failures.killed.outcome: OK is not the outcome of a failure; use one of INFEASIBLE"),
        ({"killed": {"signs": ["oom"]}}, "failures.killed.signs: 'oom' is not known; use one of oom_kill"),
        ({"killed": {"said": ["("]}}, "failures.killed.said: '(' is not a regular expression (missing )"),
        ({"killed": {"output": [""]}}, "failures.killed.output: '' is not a regular expression; give text of up to"),
        ({"killed": {"retire": "yes"}}, "failures.killed.retire: 'yes' is not a boolean; give true or false"),
        ([], "failures: is not a table of rows; write [ROW] and its fields below it"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_one_line_with_its_remedy(tables: object, line: str) -> None:
    with pytest.raises(FailureTableError) as told:
        rows_from(tables, BASE)
    assert str(told.value).startswith(line)
    assert "\n" not in str(told.value)
