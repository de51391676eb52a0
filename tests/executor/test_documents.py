"""Batches of documents: the same texts packed and padded, targets inside of documents alone, positions that begin anew."""

import itertools

import pytest
import torch
from torch import Tensor

from executor.batches import NO_TARGET, DocumentData, document_data, text_data, useful_tokens
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

LENGTHS = (16, 9, 5, 3, 2, 7, 1, 12, 4)
VOCABULARY = 211


def data(packed: bool, rows: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> DocumentData:
    work = Workload(global_batch_size=rows, sequence_length=16, document_lengths=lengths, seed=seed)
    return document_data(TrialConfig(pack_sequences=packed), work, VOCABULARY)


def documents(batch: dict[str, Tensor]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens and labels of each document: one begins where places begin anew, or with its row; padding has no targets."""
    found = []
    places = batch.get("places", torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"]))
    for tokens, labels, row in zip(batch["tokens"].tolist(), batch["labels"].tolist(), places.tolist(), strict=True):
        begins = [place for place, inside in enumerate(row) if inside == 0]
        for first, end in itertools.pairwise([*begins, len(row)]):
            targets = [label for label in labels[first:end] if label != NO_TARGET]
            last = first + len(targets)
            assert labels[first:end] == targets + [NO_TARGET] * (end - last)
            assert not any(tokens[last:end])
            assert targets[:-1] == tokens[first + 1 : last]
            if targets:
                found.append((tuple(tokens[first:last]), tuple(targets)))
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_a_pass_has_the_same_documents_packed_and_padded(seed: int) -> None:
    padded, packed = data(False, 9, seed=seed).global_batch(0), data(True, 4, seed=seed).global_batch(0)
    assert packed["tokens"].shape == packed["labels"].shape == packed["places"].shape == (4, 16)
    assert list(padded) == ["tokens", "labels"]
    texts = documents(padded)
    assert sorted(len(tokens) for tokens, _ in texts) == sorted(LENGTHS)
    assert sorted(texts) == sorted(documents(packed))
    assert useful_tokens(padded) == useful_tokens(packed) == sum(LENGTHS)


def test_places_begin_anew_with_each_document_and_with_the_padding() -> None:
    batch = data(True, 4).global_batch(0)
    rows = {tuple(row) for row in batch["places"].tolist()}
    told = ((16,), (12, 4), (9, 7), (5, 3, 2, 1, 5))
    assert rows == {tuple(itertools.chain.from_iterable(range(one) for one in row)) for row in told}
    ends = (batch["labels"] == NO_TARGET).sum(1)
    assert sorted(ends.tolist()) == [0, 0, 0, 5]


def test_the_next_pass_begins_where_the_last_one_ends_in_another_order() -> None:
    whole, steps = data(True, 8).global_batch(0), [data(True, 2).global_batch(step) for step in range(4)]
    for name, value in whole.items():
        assert torch.equal(value, torch.cat([step[name] for step in steps]))
    passes = whole["tokens"].split(4)
    assert sorted(passes[0].tolist()) == sorted(passes[1].tolist())
    orders = {str([row.tolist() for row in part]) for part in data(True, 40).global_batch(0)["tokens"].split(4)}
    assert len(orders) > 3


def test_whole_documents_are_samples_like_others() -> None:
    batch = data(False, 3, lengths=(16,)).global_batch(0)
    plain = text_data(Workload(global_batch_size=3, sequence_length=16), VOCABULARY).global_batch(0)
    assert {name: value.shape for name, value in batch.items()} == {name: value.shape for name, value in plain.items()}
    assert useful_tokens(batch) == 48
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
