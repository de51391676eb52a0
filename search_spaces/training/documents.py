"""Documents shorter than samples: how they are packed into rows, and the share of a row that counts toward the loss.

A row has `sequence_length` tokens; a step trains `global_batch_size` rows. Without packing a row is one document and padding;
with packing it has as many documents as first-fit decreasing puts there.
"""

import functools
from collections.abc import Callable

from search_spaces.models.model import ModelSpec
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MOST_DOCUMENTS = 1000
"""Maximum lengths in a workload: a sample of the user's data is as informative as all of them."""

Rows = tuple[tuple[int, ...], ...]
"""The documents in each row, as indices in `Workload.document_lengths`."""


@functools.lru_cache(maxsize=64)
def packed_rows(lengths: tuple[int, ...], sequence_length: int) -> Rows:
    """Pack documents into rows by first-fit decreasing [Johnson 1973]: at most 11/9 of the minimum number of rows, plus 1.

    1. Sort the documents by length, longest first; equal lengths keep their order.
    2. Put each into the first row with enough free tokens; if there is none, start a new row.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[document]
        row = next((index for index, free_tokens in enumerate(free) if free_tokens >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(sequence_length)
        rows[row].append(document)
        free[row] -= length
    return tuple(map(tuple, rows))


def rows_of(config: TrialConfig, workload: Workload) -> Rows:
    """The rows of all documents of a workload, in the order of creation."""
    lengths = workload.document_lengths
    if config.pack_sequences:
        return packed_rows(lengths, workload.sequence_length)
    return tuple((document,) for document in range(len(lengths)))


def rows_share(config: TrialConfig, workload: Workload) -> float:
    """Document tokens as a share of all tokens, averaged over all rows."""
    lengths = workload.document_lengths
    return sum(lengths) / (len(rows_of(config, workload)) * workload.sequence_length) if lengths else 1.0


def mean_flops(model: ModelSpec, workload: Workload) -> float:
    """Model FLOPs per full-length sample of document tokens; each token attends only to its own document."""
    return _over_tokens(workload.document_lengths, lambda length: model.flops_per_token(length)) * workload.sequence_length


@functools.lru_cache(maxsize=64)
def attended_tokens(lengths: tuple[int, ...], sequence_length: int, chunk: int = 0) -> float:
    """Mean number of tokens of its own document that a token of a packed row attends to, causality not discounted; the padding
    after the last document counts as one more document, because it is computed too. `chunk`: tokens that a document is cut
    after, if attention stays within chunks; 0: it is not cut.
    """
    rows = packed_rows(lengths, sequence_length)
    padding = [sequence_length - sum(lengths[document] for document in row) for row in rows]
    whole = (*lengths, *padding)
    pieces = [min(chunk, length - first) for length in whole for first in range(0, length, chunk)] if chunk else whole
    return _over_tokens(tuple(pieces), float)


def documents_problem(lengths: object, sequence_length: int) -> tuple[str, str] | None:
    """The problem with a workload's lengths, and the remedy; None: no problem."""
    if not isinstance(lengths, list | tuple):
        return f"{lengths!r} is not a list of numbers", "list the tokens of each document, such as [128, 17, 64]"
    if len(lengths) > MOST_DOCUMENTS:
        return f"{len(lengths)} lengths are more than {MOST_DOCUMENTS}", f"give a sample of at most {MOST_DOCUMENTS} documents"
    wrong = next((length for length in lengths if not isinstance(length, int) or isinstance(length, bool) or length < 1), None)
    if wrong is not None:
        return f"{wrong!r} is not a whole number of 1 or more", "give the tokens of each document"
    longest = max(lengths, default=0)
    if longest > sequence_length:
        problem = f"a document of {longest} tokens does not fit into a sample of {sequence_length}"
        return problem, "cut such documents into several, or raise the sequence length (--sequence-length)"
    return None


def _over_tokens(lengths: tuple[int, ...], of: Callable[[int], float]) -> float:
    """The mean over all tokens of a function of their document's length."""
    return sum(of(length) * length for length in lengths if length) / sum(lengths)
