"""Plain data through JSON text and back."""

import math

from hypothesis import given
from hypothesis import strategies as st

from storage.codec import clean, dump_json, load_json

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def same(left: object, right: object) -> bool:
    """Equal, with NaN equal to itself."""
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@given(plain)
def test_json_comes_back_as_it_was(value: object) -> None:
    text = dump_json(value)
    assert same(load_json(text), value)
    assert "NaN" not in text or "NaN" in repr(value)


@given(st.text(st.characters(codec=None)))
def test_clean_text_is_taken_by_any_text_column(text: str) -> None:
    assert "\0" not in clean(text).encode("utf-8").decode("utf-8")


def test_clean_leaves_good_text_alone() -> None:
    assert clean("größer ≥ 3 — ok") == "größer ≥ 3 — ok"
