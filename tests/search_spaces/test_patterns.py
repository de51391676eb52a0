"""Regular expressions of others: in linear time, of a bounded size, refused in one line."""

import re
import time

import pytest

import search_spaces.patterns as module
from search_spaces.errors import FailureTableError, ModelFormatError, PatternError
from search_spaces.failure import MOST_PATTERNS, Evidence, FailureTable, rows_from
from search_spaces.patterns import LINE_BYTES, LINE_MATCHES, SEARCHED_BYTES, compiled

EXPONENTIAL = (r"(?:(?:.|.)*)*\x01", r"(x+x+)+y", r"(?:a|aa)+$b", r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)[0-9]z")
"""Python's engine needs longer than a life for each of them on `LINE`."""
LINE = "x" * 3000 + "a" * 3000
CPU_SECONDS = 5.0
"""Where milliseconds are meant: tests share their machine."""


@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_no_expression_takes_long(pattern: str) -> None:
    began = time.process_time()
    assert not compiled(pattern).found_in(LINE)
    assert time.process_time() - began < CPU_SECONDS


@pytest.mark.prove
def test_the_largest_expressions_of_a_table_take_seconds_at_most() -> None:
    rows = {f"r{n}": {"outcome": "LOST", "remedy": "-", "said": ["(?:a?){300}" + "a" * 90 + f"b{n}"]} for n in range(5)}
    table = FailureTable(
        rows_from(rows, FailureTable(())) + rows_from({"rest": {"outcome": "LOST", "remedy": "-"}}, FailureTable(()))
    )
    began = time.process_time()
    assert table.find(Evidence(output="a" * 10**6))[0].name == "rest"
    assert time.process_time() - began < 4 * CPU_SECONDS


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"(?=x)y", r"pattern: '(?=x)y' is not a regular expression (invalid perl operator: (?=); write it as RE2 reads it"),
        (r"(?<!x)y", r"pattern: '(?<!x)y' is not a regular expression (invalid perl operator: (?<!); write it as RE2 reads it"),
        (r"(a)\1", r"pattern: '(a)\\1' is not a regular expression (invalid escape sequence: \1); write it as RE2 reads it"),
        ("(?:.{1,30}){30}", "pattern: '(?:.{1,30}){30}' is too large (1,000 steps of RE2 at most); repeat less"),
        ("x{1001}", "pattern: 'x{1001}' is not a regular expression (invalid repetition size"),
        ("x" * 1001, f"pattern: '{'x' * 79}… is not a regular expression; give text of up to 1000 characters"),
        ("", "pattern: '' is not a regular expression; give text"),
        (r"a\\{,3}", r"pattern: 'a\\\\{,3}' has {,n}, which RE2 reads as literal text; write {0,n}"),
        ("[^[:alpha:]]", "pattern: '[^[:alpha:]]' has a class of POSIX, which Python lacks; write [a-z]"),
        (r"x\z", r"pattern: 'x\\z' has \p, \z, \C or \Q, which Python lacks; write [a-z], $ or ."),
    ],
)
def test_what_cannot_be_matched_in_linear_time_is_refused_by_name(pattern: str, line: str) -> None:
    with pytest.raises(PatternError) as told:
        compiled(pattern)
    assert str(told.value).startswith(line)
    assert "\n" not in str(told.value)


def test_rows_of_many_expressions_are_refused_before_one_is_compiled() -> None:
    compiled.cache_clear()
    rows = {f"r{n}": {"outcome": "LOST", "remedy": "-", "said": [f"p{n}-{m}" for m in range(100)]} for n in range(100)}
    with pytest.raises(FailureTableError, match=f"failures: has 10,000 regular expressions; the limit is {MOST_PATTERNS}"):
        rows_from(rows, FailureTable(()))
    assert compiled.cache_info().currsize == 0


def test_rows_of_large_expressions_are_refused() -> None:
    rows = {f"r{n}": {"outcome": "LOST", "remedy": "-", "said": [f"x{{900}}{n}"]} for n in range(10)}
    with pytest.raises(FailureTableError, match=r"failures: regular expressions have .* RE2 instructions in total"):
        rows_from(rows, FailureTable(()))


def test_what_is_kept_is_bounded() -> None:
    for number in range(1000):
        compiled(f"p{number}")
    assert compiled.cache_info().currsize == compiled.cache_info().maxsize == 512


def test_the_end_of_a_text_and_the_beginning_of_a_line_are_searched() -> None:
    assert compiled("^end$").found_in("x" * 10**6 + "\nend")
    assert not compiled("begin").found_in("begin" + "x" * SEARCHED_BYTES)
    number = compiled(r"(?P<step>\d)")
    assert list(number.readings("é1 2")) == [{"step": "1"}, {"step": "2"}]
    assert len(list(number.readings("1" * 10**6))) == LINE_MATCHES
    assert list(number.readings("x" * LINE_BYTES + "1")) == []


def test_text_that_is_no_unicode_is_searched() -> None:
    assert compiled("a.b").found_in("a\udcffb")
    assert list(compiled("(?P<a>x)?y").readings("y\ud800")) == [{}]


def test_where_re2_is_missing_ranks_match_with_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "re2", None)
    compiled.cache_clear()
    assert compiled(r"^b(?P<rate>\d+)$").found_in("a\nb12\nc")
    assert list(compiled(r"b(?P<rate>\d+)").readings("b12")) == [{"rate": "12"}]
    with pytest.raises(PatternError, match=re.escape("'(' is not a regular expression")):
        compiled("(")
    compiled.cache_clear()


def test_a_commands_pattern_is_read_by_the_same_engine() -> None:
    from search_spaces.models.command import CommandModel

    with pytest.raises(ModelFormatError, match=r"command.pattern: '\(\?=x\)' is not a regular expression"):
        CommandModel(arguments=("python", "train.py"), folder="/", pattern="(?=x)")


def test_what_only_looks_like_another_meaning_is_read() -> None:
    assert compiled(r"a\{,3\}").found_in("a{,3}")
    assert compiled(r"\\z").found_in(r"\z")
    assert compiled("[[]:").found_in("[:")
