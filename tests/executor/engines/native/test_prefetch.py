"""Stage 3's gathers ahead of use, on two real ranks: monotone in `prefetch_bucket_size`, within it, and without a cliff."""

from collections.abc import Iterator

import pytest

from benchmarks.engines.prefetch import BLOCK, BLOCKS, MODEL, Row, claims, measure, ranks

pytestmark = pytest.mark.nightly
"""`make oldest` runs these too."""


@pytest.fixture(scope="module")
def rows(forked_ranks: None) -> Iterator[list[Row]]:
    with ranks() as runner:
        yield measure(runner, "native")


def test_every_claim_of_the_page_holds(rows: list[Row]) -> None:
    assert [claim for holds, claim in claims(rows) if not holds] == []


def test_a_part_of_a_block_is_gathered_ahead_where_the_whole_is_larger_than_the_budget(rows: list[Row]) -> None:
    flights = {row.blocks: row.counts.in_flight for row in rows}
    # All but the embedding, which what follows comes along with, and the last, which nothing follows.
    assert flights == dict.fromkeys(BLOCKS, 2 * MODEL.num_layers + 1) | {0.0: 0}
    waited = {row.blocks: row.counts.gathered_on_use / row.counts.gathered for row in rows}
    assert waited[0.0] == 1 > waited[0.25] > waited[0.5] > waited[0.9999] == waited[1.0]


def test_with_room_for_a_block_only_the_first_use_waits(rows: list[Row]) -> None:
    assert {row.counts.waited for row in rows if row.blocks * BLOCK >= int(0.9999 * BLOCK)} == {1}
