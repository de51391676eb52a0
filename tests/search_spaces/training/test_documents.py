"""Documents in rows: first-fit decreasing, what of rows is useful, and what may be stated of documents."""

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.models.huggingface import resolve_model
from search_spaces.space import SearchSpace
from search_spaces.training.data_schedule import (
    MOST_DOCUMENTS,
    attended_tokens,
    documents_problem,
    flops_per_sample,
    packed_rows,
    rows_of,
    useful_samples,
    useful_share,
)
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

LLAMA = resolve_model("llama-tiny")
WORK = Workload(global_batch_size=4, sequence_length=16, document_lengths=(16, 9, 5, 3, 2, 7, 1, 12, 4))
PACKED = TrialConfig(pack_sequences=True)
Lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60).map(tuple)


def test_the_longest_documents_come_first_and_each_goes_to_the_first_row_with_room() -> None:
    lengths = WORK.document_lengths
    rows = [[lengths[document] for document in row] for row in packed_rows(lengths, 16)]
    assert rows == [[16], [12, 4], [9, 7], [5, 3, 2, 1]]
    # Of documents that are as long, the first that was given comes first.
    assert packed_rows((4, 4, 4), 8) == ((0, 1), (2,))


@given(lengths=Lengths)
def test_every_document_has_one_row_and_rows_are_few(lengths: tuple[int, ...]) -> None:
    rows = packed_rows(lengths, 40)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    used = [sum(lengths[document] for document in row) for row in rows]
    assert max(used) <= 40
    # No two rows would have fitted into one, so that at most one of them is less than half full.
    assert sum(2 * one <= 40 for one in used) <= 1
    assert math.ceil(sum(lengths) / 40) <= len(rows) <= len(lengths)


@given(lengths=Lengths)
def test_it_packs_where_two_documents_fit_into_a_row(lengths: tuple[int, ...]) -> None:
    work = dataclasses.replace(WORK, sequence_length=40, document_lengths=lengths)
    assert work.packs == (len(packed_rows(lengths, 40)) < len(lengths))
    share, padded = useful_share(PACKED, work), useful_share(TrialConfig(), work)
    assert padded == pytest.approx(sum(lengths) / len(lengths) / 40)
    assert padded <= share <= 1.0


@given(lengths=Lengths, chunk=st.integers(1, 40))
def test_chunks_cut_documents_and_padding(lengths: tuple[int, ...], chunk: int) -> None:
    rows = packed_rows(lengths, 40)
    whole = [*lengths, *(40 - sum(lengths[document] for document in row) for row in rows)]
    seen = sum(min(chunk, length - token // chunk * chunk) for length in whole for token in range(length))
    assert attended_tokens(lengths, 40, chunk) == pytest.approx(seen / (40 * len(rows)))


def test_what_counts_are_tokens_of_documents() -> None:
    total = sum(WORK.document_lengths)
    assert useful_samples(PACKED, WORK) == pytest.approx(4 * total / (4 * 16))
    assert useful_samples(TrialConfig(), WORK) == pytest.approx(4 * total / (9 * 16))
    assert rows_of(TrialConfig(), WORK) == tuple((place,) for place in range(9))
    whole = dataclasses.replace(WORK, document_lengths=())
    assert useful_samples(PACKED, whole) == 4


def test_a_token_looks_at_its_own_document_and_flops_are_of_useful_tokens() -> None:
    lengths = WORK.document_lengths
    # Five tokens of padding behind the last row are computed as a document would be.
    assert attended_tokens(lengths, 16) == pytest.approx((sum(one * one for one in lengths) + 25) / 64)
    per_document = sum(LLAMA.flops_per_token(one) * one for one in lengths)
    for config in (PACKED, TrialConfig()):
        assert flops_per_sample(LLAMA, config, WORK) == pytest.approx(per_document / sum(lengths) * 16)
    full = dataclasses.replace(WORK, document_lengths=(16, 16))
    assert flops_per_sample(LLAMA, PACKED, full) == pytest.approx(LLAMA.flops_per_token(16) * 16)


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ("17", "is not a list of numbers"),
        ((8, 0), "0 is not a whole number of 1 or more"),
        ((8, -3), "-3 is not a whole number"),
        ((8, 2.5), "2.5 is not a whole number"),
        ((8, True), "True is not a whole number"),
        ((8, 17), "a document of 17 tokens does not fit into a sample of 16"),
        ((1,) * (MOST_DOCUMENTS + 1), "1001 lengths are more than 1000"),
    ],
)
def test_lengths_that_no_row_has_are_told(lengths: object, told: str) -> None:
    found = documents_problem(lengths, 16)
    assert found is not None
    assert told in found[0]
    assert documents_problem((16, 1), 16) is None


@pytest.mark.parametrize("lengths", [(), (16,), (16, 9, 8)])
def test_what_packs_nothing_is_canonically_off(lengths: tuple[int, ...], make_space: Callable[..., SearchSpace]) -> None:
    space = make_space({"pack_sequences": (False, True)})
    space = dataclasses.replace(space, workload=dataclasses.replace(WORK, document_lengths=lengths, global_batch_size=8))
    assert not space.canonical(PACKED).pack_sequences
    assert space.count() == 1
    packing = dataclasses.replace(space, workload=dataclasses.replace(space.workload, document_lengths=(9, 7)))
    assert packing.canonical(PACKED).pack_sequences
    assert packing.count() == 2


def test_configurations_without_packing_keep_their_hashes() -> None:
    assert "pack_sequences" not in TrialConfig().values()
    assert PACKED.values()["pack_sequences"] is True
    assert TrialConfig().hash != PACKED.hash
