"""Stage 3's gathers ahead of use, on two real ranks: monotone in `prefetch_bucket_size`, within it, and without a cliff."""

from collections.abc import Iterator

import pytest

from benchmarks.engines.prefetch import BLOCKS, MODEL, Row, claims, measure, ranks

pytestmark = pytest.mark.nightly
"""`make oldest` runs these too."""


@pytest.fixture(scope="module")
def rows(forked_ranks: None) -> Iterator[list[Row]]:
    with ranks() as runner:
        yield measure(runner, "native")


def test_every_claim_of_the_page_holds(rows: list[Row]) -> None:
    assert [claim for holds, claim in claims(rows) if not holds] == []


def test_uses_compute_beside_a_gather_and_wait_for_none_unless_nothing_is_prefetched(rows: list[Row]) -> None:
    # The last use has nothing after it, and the embedding's gather includes the first block.
    assert {row.blocks: row.counts.in_flight for row in rows} == dict.fromkeys(BLOCKS, 2 * MODEL.num_layers + 1) | {0.0: 0}
    assert {row.blocks: row.counts.waited for row in rows} == dict.fromkeys(BLOCKS, 0) | {0.0: 2 * MODEL.num_layers + 2}
