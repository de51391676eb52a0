"""Documents that are shorter than samples: how they are laid into rows, and what of a row counts toward the loss.

A row is what a step trains `global_batch_size` of: `sequence_length` tokens. Without packing it is one document and padding;
with it, as many documents as first-fit decreasing puts there.
"""

import functools
from collections.abc import Callable

from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MOST_DOCUMENTS = 1000
"""Lengths that a workload may name: a sample of the user's own data, which says as much as all of them."""

Rows = tuple[tuple[int, ...], ...]
"""For each row the documents that it holds, as places in `Workload.document_lengths`."""


@functools.lru_cache(maxsize=64)
def packed_rows(lengths: tuple[int, ...], sequence_length: int) -> Rows:
    """Documents in rows by first-fit decreasing [Johnson 1973]: it needs at most 11/9 of the fewest rows possible, and 1.

    1. The longest documents come first; those that are as long, in the order in which they were given.
    2. Each goes into the first row that has room for it; a new one is begun where none has.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[document]
        row = next((place for place, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(sequence_length)
        rows[row].append(document)
        room[row] -= length
    return tuple(map(tuple, rows))


def rows_of(config: TrialConfig, workload: Workload) -> Rows:
    """The rows that all documents of a workload make, in the order in which they were made."""
    lengths = workload.document_lengths
    if config.pack_sequences:
        return packed_rows(lengths, workload.sequence_length)
    return tuple((document,) for document in range(len(lengths)))


def rows_share(config: TrialConfig, workload: Workload) -> float:
    """Tokens of documents as a share of the tokens of their rows, on the mean of all rows."""
    lengths = workload.document_lengths
    return sum(lengths) / (len(rows_of(config, workload)) * workload.sequence_length) if lengths else 1.0


def mean_flops(model: ModelSpec, workload: Workload) -> float:
    """FLOPs that the model needs for a whole sample's worth of tokens of documents, each of which looks at its own alone."""
    return _over_tokens(workload.document_lengths, lambda length: model.flops_per_token(length)) * workload.sequence_length


@functools.lru_cache(maxsize=64)
def looked_at(lengths: tuple[int, ...], sequence_length: int) -> float:
    """Tokens of its own document that a token of a packed row looks at, causality not discounted; padding behind the last
    document is one more, which is computed in vain.
    """
    rows = packed_rows(lengths, sequence_length)
    padding = [sequence_length - sum(lengths[document] for document in row) for row in rows]
    return _over_tokens((*lengths, *padding), float)


def documents_problem(lengths: object, sequence_length: int) -> tuple[str, str] | None:
    """What is wrong with a workload's lengths, and the remedy; None: nothing."""
    if not isinstance(lengths, list | tuple):
        return f"{lengths!r} is no list of numbers", "list the tokens of each document, such as [128, 17, 64]"
    if len(lengths) > MOST_DOCUMENTS:
        return f"{len(lengths)} lengths are more than {MOST_DOCUMENTS}", f"give a sample of at most {MOST_DOCUMENTS} documents"
    wrong = next((one for one in lengths if not isinstance(one, int) or isinstance(one, bool) or one < 1), None)
    if wrong is not None:
        return f"{wrong!r} is not a whole number of 1 or more", "give the tokens of each document"
    longest = max(lengths, default=0)
    if longest > sequence_length:
        problem = f"a document of {longest} tokens does not fit into a sample of {sequence_length}"
        return problem, "cut such documents into several, or raise the sequence length (--sequence-length)"
    return None


def _over_tokens(lengths: tuple[int, ...], of: Callable[[int], float]) -> float:
    """The mean, over all tokens, of what each has by its document's length."""
    return sum(of(length) * length for length in lengths if length) / sum(lengths)
