"""Which ranks go to which node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runner_contract import request_for

from executor.runners.ray.formation import count_gangs, lay_out, lay_out_kinds, tensor_span
from search_spaces.trial_config import TrialConfig


@pytest.mark.parametrize(
    ("world_size", "block", "rooms", "expected"),
    [
        (2, 1, {"a": 8, "b": 3}, [("b", 2)]),  # the tightest node that holds it
        (2, 1, {"a": 8, "b": 8}, [("a", 2)]),  # of those that are alike the first
        (8, 1, {"a": 6, "b": 6}, [("a", 4), ("b", 4)]),  # equal shares
        (6, 1, {"a": 2, "b": 4}, [("a", 2), ("b", 4)]),  # where there are none: full nodes, on as few as can be
        (8, 4, {"a": 6, "b": 6, "c": 1}, [("a", 4), ("b", 4)]),
        (6, 2, {"a": 3, "b": 4}, [("a", 2), ("b", 4)]),  # whole groups
        (6, 2, {"a": 3, "b": 3}, None),
        (4, 4, {"a": 3, "b": 3}, None),
        (4, 1, {"a": 3, "b": 3, "c": 3}, [("a", 2), ("b", 2)]),
        (1, 1, {}, None),
    ],
)
def test_layouts(world_size: int, block: int, rooms: dict[str, int], expected: list[tuple[str, int]] | None) -> None:
    assert lay_out(world_size, block, rooms) == expected


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)),
)
def test_a_layout_is_within_the_rooms_in_whole_blocks_and_there_is_one_where_blocks_fit(
    blocks: int, block: int, rooms: dict[str, int]
) -> None:
    found = lay_out(blocks * block, block, rooms)
    assert (found is not None) == (sum(room // block for room in rooms.values()) >= blocks)
    if found is not None:
        assert sum(share for _, share in found) == blocks * block
        assert all(0 < share <= rooms[name] and share % block == 0 for name, share in found)


@pytest.mark.parametrize(
    ("order", "span"),
    [("tp-cp-dp-pp", 2), ("pp-tp-cp-dp", 4), ("dp-cp-tp-pp", 4)],
)
def test_a_tensor_group_stretches_over_what_is_inside_it_in_the_mesh(order: str, span: int) -> None:
    config = TrialConfig(tensor_parallel_size=2, pipeline_parallel_size=2, rank_order=order)
    assert tensor_span(request_for(config=config, world_size=8)) == span


def test_without_a_tensor_group_any_rank_may_be_anywhere() -> None:
    assert tensor_span(request_for(config=TrialConfig(pipeline_parallel_size=2), world_size=8)) == 1


@pytest.mark.parametrize(("world_size", "most", "expected"), [(2, 9, 3), (2, 2, 2), (4, 9, 1), (8, 9, 0)])
def test_how_many_gangs_fit_side_by_side(world_size: int, most: int, expected: int) -> None:
    assert count_gangs(world_size, {"a": 5, "b": 2, "c": 0}, most) == expected


RESOURCES = {"a": {"fast": 1.0}, "b": {"slow": 1.0}, "c": {"slow": 1.0}}


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((("fast", 4), ("slow", 4)), [("a", 4), ("b", 4)]),
        ((("slow", 8), ("fast", 2)), [("b", 4), ("c", 4), ("a", 2)]),  # ranks in the order of the kinds
        ((("slow", 2), ("slow", 4)), [("b", 2), ("c", 4)]),
        ((("fast", 5),), None),
        ((("other", 1),), None),
    ],
)
def test_ranks_are_laid_on_the_nodes_that_they_are_for(
    kinds: tuple[tuple[str, int], ...], expected: list[tuple[str, int]] | None
) -> None:
    assert lay_out_kinds(kinds, 1, {"a": 4, "b": 4, "c": 4}, RESOURCES) == expected
